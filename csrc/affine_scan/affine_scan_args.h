// Arguments of the affine scan, on CPU and CUDA.
#pragma once

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

}  // namespace fastrl
