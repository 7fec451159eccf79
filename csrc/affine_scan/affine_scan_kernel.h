// Arguments and entry points of the CPU affine scan, one per capability.
#pragma once

#include "common/capability.h"
#include "common/views.h"

namespace fastrl {

struct AffineScanArgs {
  Rows rows;
  FloatView a;        // [rows, T] or [N]
  FloatView b;        // same; for the adjoint: the gradient of the result
  FloatView initial;  // [rows] in the dtype of the results; null data: 0
  bool reverse = true;
  void* out = nullptr;  // x; for the adjoint: the gradient of b
  int64_t out_stride = 0;
  // Adjoint only.
  FloatView x;                   // the result of the forward call
  void* grad_a = nullptr;        // dense like out
  void* grad_initial = nullptr;  // [rows]
};

#define FASTRL_DECLARE(capability)                                                             \
  namespace capability {                                                                       \
  void affine_scan_rows(const AffineScanArgs& args, int64_t first_row, int64_t last_row);      \
  void affine_scan_grad_rows(const AffineScanArgs& args, int64_t first_row, int64_t last_row); \
  }
FASTRL_FOR_EACH_CAPABILITY(FASTRL_DECLARE)
#undef FASTRL_DECLARE

}  // namespace fastrl
