// Token rewards and their mask as rows, on CPU and CUDA.
#pragma once

#include "common/views.h"

namespace fastrl {

struct TokenRows {
  FloatView rewards;  // [rows, length]; null data where only the mask is read
  MaskView mask;      // [rows, length]; null data: every token is valid
  int64_t length = 0;
};

}  // namespace fastrl
