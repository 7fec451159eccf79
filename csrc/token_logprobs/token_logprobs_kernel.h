// Arguments and entry points of the CPU kernels for token log-probabilities, one per capability.
#pragma once

#include "common/capability.h"
#include "common/views.h"

namespace fastrl {

// Rows of logits at up to two strides, so that a slice of [B, T, V] along T is read in place.
struct LogitsView {
  const void* data = nullptr;
  Kind kind = Kind::f32;
  int64_t classes = 0;     // V; the stride along it is one
  int64_t inner_rows = 1;  // row r is (r / inner_rows, r % inner_rows)
  int64_t outer_stride = 0;
  int64_t inner_stride = 0;

  int64_t begin(int64_t row) const {
    return row / inner_rows * outer_stride + row % inner_rows * inner_stride;
  }
};

// "Result dtype" is double for double logits, float for the rest.
struct TokenLogprobsArgs {
  LogitsView logits;
  const int64_t* tokens = nullptr;     // [rows], each in [0, V)
  const void* temperatures = nullptr;  // [rows] in the result dtype; null: the scalar below
  double temperature = 1.0;
  void* logp = nullptr;     // [rows], result dtype
  void* entropy = nullptr;  // same, or null
  void* statistics =
      nullptr;  // [rows, 3], result dtype: largest logit, sum of e^x, mean of x (0 without entropy)
};

struct TokenLogprobsGradArgs {
  TokenLogprobsArgs forward;        // logp and entropy unused; statistics as the forward wrote them
  const void* grad_logp = nullptr;  // [rows], result dtype, or null: zero
  const void* grad_entropy = nullptr;  // same
  void* grad_logits = nullptr;         // [rows, V] dense, kind of the logits; may be the logits
  bool stream = false;                 // grad_logits is too large to stay in the caches
};

#define FASTRL_DECLARE(capability)                                                              \
  namespace capability {                                                                        \
  void token_logprobs_rows(const TokenLogprobsArgs& args, int64_t first_row, int64_t last_row); \
  void token_logprobs_grad_rows(const TokenLogprobsGradArgs& args, int64_t first_row,           \
                                int64_t last_row);                                              \
  }
FASTRL_FOR_EACH_CAPABILITY(FASTRL_DECLARE)
#undef FASTRL_DECLARE

}  // namespace fastrl
