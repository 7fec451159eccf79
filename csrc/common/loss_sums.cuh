// From sums over chunks to the loss and its metrics: chunks of a row, rows, blocks of rows.
//
// A Call describes a loss to these kernels. It has
//   ChunkSums, with add_to(Sums&, double weight)    what a warp leaves for a chunk
//   Sums, doubles only, with add(const Sums&)
//   loss (LossRows), chunks (ChunkSums by chunk), finish(Sums): writes the results
#pragma once

#include "common/token_rows.cuh"

namespace fastrl::cuda {

constexpr int kFoldThreads = 512;
constexpr int kFoldRows = kFoldThreads / kWarp;  // of a block

// The sums of all lanes; every lane gets them.
template <typename Sums>
__device__ __forceinline__ Sums warp_total(Sums x) {
  constexpr int kNumbers = sizeof(Sums) / sizeof(double);
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    Sums other;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      reinterpret_cast<double*>(&other)[i] =
          __shfl_xor_sync(kAllLanes, reinterpret_cast<const double*>(&x)[i], step);
    }
    x.add(other);
  }
  return x;
}

// Of sums that the lanes of each warp agree on; the first warp gets the total.
template <typename Sums>
__device__ __forceinline__ Sums block_total(const Sums& warp_sums) {
  __shared__ Sums shared[kFoldRows];
  if (lane_index() == 0) shared[warp_index()] = warp_sums;
  __syncthreads();
  Sums total;
  if (warp_index() == 0) {
    if (lane_index() < kFoldRows) total = shared[lane_index()];
    total = warp_total(total);
  }
  return total;
}

// A warp per row, a block for sixteen of them. A single block finishes what others leave to
// fold_blocks.
template <typename Call>
__global__ void __launch_bounds__(kFoldThreads)
    fold_rows(const __grid_constant__ Call call, typename Call::Sums* blocks) {
  typename Call::Sums total;
  const int64_t index = global_warp();
  if (index < call.loss.rows.count) {
    const LossRow row(call.loss, index);
    const double weight = call.loss.weight(row.count);
    const int64_t first = LossChunks::first(call.loss.rows, index), count = row.num_chunks();
    for (int64_t i = lane_index(); i < count; i += kWarp) {
      call.chunks[first + i].add_to(total, weight);
    }
    total = warp_total(total);
  }
  total = block_total(total);
  if (threadIdx.x != 0) return;
  if (gridDim.x == 1) {
    call.finish(total);
  } else {
    blocks[blockIdx.x] = total;
  }
}

template <typename Call>
__global__ void __launch_bounds__(kFoldThreads)
    fold_blocks(const __grid_constant__ Call call, const typename Call::Sums* blocks,
                int64_t count) {
  typename Call::Sums total;
  for (int64_t i = threadIdx.x; i < count; i += kFoldThreads) total.add(blocks[i]);
  total = block_total(warp_total(total));
  if (threadIdx.x == 0) call.finish(total);
}

// ---- what the warp of a chunk counts

// Three counts of tokens in one number, so that a warp adds them at once; a chunk has 512 tokens.
constexpr int kCountBits = 10;
__device__ __forceinline__ uint32_t counted(bool a, bool b = false, bool c = false) {
  return static_cast<uint32_t>(a) | static_cast<uint32_t>(b) << kCountBits |
         static_cast<uint32_t>(c) << (2 * kCountBits);
}
__device__ __forceinline__ double count_in(uint32_t counts, int which) {
  return (counts >> (which * kCountBits)) & ((1u << kCountBits) - 1);
}

}  // namespace fastrl::cuda
