// Transcendental functions on the native parts of the vectors of vec.h.
//
// Include from *_kernel.cpp files only.
#pragma once

#include <cmath>

#include "common/vec.h"

namespace fastrl::FASTRL_CAPABILITY {

// The larger one, b where either is NaN. What the processor does in one instruction g++ 12 does not
// always find.
FASTRL_INLINE f32n native_max(f32n a, f32n b) {
#if defined(__AVX512F__)
  return (f32n)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (f32n)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__x86_64__)
  return (f32n)_mm_max_ps((__m128)a, (__m128)b);
#else
  return a > b ? a : b;
#endif
}
FASTRL_INLINE f64n native_max(f64n a, f64n b) { return a > b ? a : b; }

// 2^n for whole n in [-127, 128], as one float each; 2^-127 is taken for 0 and 2^128 for infinity.
FASTRL_INLINE f32n power_of_two(i32n n) { return reinterpret_cast<f32n>((n + 127) << 23); }

// Adding it rounds to whole numbers, which are then the low bits.
constexpr float kRoundToWhole = 12582912.0f;  // 1.5 * 2^23

// e^(x - n ln 2) - 1 for n = x / ln 2 rounded, so that the exponent is at most ln 2 / 2; ln 2 is
// split in two so that n ln 2 loses nothing even without fused multiply-add, and a polynomial of
// degree 6 does the rest.
FASTRL_INLINE f32n expm1_remainder(f32n x, f32n n) {
  const f32n r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  f32n p = r * 1.38145400e-3f + 8.36874500e-3f;
  p = p * r + 4.16683900e-2f;
  p = p * r + 1.66665210e-1f;
  p = p * r + 4.99999940e-1f;
  return p * (r * r) + r;
}
FASTRL_INLINE f32n exp_remainder(f32n x, f32n n) { return expm1_remainder(x, n) + 1.0f; }

// The smaller of x and bound, x if it is NaN: what a minimum instruction does when x is its second
// operand.
FASTRL_INLINE f32n native_at_most(f32n x, f32n bound) {
#if defined(__AVX512F__)
  return (f32n)_mm512_min_ps((__m512)bound, (__m512)x);
#elif defined(__AVX2__)
  return (f32n)_mm256_min_ps((__m256)bound, (__m256)x);
#elif defined(__x86_64__)
  return (f32n)_mm_min_ps((__m128)bound, (__m128)x);
#else
  return x > bound ? bound : x;
#endif
}
FASTRL_INLINE f32n native_at_least(f32n x, f32n bound) {
#if defined(__AVX512F__)
  return (f32n)_mm512_max_ps((__m512)bound, (__m512)x);
#elif defined(__AVX2__)
  return (f32n)_mm256_max_ps((__m256)bound, (__m256)x);
#elif defined(__x86_64__)
  return (f32n)_mm_max_ps((__m128)bound, (__m128)x);
#else
  return x < bound ? bound : x;
#endif
}

// x within the range that native_exp tells from its ends.
FASTRL_INLINE f32n exp_range(f32n x) {
  constexpr float kHigh = 89.0f;   // e^89 overflows
  constexpr float kLow = -104.0f;  // e^-104 is less than half of the smallest subnormal
  return native_at_least(native_at_most(x, f32n{} + kHigh), f32n{} + kLow);
}

// fraction * 2^n for whole n in [-150, 128]; `shifted` is n + kRoundToWhole.
FASTRL_INLINE f32n scale_by_power(f32n fraction, f32n n, f32n shifted) {
#if defined(__AVX512F__)
  (void)shifted;
  return (f32n)_mm512_scalef_ps((__m512)fraction, (__m512)n);
#else
  // In two steps: n reaches from below the exponents of normal numbers to above them.
  (void)n;
  const i32n whole = reinterpret_cast<i32n>(shifted) - 0x4b400000;
  const i32n half = whole >> 1;
  return fraction * power_of_two(half) * power_of_two(whole - half);
#endif
}

// e^x within 1.1 ulp (measured over every third float). -inf gives 0, what overflows gives inf, NaN
// stays NaN, subnormal results are right.
FASTRL_INLINE f32n native_exp(f32n x) {
  x = exp_range(x);
  const f32n shifted = x * 1.44269504088896341f + kRoundToWhole;
  const f32n n = shifted - kRoundToWhole;
  return scale_by_power(exp_remainder(x, n), n, shifted);
}

// The same for x in [-88, 0], in fewer steps: what would be subnormal is 0, e^-88 included.
FASTRL_INLINE f32n native_exp_nonpositive(f32n x) {
  constexpr float kRound = kRoundToWhole + 127.0f;  // the low bits are then the exponent of 2^n
  const f32n shifted = x * 1.44269504088896341f + kRound;
  const i32n power = reinterpret_cast<i32n>(shifted) << 23;
  return exp_remainder(x, shifted - kRound) * reinterpret_cast<f32n>(power);
}

// e^x, and e^x - 1 without the cancellation near 0.
FASTRL_INLINE void native_exp_pair(f32n x, f32n& exp, f32n& expm1) {
  x = exp_range(x);
  const f32n shifted = x * 1.44269504088896341f + kRoundToWhole;
  const f32n n = shifted - kRoundToWhole;
  const f32n p = expm1_remainder(x, n);
  exp = scale_by_power(p + 1.0f, n, shifted);
  expm1 = n == 0.0f ? p : exp - 1.0f;
}

FASTRL_INLINE f64n native_exp(f64n x) {
  double lanes[kNativeBytes / 8];
  std::memcpy(lanes, &x, sizeof(x));
  for (double& lane : lanes) lane = std::exp(lane);
  std::memcpy(&x, lanes, sizeof(x));
  return x;
}

FASTRL_INLINE void native_exp_pair(f64n x, f64n& exp, f64n& expm1) {
  exp = native_exp(x);
  double lanes[kNativeBytes / 8];
  std::memcpy(lanes, &x, sizeof(x));
  for (double& lane : lanes) lane = std::expm1(lane);
  std::memcpy(&expm1, lanes, sizeof(x));
}

}  // namespace fastrl::FASTRL_CAPABILITY
