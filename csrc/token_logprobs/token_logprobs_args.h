// Arguments of token log-probabilities, on CPU and CUDA.
#pragma once

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

  FASTRL_HD int64_t begin(int64_t row) const {
    return row / inner_rows * outer_stride + row % inner_rows * inner_stride;
  }
};

constexpr int kNumStatistics = 3;

// "Result dtype" is double for double logits, float for the rest.
struct TokenLogprobsArgs {
  LogitsView logits;
  const int64_t* tokens = nullptr;     // [rows]
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
  void* grad_logits = nullptr;         // [rows, V], kind of the logits
  bool in_place = false;               // grad_logits are the logits; otherwise they are dense
  bool stream = false;                 // grad_logits is too large to stay in the caches

  FASTRL_HD int64_t grad_begin(int64_t row) const {
    return in_place ? forward.logits.begin(row) : row * forward.logits.classes;
  }
};

}  // namespace fastrl
