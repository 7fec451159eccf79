// Entry points of the CPU affine scan, one per capability.
#pragma once

#include "affine_scan/affine_scan_args.h"
#include "common/capability.h"

namespace fastrl {

#define FASTRL_DECLARE(capability)                                                             \
  namespace capability {                                                                       \
  void affine_scan_rows(const AffineScanArgs& args, int64_t first_row, int64_t last_row);      \
  void affine_scan_grad_rows(const AffineScanArgs& args, int64_t first_row, int64_t last_row); \
  }
FASTRL_FOR_EACH_CAPABILITY(FASTRL_DECLARE)
#undef FASTRL_DECLARE

}  // namespace fastrl
