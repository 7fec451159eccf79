// Arguments and sums of the policy loss, on CPU and CUDA.
#pragma once

#include <cmath>

#include "common/aggregation.h"
#include "common/views.h"
#include "policy_loss/policy_loss_core.h"

namespace fastrl {

// An input per token, or per row when `per_row`; null data: not given.
struct TokenInput {
  FloatView view;
  bool per_row = false;
};

struct PolicyLossViews {
  Rows rows;
  FloatView logp, old_logp, ref_logp, entropy;  // [rows, T] or [N]; the last two may be null
  TokenInput advantages, is_weights;
  MaskView mask;
  PolicyTerms<double> terms;
  void* grad_logp = nullptr;     // dense, in the dtype of logp; null: not wanted
  void* grad_entropy = nullptr;  // the same for entropy
  int64_t out_stride = 0;
};

template <typename S>
FASTRL_HD PolicyTerms<S> terms_in(const PolicyTerms<double>& d) {
  PolicyTerms<S> t;
  t.ratio = d.ratio;
  t.surrogate = d.surrogate;
  t.kl = d.kl;
  t.kl_grad = d.kl_grad;
  t.ratio_low = static_cast<S>(d.ratio_low);
  t.ratio_high = static_cast<S>(d.ratio_high);
  t.dual_clip = static_cast<S>(d.dual_clip);
  t.ratio_cap = static_cast<S>(d.ratio_cap);
  t.log_ratio_clamp = static_cast<S>(d.log_ratio_clamp);
  t.kl_coef = static_cast<S>(d.kl_coef);
  t.kl_input_clamp = static_cast<S>(d.kl_input_clamp);
  t.kl_clamp = static_cast<S>(d.kl_clamp);
  t.entropy_coef = static_cast<S>(d.entropy_coef);
  t.has_cap = d.has_cap;
  return t;
}

// Sums over tokens; the first three are of weighted losses.
struct PolicySums {
  double policy_term = 0, kl_term = 0, entropy_term = 0;
  double nonfinite = 0, clip_high = 0, clip_low = 0, clipped = 0, dual_clip = 0;
  double log_ratio = 0, kl3 = 0, ref_kl = 0, entropy = 0, ratio = 0, ratio_sq = 0;
  double ratio_min = HUGE_VAL, ratio_max = -HUGE_VAL;

  FASTRL_HD void add(const PolicySums& other) {
    policy_term += other.policy_term;
    kl_term += other.kl_term;
    entropy_term += other.entropy_term;
    nonfinite += other.nonfinite;
    clip_high += other.clip_high;
    clip_low += other.clip_low;
    clipped += other.clipped;
    dual_clip += other.dual_clip;
    log_ratio += other.log_ratio;
    kl3 += other.kl3;
    ref_kl += other.ref_kl;
    entropy += other.entropy;
    ratio += other.ratio;
    ratio_sq += other.ratio_sq;
    ratio_min = other.ratio_min < ratio_min ? other.ratio_min : ratio_min;
    ratio_max = other.ratio_max > ratio_max ? other.ratio_max : ratio_max;
  }
};

FASTRL_HD double policy_loss_of(const PolicyTerms<double>& terms, const PolicySums& sums) {
  return sums.policy_term + terms.kl_coef * sums.kl_term - terms.entropy_coef * sums.entropy_term;
}

constexpr int kPolicyMetrics = 18;

// In the order of POLICY_METRICS.
FASTRL_HD void policy_metrics(const TokenCounts& counts, const PolicySums& sums, double* out) {
  const bool is_empty = counts.tokens == 0;
  const double metrics[kPolicyMetrics] = {
      counts.tokens,
      counts.sequences,
      sums.nonfinite,
      sums.clip_high,
      sums.clip_low,
      sums.clipped,
      sums.dual_clip,
      0.0 - sums.log_ratio,
      sums.kl3,
      sums.ref_kl,
      sums.entropy,
      sums.ratio,
      sums.ratio_sq,
      is_empty ? 1.0 : sums.ratio_min,
      is_empty ? 1.0 : sums.ratio_max,
      sums.policy_term,
      sums.kl_term,
      sums.entropy_term,
  };
  for (int i = 0; i < kPolicyMetrics; ++i) out[i] = metrics[i];
}

}  // namespace fastrl
