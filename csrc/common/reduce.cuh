// Reductions over the threads of a warp and of a block, in a fixed order: the same bits in every
// run.
#pragma once

#include <cuda_runtime.h>

#include "common/items.cuh"

namespace fastrl::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

struct Sum {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Least {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};
struct Greatest {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return b > a ? b : a;
  }
};

// Every lane gets the result.
template <typename T, typename Op>
__device__ __forceinline__ T warp_reduce(T x, Op op) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x = op(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

// Every thread gets the result. `shared` has one element per warp; it may be used again at once.
template <int kThreads, typename T, typename Op>
__device__ __forceinline__ T block_reduce(T x, Op op, T* shared) {
  static_assert(kThreads % kWarp == 0, "whole warps");
  x = warp_reduce(x, op);
  if constexpr (kThreads == kWarp) return x;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  if (threadIdx.x % kWarp == 0) shared[warp] = x;
  __syncthreads();
  T total = shared[0];
#pragma unroll
  for (int w = 1; w < kThreads / kWarp; ++w) total = op(total, shared[w]);
  __syncthreads();
  return total;
}

}  // namespace fastrl::cuda
