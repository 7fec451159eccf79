// Raw views that cross from the tensor code to the kernels: pointers, element kinds, strides in
// elements.
#pragma once

#include <cstdint>

#include "common/hd.h"

namespace fastrl {

enum class Kind : int32_t { f32, bf16, f16, f64 };

// A floating tensor seen as rows; the stride within a row is one.
struct FloatView {
  const void* data = nullptr;
  Kind kind = Kind::f32;
  int64_t row_stride = 0;
};

// A mask seen as rows. An element is valid when (bits & significant) != 0: `significant` drops the
// sign of floating masks, so that -0.0 is invalid like 0.0.
struct MaskView {
  const void* data = nullptr;
  int32_t width = 1;  // bytes of an element: 1, 2, 4 or 8
  uint64_t significant = ~uint64_t{0};
  int64_t row_stride = 0;
};

// Where the rows are: [rows, length] padded, or packed with row b at offsets[b] .. offsets[b+1].
struct Rows {
  int64_t count = 0;
  int64_t length = 0;                  // padded width, unused when packed
  const int32_t* offsets32 = nullptr;  // [count+1] or null
  const int64_t* offsets64 = nullptr;  // [count+1] or null
  int64_t tokens = 0;                  // packed: elements of all rows

  FASTRL_HD bool packed() const { return offsets32 != nullptr || offsets64 != nullptr; }
  FASTRL_HD int64_t begin(int64_t row, int64_t row_stride) const {
    if (offsets32 != nullptr) return offsets32[row];
    if (offsets64 != nullptr) return offsets64[row];
    return row * row_stride;
  }
  FASTRL_HD int64_t size(int64_t row) const {
    if (offsets32 != nullptr) return int64_t{offsets32[row + 1]} - offsets32[row];
    if (offsets64 != nullptr) return offsets64[row + 1] - offsets64[row];
    return length;
  }
};

}  // namespace fastrl
