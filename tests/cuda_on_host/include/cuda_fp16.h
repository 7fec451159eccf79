// float16 as CUDA converts it: to nearest, ties to even, NaN to one pattern.
#pragma once

#include "cuda_runtime.h"

struct alignas(2) __half {
  unsigned short bits;
};

inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }

inline float __half2float(__half x) {
  const unsigned sign = (x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // The exponents' biases differ by 112; multiplying also makes subnormals what they are.
  return __uint_as_float(sign | magnitude << 13) * 0x1p112f;
}

inline __half __float2half_rn(float x) {
  const unsigned bits = __float_as_uint(x), sign = (bits >> 16) & 0x8000u;
  const unsigned magnitude = bits & 0x7fffffffu;
  unsigned half;
  if (magnitude > 0x7f800000u) return {0x7fff};
  if (magnitude >= 0x477ff000u) {  // halfway from the largest number to 2^16, or beyond
    half = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  } else {  // subnormal: the addition rounds at 2^-24
    half = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u;
  }
  return {static_cast<unsigned short>(sign | half)};
}
inline __half __float2half(float x) { return __float2half_rn(x); }
