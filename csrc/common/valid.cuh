// Where the valid tokens of a row begin and end.
#pragma once

#include "common/reduce.cuh"
#include "common/rows.cuh"

namespace fastrl::cuda {

// The largest of a team's values. Every thread of the warp, or of the block when the team is one,
// takes part.
template <int kTeam>
__device__ __forceinline__ int64_t team_max(int64_t x) {
  if constexpr (kTeam > kWarp) {
    __shared__ int64_t shared[kTeam / kWarp];
    return block_reduce<kTeam>(x, Greatest{}, shared);
  } else {
#pragma unroll
    for (int step = kTeam / 2; step > 0; step /= 2) {
      const int64_t other = __shfl_xor_sync(kAllLanes, x, step);
      x = other > x ? other : x;
    }
    return x;
  }
}

// One past the last valid token of a row, 0 when there is none. Called by the whole team; below a
// thread block a team sees rows of up to eight tokens a thread.
template <int kTeam>
__device__ __forceinline__ int64_t valid_end(const MaskView& mask, const Row& row, int thread) {
  const int64_t at = row.at(mask.row_stride);
  if constexpr (kTeam > kWarp) {
    // Most rows are full, or padded on the other side.
    if (row.length == 0 || mask_element(mask, at + row.length - 1)) return row.length;
  }
  for (int64_t end = row.length;; end -= kTeam * kItems) {
    const int64_t first = end - (int64_t{thread} + 1) * kItems;
    const ItemRange range = ItemRange::within(first, 0, row.length);
    MaskItems items;
    items.load(mask, at + first, range);
    const uint32_t bits = items.bits(mask, range);
    const int64_t found =
        team_max<kTeam>(bits == 0 ? 0 : first + kWarp - __clz(static_cast<int>(bits)));
    if (found > 0 || end <= kTeam * kItems) return found;
  }
}

// The first valid token of a row, its length when there is none; otherwise as above.
template <int kTeam>
__device__ __forceinline__ int64_t valid_begin(const MaskView& mask, const Row& row, int thread) {
  const int64_t at = row.at(mask.row_stride);
  if constexpr (kTeam > kWarp) {
    if (row.length == 0 || mask_element(mask, at)) return 0;
  }
  for (int64_t begin = 0;; begin += kTeam * kItems) {
    const int64_t first = begin + int64_t{thread} * kItems;
    const ItemRange range = ItemRange::within(first, 0, row.length);
    MaskItems items;
    items.load(mask, at + first, range);
    const uint32_t bits = items.bits(mask, range);
    // The largest of the negated: none is below every token.
    const int64_t found =
        team_max<kTeam>(bits == 0 ? -row.length : -(first + __ffs(static_cast<int>(bits)) - 1));
    if (-found < row.length || begin + kTeam * kItems >= row.length) return -found;
  }
}

}  // namespace fastrl::cuda
