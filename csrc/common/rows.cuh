// The rows of views.h on the device. Offsets of packed rows are read where nobody has checked them:
// whatever they hold, a row stays inside of the tensors.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/views.h"

namespace fastrl::cuda {

struct Row {
  int64_t index = 0;
  int64_t start = 0;  // packed: the first element
  int64_t length = 0;
  bool packed = false;

  __device__ __forceinline__ Row(const Rows& rows, int64_t row)
      : index(row), length(rows.length), packed(rows.packed()) {
    if (!packed) return;
    start = clamped(rows.begin(row, 0), 0, rows.tokens);
    length = clamped(rows.begin(row + 1, 0), start, rows.tokens) - start;
  }
  // Index of the first element in a tensor whose rows are `stride` apart.
  __device__ __forceinline__ int64_t at(int64_t stride) const {
    return packed ? start : index * stride;
  }

 private:
  static __device__ __forceinline__ int64_t clamped(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : x > high ? high : x;
  }
};

}  // namespace fastrl::cuda
