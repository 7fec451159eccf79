// Arguments and sums of the value loss, on CPU and CUDA.
#pragma once

#include "common/aggregation.h"
#include "common/views.h"

namespace fastrl {

struct ValueLossViews {
  Rows rows;
  FloatView values, old_values, returns;  // [rows, T] or [N]; old_values may be null: no clip
  MaskView mask;
  double clip = 0;
  double delta = 0;             // infinite for the squared error
  void* grad_values = nullptr;  // dense, in the dtype of values; null: not wanted
  int64_t out_stride = 0;
};

// Sums over tokens; the first is of weighted losses.
struct ValueSums {
  double loss = 0, nonfinite = 0, clipped = 0;
  double error = 0, error_sq = 0, target = 0, target_sq = 0, value = 0;

  FASTRL_HD void add(const ValueSums& other) {
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

constexpr int kValueMetrics = 9;

// In the order of VALUE_METRICS.
FASTRL_HD void value_metrics(const TokenCounts& counts, const ValueSums& sums, double* out) {
  const double metrics[kValueMetrics] = {
      counts.tokens, counts.sequences, sums.nonfinite, sums.clipped, sums.error,
      sums.error_sq, sums.target,      sums.target_sq, sums.value,
  };
  for (int i = 0; i < kValueMetrics; ++i) out[i] = metrics[i];
}

}  // namespace fastrl
