// Arguments and entry points of the CPU policy loss kernels, one per capability.
#pragma once

#include <cmath>

#include "common/capability.h"
#include "common/token_rows_kernel.h"
#include "common/views.h"
#include "policy_loss/policy_loss_core.h"

namespace fastrl {

// An input per token, or per row when `per_row`; null data: not given.
struct TokenInput {
  FloatView view;
  bool per_row = false;
};

// Sums over the tokens of a task; the first three are of weighted losses.
struct PolicySums {
  double policy_term = 0, kl_term = 0, entropy_term = 0;
  double nonfinite = 0, clip_high = 0, clip_low = 0, clipped = 0, dual_clip = 0;
  double log_ratio = 0, kl3 = 0, ref_kl = 0, entropy = 0, ratio = 0, ratio_sq = 0;
  double ratio_min = HUGE_VAL, ratio_max = -HUGE_VAL;

  void add(const PolicySums& other) {
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

// Per row; filled between the passes of the sequence ratios.
struct RowRatio {
  double log_ratio = 0;  // mean of logp - old_logp
  double gradient = 0;   // of an unweighted loss, at each logp of the row through the ratio
};

struct PolicyLossArgs {
  Rows rows;
  FloatView logp, old_logp, ref_logp, entropy;  // [rows, T] or [N]; the last two may be null
  TokenInput advantages, is_weights;
  MaskView mask;
  PolicyTerms<double> terms;
  const TokenRange* chunks = nullptr;
  const double* row_weights = nullptr;  // [rows]: the factor of each token's loss
  RowRatio* row_ratios = nullptr;       // [rows], sequence ratios only
  double* chunk_sums = nullptr;         // [chunks], sequence ratios only
  void* grad_logp = nullptr;            // dense, in the dtype of logp; null: not wanted
  void* grad_entropy = nullptr;         // the same for entropy
  int64_t out_stride = 0;
};

// Over chunks [first, last):
//   log_ratio_sums        chunk_sums = sum of logp - old_logp
//   policy_loss_chunks    adds to `sums` and writes the gradients that are wanted
//   sequence_sum_chunks   adds to `sums`; chunk_sums = sum of the derivatives through the ratio of
//   the row sequence_grad_chunks  the gradients, given RowRatio::gradient
#define FASTRL_DECLARE(capability)                                                    \
  namespace capability {                                                              \
  void log_ratio_sums(const PolicyLossArgs& args, int64_t first, int64_t last);       \
  void policy_loss_chunks(const PolicyLossArgs& args, int64_t first, int64_t last,    \
                          PolicySums* sums);                                          \
  void sequence_sum_chunks(const PolicyLossArgs& args, int64_t first, int64_t last,   \
                           PolicySums* sums);                                         \
  void sequence_grad_chunks(const PolicyLossArgs& args, int64_t first, int64_t last); \
  }
FASTRL_FOR_EACH_CAPABILITY(FASTRL_DECLARE)
#undef FASTRL_DECLARE

}  // namespace fastrl
