// A vector of vec.h as a number: arithmetic, comparison and selection on native registers, so that
// a formula written for a scalar in a core header runs on 16 floats or 8 doubles with the same
// order of operations at every capability.
//
// Include from *_kernel.cpp files only.
#pragma once

#include <type_traits>

#include "common/math.h"

namespace fastrl::FASTRL_CAPABILITY {

// One truth value per lane.
template <typename T>
struct LaneMask {
#if defined(__AVX512F__)
  using Bits = std::conditional_t<sizeof(T) == 4, __mmask16, __mmask8>;
  Bits bits = 0;
  FASTRL_INLINE LaneMask() {}
  FASTRL_INLINE explicit LaneMask(uint32_t value) : bits(static_cast<Bits>(value)) {}
#define FASTRL_MASK_OPERATOR(op)                                      \
  friend FASTRL_INLINE LaneMask operator op(LaneMask a, LaneMask b) { \
    return LaneMask(a.bits op b.bits);                                \
  }
#else
  NativeInt<T> part[kNativeParts] = {};
  FASTRL_INLINE LaneMask() {}
  FASTRL_INLINE explicit LaneMask(uint32_t value) {
    using I = typename Simd<T>::lane_int;
    constexpr int kStep = kLanes<T> / kNativeParts;
    NativeInt<T> bit = {};
    for (int i = 0; i < kStep; ++i) bit[i] = I{1} << i;
    for (int p = 0; p < kNativeParts; ++p)
      part[p] = (static_cast<I>(value >> (p * kStep)) & bit) != 0;
  }
#define FASTRL_MASK_OPERATOR(op)                                               \
  friend FASTRL_INLINE LaneMask operator op(LaneMask a, LaneMask b) {          \
    for (int p = 0; p < kNativeParts; ++p) a.part[p] = a.part[p] op b.part[p]; \
    return a;                                                                  \
  }
#endif
  FASTRL_MASK_OPERATOR(&)
  FASTRL_MASK_OPERATOR(|)
#undef FASTRL_MASK_OPERATOR
};

template <typename T>
FASTRL_INLINE bool any(LaneMask<T> m) {
#if defined(__AVX512F__)
  return m.bits != 0;
#else
  NativeInt<T> joined = m.part[0];
  for (int p = 1; p < kNativeParts; ++p) joined |= m.part[p];
  for (int i = 0; i < kLanes<T> / kNativeParts; ++i) {
    if (joined[i] != 0) return true;
  }
  return false;
#endif
}

template <typename T>
struct Lanes {
  Native<T> part[kNativeParts];

  FASTRL_INLINE Lanes() {}
  FASTRL_INLINE Lanes(T value) {
    for (Native<T>& p : part) p = Native<T>{} + value;
  }
  FASTRL_INLINE explicit Lanes(Vec<T> v) { std::memcpy(part, &v, sizeof(v)); }
  static FASTRL_INLINE Lanes at(const T* p) {
    Lanes out;
    for (int i = 0; i < kNativeParts; ++i) {
      std::memcpy(&out.part[i], p + i * (kLanes<T> / kNativeParts), sizeof(out.part[i]));
    }
    return out;
  }
  FASTRL_INLINE void to(T* p) const {
    for (int i = 0; i < kNativeParts; ++i) {
      std::memcpy(p + i * (kLanes<T> / kNativeParts), &part[i], sizeof(part[i]));
    }
  }
  FASTRL_INLINE Vec<T> vec() const {
    Vec<T> v;
    std::memcpy(&v, part, sizeof(v));
    return v;
  }

#define FASTRL_LANE_OPERATOR(op)                                               \
  friend FASTRL_INLINE Lanes operator op(Lanes a, Lanes b) {                   \
    for (int p = 0; p < kNativeParts; ++p) a.part[p] = a.part[p] op b.part[p]; \
    return a;                                                                  \
  }
  FASTRL_LANE_OPERATOR(+)
  FASTRL_LANE_OPERATOR(-)
  FASTRL_LANE_OPERATOR(*)
#undef FASTRL_LANE_OPERATOR
  friend FASTRL_INLINE Lanes operator-(Lanes a) {
    for (Native<T>& p : a.part) p = -p;
    return a;
  }
  FASTRL_INLINE Lanes& operator+=(Lanes b) { return *this = *this + b; }

#if defined(__AVX512F__)
#define FASTRL_LANE_COMPARISON(op, predicate)                                                    \
  friend FASTRL_INLINE LaneMask<T> operator op(Lanes a, Lanes b) {                               \
    if constexpr (sizeof(T) == 4) {                                                              \
      return LaneMask<T>(_mm512_cmp_ps_mask((__m512)a.part[0], (__m512)b.part[0], predicate));   \
    } else {                                                                                     \
      return LaneMask<T>(_mm512_cmp_pd_mask((__m512d)a.part[0], (__m512d)b.part[0], predicate)); \
    }                                                                                            \
  }
#else
#define FASTRL_LANE_COMPARISON(op, predicate)                                  \
  friend FASTRL_INLINE LaneMask<T> operator op(Lanes a, Lanes b) {             \
    LaneMask<T> m;                                                             \
    for (int p = 0; p < kNativeParts; ++p) m.part[p] = a.part[p] op b.part[p]; \
    return m;                                                                  \
  }
#endif
  FASTRL_LANE_COMPARISON(<, _CMP_LT_OQ)
  FASTRL_LANE_COMPARISON(>, _CMP_GT_OQ)
  FASTRL_LANE_COMPARISON(!=, _CMP_NEQ_UQ)
#undef FASTRL_LANE_COMPARISON
};

template <typename T>
FASTRL_INLINE Lanes<T> select(LaneMask<T> m, Lanes<T> a, Lanes<T> b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    a.part[0] = (Native<T>)_mm512_mask_blend_ps(m.bits, (__m512)b.part[0], (__m512)a.part[0]);
  } else {
    a.part[0] = (Native<T>)_mm512_mask_blend_pd(m.bits, (__m512d)b.part[0], (__m512d)a.part[0]);
  }
#else
  for (int p = 0; p < kNativeParts; ++p) a.part[p] = m.part[p] ? a.part[p] : b.part[p];
#endif
  return a;
}

// A NaN in x passes both.
template <typename T>
FASTRL_INLINE Lanes<T> at_most(Lanes<T> x, Lanes<T> bound) {
  for (int p = 0; p < kNativeParts; ++p) {
    x.part[p] = x.part[p] > bound.part[p] ? bound.part[p] : x.part[p];
  }
  return x;
}
template <typename T>
FASTRL_INLINE Lanes<T> at_least(Lanes<T> x, Lanes<T> bound) {
  for (int p = 0; p < kNativeParts; ++p) {
    x.part[p] = x.part[p] < bound.part[p] ? bound.part[p] : x.part[p];
  }
  return x;
}

template <typename T>
FASTRL_INLINE Lanes<T> magnitude(Lanes<T> x) {
  using I = typename Simd<T>::lane_int;
  constexpr I kAllButSign = static_cast<I>(~(uint64_t{1} << (8 * sizeof(T) - 1)));
  for (Native<T>& p : x.part) {
    p = reinterpret_cast<Native<T>>(reinterpret_cast<NativeInt<T>>(p) & kAllButSign);
  }
  return x;
}

template <typename X>
struct ExpPair {
  X exp;
  X expm1;  // exact near 0, where exp - 1 is not
};

template <typename T>
FASTRL_INLINE ExpPair<Lanes<T>> exp_pair(Lanes<T> x) {
  ExpPair<Lanes<T>> out;
  for (int p = 0; p < kNativeParts; ++p)
    native_exp_pair(x.part[p], out.exp.part[p], out.expm1.part[p]);
  return out;
}

// ---- accumulators that take only some lanes
// ------------------------------------------------------------------------

template <typename T>
FASTRL_INLINE Lanes<T> add_where(LaneMask<T> m, Lanes<T> total, Lanes<T> x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    const __m512 sum = (__m512)total.part[0];
    total.part[0] = (Native<T>)_mm512_mask_add_ps(sum, m.bits, sum, (__m512)x.part[0]);
  } else {
    const __m512d sum = (__m512d)total.part[0];
    total.part[0] = (Native<T>)_mm512_mask_add_pd(sum, m.bits, sum, (__m512d)x.part[0]);
  }
  return total;
#else
  return total + select(m, x, Lanes<T>(T{0}));
#endif
}

// total + a * b.
template <typename T>
FASTRL_INLINE Lanes<T> add_product_where(LaneMask<T> m, Lanes<T> total, Lanes<T> a, Lanes<T> b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    total.part[0] = (Native<T>)_mm512_mask3_fmadd_ps((__m512)a.part[0], (__m512)b.part[0],
                                                     (__m512)total.part[0], m.bits);
  } else {
    total.part[0] = (Native<T>)_mm512_mask3_fmadd_pd((__m512d)a.part[0], (__m512d)b.part[0],
                                                     (__m512d)total.part[0], m.bits);
  }
  return total;
#else
  return add_where(m, total, a * b);
#endif
}

// The smaller or the larger of the two; a NaN in x changes nothing.
template <typename T>
FASTRL_INLINE Lanes<T> least_where(LaneMask<T> m, Lanes<T> least, Lanes<T> x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    const __m512 old = (__m512)least.part[0];
    least.part[0] = (Native<T>)_mm512_mask_min_ps(old, m.bits, (__m512)x.part[0], old);
  } else {
    const __m512d old = (__m512d)least.part[0];
    least.part[0] = (Native<T>)_mm512_mask_min_pd(old, m.bits, (__m512d)x.part[0], old);
  }
  return least;
#else
  return select(m & (x < least), x, least);
#endif
}
template <typename T>
FASTRL_INLINE Lanes<T> greatest_where(LaneMask<T> m, Lanes<T> greatest, Lanes<T> x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    const __m512 old = (__m512)greatest.part[0];
    greatest.part[0] = (Native<T>)_mm512_mask_max_ps(old, m.bits, (__m512)x.part[0], old);
  } else {
    const __m512d old = (__m512d)greatest.part[0];
    greatest.part[0] = (Native<T>)_mm512_mask_max_pd(old, m.bits, (__m512d)x.part[0], old);
  }
  return greatest;
#else
  return select(m & (x > greatest), x, greatest);
#endif
}

// How often each lane was set.
template <typename T>
struct LaneCount {
  NativeInt<T> part[kNativeParts] = {};

  FASTRL_INLINE LaneCount& operator+=(LaneMask<T> m) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) {
      const __m512i n = (__m512i)part[0];
      part[0] = (NativeInt<T>)_mm512_mask_add_epi32(n, m.bits, n, _mm512_set1_epi32(1));
    } else {
      const __m512i n = (__m512i)part[0];
      part[0] = (NativeInt<T>)_mm512_mask_add_epi64(n, m.bits, n, _mm512_set1_epi64(1));
    }
#else
    for (int p = 0; p < kNativeParts; ++p) part[p] -= m.part[p];  // a lane that is set is -1
#endif
    return *this;
  }
  FASTRL_INLINE double total() const {
    typename Simd<T>::lane_int lanes[kLanes<T>];
    std::memcpy(lanes, part, sizeof(lanes));
    int64_t sum = 0;
    for (const auto lane : lanes) sum += lane;
    return static_cast<double>(sum);
  }
};

// Sum of lanes in double, in a fixed order: it depends on the lanes alone.
template <typename T>
FASTRL_INLINE double lane_total(Lanes<T> x) {
  typedef T half __attribute__((vector_size(8 * sizeof(T))));
  half halves[kLanes<T> / 8];
  std::memcpy(halves, x.part, sizeof(halves));
  f64x8 sum = __builtin_convertvector(halves[0], f64x8);
  if constexpr (sizeof(T) == 4) sum += __builtin_convertvector(halves[1], f64x8);
  double s[8];
  std::memcpy(s, &sum, sizeof(s));
  return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}
template <typename T>
FASTRL_INLINE double lane_least(Lanes<T> x) {
  T lanes[kLanes<T>];
  std::memcpy(lanes, x.part, sizeof(lanes));
  for (int i = 1; i < kLanes<T>; ++i) lanes[0] = lanes[i] < lanes[0] ? lanes[i] : lanes[0];
  return static_cast<double>(lanes[0]);
}

}  // namespace fastrl::FASTRL_CAPABILITY
