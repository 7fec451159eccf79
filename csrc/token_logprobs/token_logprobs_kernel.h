// Entry points of the CPU kernels for token log-probabilities, one per capability.
#pragma once

#include "common/capability.h"
#include "token_logprobs/token_logprobs_args.h"

namespace fastrl {

#define FASTRL_DECLARE(capability)                                                              \
  namespace capability {                                                                        \
  void token_logprobs_rows(const TokenLogprobsArgs& args, int64_t first_row, int64_t last_row); \
  void token_logprobs_grad_rows(const TokenLogprobsGradArgs& args, int64_t first_row,           \
                                int64_t last_row);                                              \
  }
FASTRL_FOR_EACH_CAPABILITY(FASTRL_DECLARE)
#undef FASTRL_DECLARE

}  // namespace fastrl
