// Kernels without a fault: their results are known.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/reduce.cuh"
#include "fixtures.h"

__global__ void block_scan(const int* in, int* out) {
  __shared__ int of_warps[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = in[global_thread()];
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += before;
  }
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  for (int w = 0; w < warp; ++w) sum += of_warps[w];
  out[global_thread()] = sum;
}
FIXTURE(block_scan, int, int)

// Twice through the same shared memory.
__global__ void block_range(const float* in, float* out) {
  __shared__ float shared[8];
  const float x = in[global_thread()];
  const float low = fastrl::cuda::block_reduce<256>(x, fastrl::cuda::Least{}, shared);
  const float high = fastrl::cuda::block_reduce<256>(x, fastrl::cuda::Greatest{}, shared);
  if (threadIdx.x == 0) out[blockIdx.x] = high - low;
}
FIXTURE(block_range, float, float)

// How many lanes before this one hold the same key; then the votes of the warp.
__global__ void rank_among_equals(const long long* in, int* out) {
  const int lane = threadIdx.x % 32;
  const long long key = in[global_thread()];
  const unsigned equal = __match_any_sync(0xffffffffu, key);
  const unsigned ballot = __ballot_sync(0xffffffffu, key > 0);
  int* const mine = out + 4 * global_thread();
  mine[0] = __popc(equal & ((1u << lane) - 1));
  mine[1] = static_cast<int>(ballot);
  mine[2] = __any_sync(0xffffffffu, key > 3);
  mine[3] = __all_sync(0xffffffffu, key >= 0);
}
FIXTURE(rank_among_equals, long long, int)

template <typename T>
__device__ void shuffles(const T* in, T* out) {
  const T x = in[global_thread()];
  T* const mine = out + 4 * global_thread();
  mine[0] = __shfl_sync(0xffffffffu, x, 11, 8);
  mine[1] = __shfl_up_sync(0xffffffffu, x, 3, 8);
  mine[2] = __shfl_down_sync(0xffffffffu, x, 3, 8);
  mine[3] = __shfl_xor_sync(0xffffffffu, x, 5, 8);
}
__global__ void shuffle_floats(const float* in, float* out) { shuffles(in, out); }
FIXTURE(shuffle_floats, float, float)
__global__ void shuffle_doubles(const double* in, double* out) { shuffles(in, out); }
FIXTURE(shuffle_doubles, double, double)

// Two halves of a warp on ways of their own, each meeting under its own mask.
__global__ void halves_apart(const int* in, int* out) {
  const int lane = threadIdx.x % 32;
  int x = in[global_thread()];
  if (lane < 16) {
    for (int step = 8; step > 0; step /= 2) x += __shfl_xor_sync(0x0000ffffu, x, step);
  } else {
    x = __shfl_sync(0xffff0000u, x, 16);
  }
  __syncwarp();
  out[global_thread()] = x;
}
FIXTURE(halves_apart, int, int)

__global__ void block_votes(const int* in, int* out) {
  const int x = in[global_thread()];
  const int any = __syncthreads_or(x == 7), all = __syncthreads_and(x >= 0);
  const int count = __syncthreads_count(x % 2);
  if (threadIdx.x == 0) {
    out[3 * blockIdx.x] = any != 0;
    out[3 * blockIdx.x + 1] = all != 0;
    out[3 * blockIdx.x + 2] = count;
  }
}
FIXTURE(block_votes, int, int)

// out: the sum, the least, the greatest; the sum by compare-and-swap; how many threads drew zero.
__global__ void atomics(const int* in, int* out) {
  __shared__ unsigned zeros;
  const int x = in[global_thread()];
  if (threadIdx.x == 0) zeros = 0;
  __syncthreads();
  if (x == 0) atomicAdd(&zeros, 1u);
  atomicAdd(&out[0], x);
  atomicMin(&out[1], x);
  atomicMax(&out[2], x);
  for (int seen = out[3], old;; seen = old) {
    old = atomicCAS(&out[3], seen, seen + x);
    if (old == seen) break;
  }
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(&out[4], static_cast<int>(atomicExch(&zeros, 0u)));
}
FIXTURE(atomics, int, int)

// Neighbours of a warp exchange values under __syncwarp alone.
__global__ void exchange_in_warp(const int* in, int* out) {
  __shared__ int shared[1024];
  int x = in[global_thread()];
  for (int round = 0; round < 2; ++round) {
    shared[threadIdx.x] = x;
    __syncwarp();
    x = shared[threadIdx.x ^ 1] + 1;
    __syncwarp();
  }
  out[global_thread()] = x;
}
FIXTURE(exchange_in_warp, int, int)

__global__ void to_bf16(const float* in, unsigned short* out) {
  out[global_thread()] = __bfloat16_as_ushort(__float2bfloat16_rn(in[global_thread()]));
}
FIXTURE(to_bf16, float, unsigned short)
__global__ void to_half(const float* in, unsigned short* out) {
  out[global_thread()] = __half_as_ushort(__float2half_rn(in[global_thread()]));
}
FIXTURE(to_half, float, unsigned short)
__global__ void from_bf16(const unsigned short* in, float* out) {
  out[global_thread()] = __bfloat162float(__ushort_as_bfloat16(in[global_thread()]));
}
FIXTURE(from_bf16, unsigned short, float)
__global__ void from_half(const unsigned short* in, float* out) {
  out[global_thread()] = __half2float(__ushort_as_half(in[global_thread()]));
}
FIXTURE(from_half, unsigned short, float)

// 16 bytes a thread, and the first element once more.
__global__ void copy_quads(const float* in, float* out) {
  const float4 quad = reinterpret_cast<const float4*>(in)[global_thread()];
  __stcs(reinterpret_cast<float4*>(out) + global_thread(), quad);
  if (global_thread() == 0 && in[0] == 0) out[1] = 0;
}
FIXTURE(copy_quads, float, float)
