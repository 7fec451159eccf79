// Stands in for NVIDIA's header when kernels are compiled for the host: the part of CUDA that the
// kernels use.
#pragma once

#include <math.h>

#include "cuda_on_host.h"

// ---- the language

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
// Blocks run one after the other on one thread of the host, and each library has its thread-local
// variables in one piece that the runtime can find.
#define __shared__ static thread_local

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

#define FASTRL_VECTORS(T, name, single, pair, quad)          \
  struct alignas(single) name##1 { T x; };                   \
  struct alignas(pair) name##2 { T x, y; };                  \
  struct name##3 { T x, y, z; };                             \
  struct alignas(quad) name##4 { T x, y, z, w; };            \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
FASTRL_VECTORS(signed char, char, 1, 2, 4)
FASTRL_VECTORS(unsigned char, uchar, 1, 2, 4)
FASTRL_VECTORS(short, short, 2, 4, 8)
FASTRL_VECTORS(unsigned short, ushort, 2, 4, 8)
FASTRL_VECTORS(int, int, 4, 8, 16)
FASTRL_VECTORS(float, float, 4, 8, 16)
FASTRL_VECTORS(long long, longlong, 8, 16, 16)
FASTRL_VECTORS(unsigned long long, ulonglong, 8, 16, 16)
FASTRL_VECTORS(double, double, 8, 16, 16)
#undef FASTRL_VECTORS
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- the host's side: a launch throws what went wrong, so there are no errors left to ask for

enum cudaError_t { cudaSuccess = 0 };
using cudaStream_t = struct CUstream_st*;
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

// ---- barriers and warps

#define FASTRL_SITE const cuda_on_host::Site& site = cuda_on_host::Site::current()

inline void __syncthreads(FASTRL_SITE) {
  cuda_on_host::block_barrier(cuda_on_host::Barrier::plain, 0, site);
}
inline int __syncthreads_or(int predicate, FASTRL_SITE) {
  return cuda_on_host::block_barrier(cuda_on_host::Barrier::any, predicate, site);
}
inline int __syncthreads_and(int predicate, FASTRL_SITE) {
  return cuda_on_host::block_barrier(cuda_on_host::Barrier::all, predicate, site);
}
inline int __syncthreads_count(int predicate, FASTRL_SITE) {
  return cuda_on_host::block_barrier(cuda_on_host::Barrier::count, predicate, site);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, FASTRL_SITE) {
  cuda_on_host::warp_collective(cuda_on_host::Collective::syncwarp, mask, 0, 0, warpSize, site);
}
// One thread of the host runs everything: memory is always in order.
inline void __threadfence() {}
inline void __threadfence_block() {}

namespace cuda_on_host {
template <typename T>
T shuffle(Collective kind, unsigned mask, T x, int operand, int width, const Site& site) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "a register or two");
  return unpacked<T>(warp_collective(kind, mask, packed(x), operand, width, site));
}
}  // namespace cuda_on_host

template <typename T>
T __shfl_sync(unsigned mask, T x, int lane, int width = warpSize, FASTRL_SITE) {
  return cuda_on_host::shuffle(cuda_on_host::Collective::shfl, mask, x, lane, width, site);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T x, unsigned delta, int width = warpSize, FASTRL_SITE) {
  return cuda_on_host::shuffle(cuda_on_host::Collective::shfl_up, mask, x, static_cast<int>(delta),
                               width, site);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T x, unsigned delta, int width = warpSize, FASTRL_SITE) {
  return cuda_on_host::shuffle(cuda_on_host::Collective::shfl_down, mask, x,
                               static_cast<int>(delta), width, site);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int lanes, int width = warpSize, FASTRL_SITE) {
  return cuda_on_host::shuffle(cuda_on_host::Collective::shfl_xor, mask, x, lanes, width, site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, FASTRL_SITE) {
  return static_cast<unsigned>(cuda_on_host::warp_collective(cuda_on_host::Collective::ballot, mask,
                                                             predicate != 0, 0, warpSize, site));
}
inline int __any_sync(unsigned mask, int predicate, FASTRL_SITE) {
  return static_cast<int>(cuda_on_host::warp_collective(cuda_on_host::Collective::any, mask,
                                                        predicate != 0, 0, warpSize, site));
}
inline int __all_sync(unsigned mask, int predicate, FASTRL_SITE) {
  return static_cast<int>(cuda_on_host::warp_collective(cuda_on_host::Collective::all, mask,
                                                        predicate != 0, 0, warpSize, site));
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T x, FASTRL_SITE) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a register or two");
  return static_cast<unsigned>(cuda_on_host::warp_collective(
      cuda_on_host::Collective::match_any, mask, cuda_on_host::packed(x), 0, warpSize, site));
}
#undef FASTRL_SITE

// ---- memory

template <typename T>
T __ldg(const T* p) {
  return *p;
}
template <typename T>
T __ldcs(const T* p) {
  return *p;
}
template <typename T>
void __stcs(T* p, T x) {
  *p = x;
}

#define FASTRL_ATOMICS(T)                                                                         \
  inline T atomicAdd(T* p, T x) { return cuda_on_host::atomic(cuda_on_host::Atomic::add, p, x); } \
  inline T atomicMin(T* p, T x) { return cuda_on_host::atomic(cuda_on_host::Atomic::min, p, x); } \
  inline T atomicMax(T* p, T x) { return cuda_on_host::atomic(cuda_on_host::Atomic::max, p, x); } \
  inline T atomicExch(T* p, T x) {                                                                \
    return cuda_on_host::atomic(cuda_on_host::Atomic::exchange, p, x);                            \
  }                                                                                               \
  inline T atomicCAS(T* p, T compare, T x) {                                                      \
    return cuda_on_host::atomic(cuda_on_host::Atomic::compare, p, x, compare);                    \
  }
FASTRL_ATOMICS(int)
FASTRL_ATOMICS(unsigned)
FASTRL_ATOMICS(long long)
FASTRL_ATOMICS(unsigned long long)
#undef FASTRL_ATOMICS

// ---- arithmetic

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}

inline unsigned __float_as_uint(float x) { return cuda_on_host::bits_as<unsigned>(x); }
inline int __float_as_int(float x) { return cuda_on_host::bits_as<int>(x); }
inline float __uint_as_float(unsigned x) { return cuda_on_host::bits_as<float>(x); }
inline float __int_as_float(int x) { return cuda_on_host::bits_as<float>(x); }
inline long long __double_as_longlong(double x) { return cuda_on_host::bits_as<long long>(x); }
inline double __longlong_as_double(long long x) { return cuda_on_host::bits_as<double>(x); }
inline int __double2hiint(double x) { return static_cast<int>(__double_as_longlong(x) >> 32); }
inline int __double2loint(double x) { return static_cast<int>(__double_as_longlong(x)); }
inline double __hiloint2double(int high, int low) {
  const auto bits = static_cast<unsigned long long>(static_cast<unsigned>(high)) << 32;
  return cuda_on_host::bits_as<double>(bits | static_cast<unsigned>(low));
}

// As on the device, min and max of floats return the number when the other is NaN.
#define FASTRL_MIN_MAX(T)                          \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return b > a ? b : a; }
FASTRL_MIN_MAX(int)
FASTRL_MIN_MAX(unsigned)
FASTRL_MIN_MAX(long)
FASTRL_MIN_MAX(unsigned long)
FASTRL_MIN_MAX(long long)
FASTRL_MIN_MAX(unsigned long long)
#undef FASTRL_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
