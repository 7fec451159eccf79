// The scan inside one block of lanes, from the right end to the left; *_kernel.cpp files only.
#pragma once

#include "common/lanes.h"
#include "common/vec.h"

namespace fastrl::FASTRL_CAPABILITY {

// 0, 1, 2, ... in the lanes of one native part.
template <typename T>
FASTRL_INLINE NativeInt<T> part_index() {
  NativeInt<T> index = {};
  for (int i = 0; i < kLanes<T> / kNativeParts; ++i) index[i] = i;
  return index;
}

// Lanes Shift, Shift + 1, ... of two parts one after the other.
template <typename T, int Shift>
FASTRL_INLINE Native<T> shift_pair(Native<T> low, Native<T> high) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  // alignr works within halves of 16 bytes: feed it the halves that meet.
  const __m256i a = (__m256i)low, b = (__m256i)high;
  const __m256i middle = _mm256_permute2x128_si256(a, b, 0x21);
  constexpr int kBytes = Shift * static_cast<int>(sizeof(T));
  if constexpr (kBytes == 16) return (Native<T>)middle;
  if constexpr (kBytes < 16) return (Native<T>)_mm256_alignr_epi8(middle, a, kBytes % 16);
  return (Native<T>)_mm256_alignr_epi8(b, middle, kBytes % 16);
#elif defined(__clang__)
  constexpr int kStep = kLanes<T> / kNativeParts;
  Native<T> out;
  for (int i = 0; i < kStep; ++i) {
    out[i] = i + Shift < kStep ? low[i + Shift] : high[i + Shift - kStep];
  }
  return out;
#else
  using I = typename Simd<T>::lane_int;
  return __builtin_shuffle(low, high, part_index<T>() + static_cast<I>(Shift));
#endif
}

// Lane i takes lane i + Step; the top Step lanes take `fill`.
template <int Step, typename T>
FASTRL_INLINE Lanes<T> shift_down(Lanes<T> x, Lanes<T> fill) {
  constexpr int kStep = kLanes<T> / kNativeParts;
  constexpr int kWhole = Step / kStep, kRest = Step % kStep;
  const auto part = [&](int p) {
    return p < kNativeParts ? x.part[p] : fill.part[p - kNativeParts];
  };
  Lanes<T> out;
  for (int p = 0; p < kNativeParts; ++p) {
    if constexpr (kRest == 0) {
      out.part[p] = part(p + kWhole);
    } else {
      out.part[p] = shift_pair<T, kRest>(part(p + kWhole), part(p + kWhole + 1));
    }
  }
  return out;
}

// Lanes in opposite order.
template <typename T>
FASTRL_INLINE Lanes<T> reversed(Lanes<T> x) {
  constexpr int kStep = kLanes<T> / kNativeParts;
  Lanes<T> out;
  for (int p = 0; p < kNativeParts; ++p) {
    const Native<T> from = x.part[kNativeParts - 1 - p];
#if defined(__clang__)
    for (int i = 0; i < kStep; ++i) out.part[p][i] = from[kStep - 1 - i];
#else
    using I = typename Simd<T>::lane_int;
    out.part[p] = __builtin_shuffle(from, static_cast<I>(kStep - 1) - part_index<T>());
#endif
  }
  return out;
}

template <typename T>
FASTRL_INLINE T first_lane(Lanes<T> x) {
  return x.part[0][0];
}

// n elements of a row as T, the other lanes zero.
template <typename T>
FASTRL_INLINE Lanes<T> load_row(const FloatView& view, int64_t index, int n) {
  if (n < kLanes<T>) return Lanes<T>(load_first_as<T>(view.data, view.kind, index, n));
  if (sizeof(T) == 8 || view.kind == Kind::f32) {
    return Lanes<T>::at(static_cast<const T*>(view.data) + index);
  }
  return Lanes<T>(load_as<T>(view.data, view.kind, index));
}

// With `stream` whole lines bypass the caches; the caller ends with end_of_stream().
template <typename T>
FASTRL_INLINE void store_row(T* p, Lanes<T> x, int n, bool stream = false) {
  if (n == kLanes<T>) {
    if (stream && reinterpret_cast<uintptr_t>(p) % 64 == 0) {
      stream_bytes<64>(p, x.part);
    } else {
      x.to(p);
    }
  } else {
    store_first(p, x.vec(), n);
  }
}

// x_i <- x_i + factor_i x_{i+1}, and factor_i becomes the product of the factors from lane i to the
// right end, so that x_i + factor_i * carry is the value with `carry` coming from the right. Idle
// lanes hold x = 0 and factor = 1.
template <typename T>
FASTRL_INLINE void suffix_scan(Lanes<T>& x, Lanes<T>& factor) {
  const Lanes<T> zero(T{0}), one(T{1});
  const auto step = [&](Lanes<T> shifted_x, Lanes<T> shifted_factor) {
    x += factor * shifted_x;
    factor = factor * shifted_factor;
  };
  step(shift_down<1>(x, zero), shift_down<1>(factor, one));
  step(shift_down<2>(x, zero), shift_down<2>(factor, one));
  step(shift_down<4>(x, zero), shift_down<4>(factor, one));
  if constexpr (kLanes<T> == 16) step(shift_down<8>(x, zero), shift_down<8>(factor, one));
}

}  // namespace fastrl::FASTRL_CAPABILITY
