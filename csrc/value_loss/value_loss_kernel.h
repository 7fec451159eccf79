// Arguments and entry point of the CPU value loss kernel, one per capability.
#pragma once

#include "common/capability.h"
#include "common/token_rows_kernel.h"
#include "value_loss/value_loss_args.h"

namespace fastrl {

struct ValueLossArgs : ValueLossViews {
  const TokenRange* chunks = nullptr;
  const double* row_weights = nullptr;  // [rows]: the factor of each token's loss
};

// Chunks [first, last): adds to `sums` and writes the gradient if it is wanted.
#define FASTRL_DECLARE(capability)                                                                 \
  namespace capability {                                                                           \
  void value_loss_chunks(const ValueLossArgs& args, int64_t first, int64_t last, ValueSums* sums); \
  }
FASTRL_FOR_EACH_CAPABILITY(FASTRL_DECLARE)
#undef FASTRL_DECLARE

}  // namespace fastrl
