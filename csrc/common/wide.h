// Vectors of vec.h as doubles for sums that must not round, and lanes kept by the bits of a mask.
//
// Both are written on the processor's own registers: see math.h for what GCC makes of comparisons
// and conversions of anything wider.
//
// Include from *_kernel.cpp files only.
#pragma once

#include "common/math.h"

namespace fastrl::FASTRL_CAPABILITY {

constexpr int kNativeDoubles = kNativeBytes / 8;

// The lanes of a Vec<T> in double, in order.
template <typename T>
struct Wide {
  static constexpr int kParts = kLanes<T> / kNativeDoubles;
  f64n part[kParts];
};

template <typename T>
FASTRL_INLINE Wide<T> widen(Vec<T> v) {
  Wide<T> wide;
  if constexpr (sizeof(T) == 8) {
    std::memcpy(&wide, &v, sizeof(v));
  } else {
#if defined(__AVX512F__)  // g++ 12 converts by quarters
    wide.part[0] = (f64n)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v));
    wide.part[1] = (f64n)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1));
#else
    typedef float f32_half __attribute__((vector_size(kNativeBytes / 2)));
    f32_half halves[Wide<T>::kParts];
    std::memcpy(halves, &v, sizeof(v));
    for (int p = 0; p < Wide<T>::kParts; ++p) {
      wide.part[p] = __builtin_convertvector(halves[p], f64n);
    }
#endif
  }
  return wide;
}

template <typename T>
FASTRL_INLINE Vec<T> narrow(const Wide<T>& wide) {
  Vec<T> v;
  if constexpr (sizeof(T) == 8) {
    std::memcpy(&v, &wide, sizeof(v));
  } else {
#if defined(__AVX512F__)
    const __m512 low = _mm512_castps256_ps512(_mm512_cvtpd_ps((__m512d)wide.part[0]));
    v = (Vec<T>)_mm512_insertf32x8(low, _mm512_cvtpd_ps((__m512d)wide.part[1]), 1);
#else
    typedef float f32_half __attribute__((vector_size(kNativeBytes / 2)));
    f32_half halves[Wide<T>::kParts];
    for (int p = 0; p < Wide<T>::kParts; ++p) {
      halves[p] = __builtin_convertvector(wide.part[p], f32_half);
    }
    std::memcpy(&v, halves, sizeof(v));
#endif
  }
  return v;
}

// Lanes whose bit is set; the others become 0, whatever they held.
FASTRL_INLINE f64n keep_native(f64n v, uint32_t bits) {
#if defined(__AVX512F__)
  return (f64n)_mm512_maskz_mov_pd(static_cast<__mmask8>(bits), (__m512d)v);
#else
  i64n bit;
  for (int i = 0; i < kNativeDoubles; ++i) bit[i] = int64_t{1} << i;
  const i64n lanes = (static_cast<int64_t>(bits) & bit) == bit;
  return reinterpret_cast<f64n>(reinterpret_cast<i64n>(v) & lanes);
#endif
}

FASTRL_INLINE f32n keep_native(f32n v, uint32_t bits) {
#if defined(__AVX512F__)
  return (f32n)_mm512_maskz_mov_ps(static_cast<__mmask16>(bits), (__m512)v);
#else
  i32n bit;
  for (int i = 0; i < kNativeBytes / 4; ++i) bit[i] = 1 << i;
  const i32n lanes = (static_cast<int32_t>(bits) & bit) == bit;
  return reinterpret_cast<f32n>(reinterpret_cast<i32n>(v) & lanes);
#endif
}

template <typename T>
FASTRL_INLINE Vec<T> keep(Vec<T> v, uint32_t bits) {
  if (bits == kAllLanes<T>) return v;
  Native<T> parts[kNativeParts];
  std::memcpy(parts, &v, sizeof(v));
  for (int p = 0; p < kNativeParts; ++p) {
    parts[p] = keep_native(parts[p], bits >> (p * (kLanes<T> / kNativeParts)));
  }
  std::memcpy(&v, parts, sizeof(v));
  return v;
}

template <typename T>
FASTRL_INLINE Wide<T> keep(Wide<T> wide, uint32_t bits) {
  if (bits == kAllLanes<T>) return wide;
  for (int p = 0; p < Wide<T>::kParts; ++p) {
    wide.part[p] = keep_native(wide.part[p], bits >> (p * kNativeDoubles));
  }
  return wide;
}

// Sum of lanes as a fixed tree.
template <typename T>
FASTRL_INLINE double lane_sum(const Wide<T>& wide) {
  double lanes[kLanes<T>];
  std::memcpy(lanes, &wide, sizeof(wide));
  for (int width = kLanes<T> / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

}  // namespace fastrl::FASTRL_CAPABILITY
