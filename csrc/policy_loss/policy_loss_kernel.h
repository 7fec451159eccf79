// Arguments and entry points of the CPU policy loss kernels, one per capability.
#pragma once

#include "common/capability.h"
#include "common/token_rows_kernel.h"
#include "policy_loss/policy_loss_args.h"

namespace fastrl {

// Per row; filled between the passes of the sequence ratios.
struct RowRatio {
  double log_ratio = 0;  // mean of logp - old_logp
  double gradient = 0;   // of an unweighted loss, at each logp of the row through the ratio
};

struct PolicyLossArgs : PolicyLossViews {
  const TokenRange* chunks = nullptr;
  const double* row_weights = nullptr;  // [rows]: the factor of each token's loss
  RowRatio* row_ratios = nullptr;       // [rows], sequence ratios only
  double* chunk_sums = nullptr;         // [chunks], sequence ratios only
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
