// Entry points of the CPU advantage kernels, one per capability.
#pragma once

#include "common/capability.h"
#include "gae/gae_args.h"

namespace fastrl {

#define FASTRL_DECLARE(capability)                                                  \
  namespace capability {                                                            \
  void gae_rows(const GaeArgs& args, int64_t first_row, int64_t last_row);          \
  void gae_grad_rows(const GaeGradArgs& args, int64_t first_row, int64_t last_row); \
  }
FASTRL_FOR_EACH_CAPABILITY(FASTRL_DECLARE)
#undef FASTRL_DECLARE

}  // namespace fastrl
