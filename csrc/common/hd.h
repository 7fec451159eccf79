// Marks the scalar arithmetic that CPU and CUDA kernels share.
#pragma once

#if defined(__CUDACC__)
#define FASTRL_HD __host__ __device__ __forceinline__
#else
#define FASTRL_HD inline __attribute__((always_inline))
#endif
