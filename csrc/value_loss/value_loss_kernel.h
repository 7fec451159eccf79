// Arguments and entry point of the CPU value loss kernel, one per capability.
#pragma once

#include "common/capability.h"
#include "common/token_rows_kernel.h"
#include "common/views.h"

namespace fastrl {

// Sums over the tokens of a task; the first is of weighted losses.
struct ValueSums {
  double loss = 0, nonfinite = 0, clipped = 0;
  double error = 0, error_sq = 0, target = 0, target_sq = 0, value = 0;

  void add(const ValueSums& other) {
    loss += other.loss;
    nonfinite += other.nonfinite;
    clipped += other.clipped;
    error += other.error;
    error_sq += other.error_sq;
    target += other.target;
    target_sq += other.target_sq;
    value += other.value;
  }
};

struct ValueLossArgs {
  Rows rows;
  FloatView values, old_values, returns;  // [rows, T] or [N]; old_values may be null: no clip
  MaskView mask;
  double clip = 0;
  double delta = 0;  // infinite for the squared error
  const TokenRange* chunks = nullptr;
  const double* row_weights = nullptr;  // [rows]: the factor of each token's loss
  void* grad_values = nullptr;          // dense, in the dtype of values; null: not wanted
  int64_t out_stride = 0;
};

// Chunks [first, last): adds to `sums` and writes the gradient if it is wanted.
#define FASTRL_DECLARE(capability)                                                                 \
  namespace capability {                                                                           \
  void value_loss_chunks(const ValueLossArgs& args, int64_t first, int64_t last, ValueSums* sums); \
  }
FASTRL_FOR_EACH_CAPABILITY(FASTRL_DECLARE)
#undef FASTRL_DECLARE

}  // namespace fastrl
