// Transcendental functions on the vectors of vec.h, and the processor's own registers that they are computed in.
//
// GCC splits 64-byte arithmetic into narrower registers by itself, but turns comparisons and `m ? a : b` on them into
// one branch per lane. So code that compares works on native parts: a vector is cut into as many registers as it takes,
// each is computed as one unit, and the parts are put together again.
//
// Include from *_kernel.cpp files only.
#pragma once

#include <cmath>

#include "common/vec.h"

namespace fastrl::FASTRL_CAPABILITY {

#if defined(__AVX512F__)
constexpr int kNativeBytes = 64;
#elif defined(__AVX2__)
constexpr int kNativeBytes = 32;
#else
constexpr int kNativeBytes = 16;
#endif
constexpr int kNativeParts = 64 / kNativeBytes;

typedef float f32n __attribute__((vector_size(kNativeBytes)));
typedef int32_t i32n __attribute__((vector_size(kNativeBytes)));
typedef double f64n __attribute__((vector_size(kNativeBytes)));
typedef int64_t i64n __attribute__((vector_size(kNativeBytes)));

template <typename T>
struct NativeOf;
template <>
struct NativeOf<float> {
  using vec = f32n;
  using ivec = i32n;
};
template <>
struct NativeOf<double> {
  using vec = f64n;
  using ivec = i64n;
};
template <typename T>
using Native = typename NativeOf<T>::vec;
template <typename T>
using NativeInt = typename NativeOf<T>::ivec;

// 2^n for whole n in [-127, 128], as one float each; 2^-127 is taken for 0 and 2^128 for infinity.
FASTRL_INLINE f32n power_of_two(i32n n) { return reinterpret_cast<f32n>((n + 127) << 23); }

// e^x within 1.1 ulp (measured over every third float). -inf gives 0, what overflows gives inf, NaN stays NaN, subnormal results are right.
//
// x = n ln 2 + r with n whole and |r| <= ln 2 / 2; ln 2 is split in two so that n ln 2 loses nothing even without fused
// multiply-add; e^r is a polynomial of degree 6, and 2^n goes straight into the exponent.
FASTRL_INLINE f32n native_exp(f32n x) {
  constexpr float kHigh = 89.0f;   // e^89 overflows
  constexpr float kLow = -104.0f;  // e^-104 is less than half of the smallest subnormal
  // Written so that a NaN, for which every comparison is false, passes.
  x = x > kHigh ? f32n{} + kHigh : x;
  x = x < kLow ? f32n{} + kLow : x;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers
  const f32n shifted = x * 1.44269504088896341f + kRound;
  const f32n n = shifted - kRound;
  const f32n r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  f32n p = r * 1.38145400e-3f + 8.36874500e-3f;
  p = p * r + 4.16683900e-2f;
  p = p * r + 1.66665210e-1f;
  p = p * r + 4.99999940e-1f;
  p = p * (r * r) + r;
#if defined(__AVX512F__)
  return (f32n)_mm512_scalef_ps((__m512)(p + 1.0f), (__m512)n);
#else
  // In two steps: n reaches from -150, below the exponents of normal numbers, to 128, above them.
  const i32n whole = reinterpret_cast<i32n>(shifted) - 0x4b400000;
  const i32n half = whole >> 1;
  return (p + 1.0f) * power_of_two(half) * power_of_two(whole - half);
#endif
}

FASTRL_INLINE f64n native_exp(f64n x) {
  double lanes[kNativeBytes / 8];
  std::memcpy(lanes, &x, sizeof(x));
  for (double& lane : lanes) lane = std::exp(lane);
  std::memcpy(&x, lanes, sizeof(x));
  return x;
}

// e^x lane by lane; see native_exp. For T = double it is the C library's.
template <typename T>
FASTRL_INLINE Vec<T> vexp(Vec<T> x) {
  Native<T> parts[kNativeParts];
  std::memcpy(parts, &x, sizeof(x));
  for (Native<T>& part : parts) part = native_exp(part);
  std::memcpy(&x, parts, sizeof(x));
  return x;
}

}  // namespace fastrl::FASTRL_CAPABILITY
