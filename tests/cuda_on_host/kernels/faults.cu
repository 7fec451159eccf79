// One planted fault in each kernel; the tests know the line by its mark.
#include "fixtures.h"

__global__ void missing_barrier(const int* in, int* out) {
  __shared__ int shared[1024];
  shared[threadIdx.x] = in[global_thread()];
  out[global_thread()] = shared[blockDim.x - 1 - threadIdx.x];  // here
}
FIXTURE(missing_barrier, int, int)

// The second round writes what the first still reads.
__global__ void missing_second_barrier(const int* in, int* out) {
  __shared__ int shared[1024];
  int sum = 0;
  for (int round = 0; round < 2; ++round) {
    shared[threadIdx.x] = in[global_thread()] + round;  // here
    __syncthreads();
    sum += shared[(threadIdx.x + 32) % blockDim.x];
  }
  out[global_thread()] = sum;
}
FIXTURE(missing_second_barrier, int, int)

// A shuffle brings lanes together but orders no memory.
__global__ void shuffle_for_a_barrier(const int* in, int* out) {
  __shared__ int shared[1024];
  shared[threadIdx.x] = in[global_thread()];
  const int zero = __shfl_sync(0xffffffffu, 0, 0);
  out[global_thread()] = shared[threadIdx.x ^ 1] + zero;  // here
}
FIXTURE(shuffle_for_a_barrier, int, int)

__global__ void two_writers(const int* in, int* out) {
  __shared__ int last;
  last = in[global_thread()];  // here
  __syncthreads();
  out[global_thread()] = last;
}
FIXTURE(two_writers, int, int)

__global__ void nobody_wrote(const float* in, float* out) {
  __shared__ float shared[1024];
  if (in[0] != 0) shared[threadIdx.x] = 1;
  out[global_thread()] = shared[threadIdx.x];  // here
}
FIXTURE(nobody_wrote, float, float)

__global__ void one_too_far(const int* in, int* out) {
  out[global_thread() + 1] = in[global_thread()];
}
FIXTURE(one_too_far, int, int)

__global__ void misaligned_quad(const float* in, float* out) {
  const float4 quad = *reinterpret_cast<const float4*>(in + 1);  // here
  out[0] = quad.x;
}
FIXTURE(misaligned_quad, float, float)

__global__ void divergent_shuffle(const int* in, int* out) {
  int x = in[global_thread()];
  if (threadIdx.x % 2 == 0) {
    x += __shfl_sync(0xffffffffu, x, 0);
  } else {
    x -= __shfl_sync(0xffffffffu, x, 1);
  }
  out[global_thread()] = x;
}
FIXTURE(divergent_shuffle, int, int)

__global__ void masks_differ(const int* in, int* out) {
  const unsigned mask = threadIdx.x % 32 == 0 ? 0xffffffffu : 0xfffffffeu;
  out[global_thread()] = __any_sync(mask, in[global_thread()]);
}
FIXTURE(masks_differ, int, int)

__global__ void absent_lane(const int* in, int* out) {
  if (threadIdx.x % 32 == 5) return;
  out[global_thread()] = __shfl_down_sync(0xffffffffu, in[global_thread()], 1);
}
FIXTURE(absent_lane, int, int)

__global__ void unnamed_source(const int* in, int* out) {
  if (threadIdx.x % 32 < 16) out[global_thread()] = __shfl_sync(0xffffu, in[global_thread()], 20);
}
FIXTURE(unnamed_source, int, int)

__global__ void early_return(const int* in, int* out) {
  if (threadIdx.x == 3) return;
  __syncthreads();
  out[global_thread()] = in[global_thread()];
}
FIXTURE(early_return, int, int)

__global__ void two_barriers(const int* in, int* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[global_thread()] = in[global_thread()];
}
FIXTURE(two_barriers, int, int)

// Half of a warp waits for the block, the other half for the warp.
__global__ void waits_in_a_ring(const int* in, int* out) {
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    __syncwarp();
  }
  out[global_thread()] = in[global_thread()];
}
FIXTURE(waits_in_a_ring, int, int)
