// Logical vectors of 64 bytes: 16 floats or 8 doubles, one source for every capability.
//
// They are GCC/Clang vector extensions, which the compiler maps to one AVX-512, two AVX2 or four
// SSE/NEON registers, so an algorithm has the same lanes and the same order of operations
// everywhere. Arithmetic works lane by lane.
//
// g++ splits 64-byte arithmetic into narrower registers by itself, but turns comparisons, `m ? a :
// b` and shuffles of them into code for each lane. So those work on native parts: a vector is cut
// into as many registers as it takes, each is computed as one unit, and the parts are put together
// again. Intrinsics stand where the compiler has no word for it.
//
// Include from *_kernel.cpp files only: everything here belongs to the capability being compiled.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/views.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define FASTRL_INLINE inline __attribute__((always_inline))

namespace fastrl::FASTRL_CAPABILITY {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef double f64x8 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

template <typename T>
struct Simd;
template <>
struct Simd<float> {
  using vec = f32x16;
  using lane_int = int32_t;
  static constexpr int kLanes = 16;
};
template <>
struct Simd<double> {
  using vec = f64x8;
  using lane_int = int64_t;
  static constexpr int kLanes = 8;
};
template <typename T>
using Vec = typename Simd<T>::vec;
template <typename T>
constexpr int kLanes = Simd<T>::kLanes;

template <typename T>
FASTRL_INLINE Vec<T> broadcast(T value) {
  return Vec<T>{} + value;
}

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

template <typename T>
constexpr uint32_t kAllLanes = (uint32_t{1} << kLanes<T>)-1;

FASTRL_INLINE uint32_t first_bits(int n) { return (uint32_t{1} << n) - 1; }
FASTRL_INLINE int count_bits(uint32_t bits) { return __builtin_popcount(bits); }

// Sum of lanes as a fixed tree: the result depends on the lanes alone.
template <typename T>
FASTRL_INLINE T lane_sum(Vec<T> v) {
  T lanes[kLanes<T>];
  std::memcpy(lanes, &v, sizeof(v));
  for (int width = kLanes<T> / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

template <typename T>
FASTRL_INLINE Vec<T> load(const T* p) {
  Vec<T> v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
template <typename T>
FASTRL_INLINE void store(T* p, Vec<T> v) {
  std::memcpy(p, &v, sizeof(v));
}

// First n lanes from memory, the rest zero; never touches memory past n.
template <typename T>
FASTRL_INLINE Vec<T> load_first(const T* p, int n) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    return (Vec<T>)_mm512_maskz_loadu_ps(static_cast<__mmask16>(first_bits(n)), p);
  } else {
    return (Vec<T>)_mm512_maskz_loadu_pd(static_cast<__mmask8>(first_bits(n)), p);
  }
#else
  Vec<T> v = {};
  std::memcpy(&v, p, sizeof(T) * static_cast<size_t>(n));
  return v;
#endif
}
template <typename T>
FASTRL_INLINE void store_first(T* p, Vec<T> v, int n) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>(first_bits(n)), (__m512)v);
  } else {
    _mm512_mask_storeu_pd(p, static_cast<__mmask8>(first_bits(n)), (__m512d)v);
  }
#else
  std::memcpy(p, &v, sizeof(T) * static_cast<size_t>(n));
#endif
}

// Fetches the cache line of an address that will be read, or written, a little later: kernels work
// on a few streams in turn, each too slow for the processor to see it coming. Outside of a tensor
// it does nothing. Not __builtin_prefetch: g++ 12 drops calls that do only that.
FASTRL_INLINE void prefetch_read(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetcht0 (%0)" ::"r"(p));
#else
  __builtin_prefetch(p, 0);
#endif
}
FASTRL_INLINE void prefetch_write(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetchw (%0)" ::"r"(p));
#else
  __builtin_prefetch(p, 1);
#endif
}

// kSize bytes to where they need not pass through the caches; `p` is aligned to kSize, which is 16,
// 32 or 64.
template <int kSize>
FASTRL_INLINE void stream_bytes(void* p, const void* bytes) {
  char* const to = static_cast<char*>(p);
  const char* const from = static_cast<const char*>(bytes);
#if defined(__AVX512F__)
  if constexpr (kSize == 64) return _mm512_stream_si512((__m512i*)to, *(const __m512i_u*)from);
#endif
#if defined(__AVX2__)
  if constexpr (kSize >= 32) {
    for (int i = 0; i < kSize; i += 32) {
      _mm256_stream_si256((__m256i*)(to + i), *(const __m256i_u*)(from + i));
    }
    return;
  }
#endif
#if defined(__x86_64__)
  for (int i = 0; i < kSize; i += 16) {
    _mm_stream_si128((__m128i*)(to + i), *(const __m128i_u*)(from + i));
  }
#else
  std::memcpy(to, from, kSize);
#endif
}

// Makes what was streamed visible to other threads; once at the end.
FASTRL_INLINE void end_of_stream() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Packs the lanes whose bit is set to the low end, in order; the rest become zero.
template <typename T>
FASTRL_INLINE Vec<T> compress(Vec<T> v, uint32_t bits) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    return (Vec<T>)_mm512_maskz_compress_ps(static_cast<__mmask16>(bits), (__m512)v);
  } else {
    return (Vec<T>)_mm512_maskz_compress_pd(static_cast<__mmask8>(bits), (__m512d)v);
  }
#else
  T in[kLanes<T>], out[kLanes<T> + 1] = {};
  std::memcpy(in, &v, sizeof(v));
  int n = 0;
  for (int i = 0; i < kLanes<T>;
       ++i) {  // branch-free: the write position moves only past valid lanes
    out[n] = in[i];
    n += (bits >> i) & 1;
  }
  out[n] = 0;  // an invalid lane may have been left there; nothing was written behind it
  Vec<T> packed;
  std::memcpy(&packed, out, sizeof(packed));
  return packed;
#endif
}

// The inverse: low lanes go to the lanes whose bit is set, the others become zero.
template <typename T>
FASTRL_INLINE Vec<T> expand(Vec<T> v, uint32_t bits) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    return (Vec<T>)_mm512_maskz_expand_ps(static_cast<__mmask16>(bits), (__m512)v);
  } else {
    return (Vec<T>)_mm512_maskz_expand_pd(static_cast<__mmask8>(bits), (__m512d)v);
  }
#else
  T in[kLanes<T>], out[kLanes<T>];
  std::memcpy(in, &v, sizeof(v));
  int n = 0;
  for (int i = 0; i < kLanes<T>; ++i) {
    const int valid = (bits >> i) & 1;
    out[i] = valid ? in[n] : T{0};
    n += valid;
  }
  Vec<T> spread;
  std::memcpy(&spread, out, sizeof(spread));
  return spread;
#endif
}

// ---- elements of any floating kind as T
// -----------------------------------------------------------------------------

FASTRL_INLINE f32x16 widen_bf16(u16x16 bits) {
#if defined(__AVX512F__)
  // One instruction where g++ 12 makes four of the conversion.
  return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16);
#else
  return reinterpret_cast<f32x16>(__builtin_convertvector(bits, i32x16) << 16);
#endif
}

FASTRL_INLINE f32x16 widen_f16(u16x16 bits) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__F16C__)
  __m128i halves[2];
  std::memcpy(halves, &bits, sizeof(bits));
  const __m256 parts[2] = {_mm256_cvtph_ps(halves[0]), _mm256_cvtph_ps(halves[1])};
  f32x16 out;
  std::memcpy(&out, parts, sizeof(out));
  return out;
#else
  // Shift exponent and mantissa into place and rescale by 2^112, which also makes subnormals right;
  // inf and NaN then need their exponent filled up.
  const i32x16 wide = __builtin_convertvector(bits, i32x16);
  const f32x16 magnitude = reinterpret_cast<f32x16>((wide & 0x7fff) << 13) * 5.192296858534828e33f;
  const i32x16 special = (wide & 0x7c00) == 0x7c00;
  const i32x16 magnitude_bits = reinterpret_cast<i32x16>(magnitude) | (special & 0x7f800000);
  return reinterpret_cast<f32x16>(magnitude_bits | ((wide & 0x8000) << 16));
#endif
}

// bfloat16 in the upper half of each lane, shifted down with its sign; V holds any number of 32-bit
// lanes. NaN is told by arithmetic, because g++ makes one branch per lane of a comparison that is
// wider than its registers.
template <typename V>
FASTRL_INLINE V bf16_lanes(V bits) {
  const V rounded = bits + 0x7fff + ((bits >> 16) & 1);  // nearest, ties to even
  const V is_nan = (0x7f800000 - (bits & 0x7fffffff)) >> 31;
  return (((bits | 0x400000) & is_nan) | (rounded & ~is_nan)) >> 16;
}

// Written on the processor's own registers: g++ 12 moves pieces of anything wider through memory.
FASTRL_INLINE u16x16 narrow_bf16(f32x16 v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  typedef int32_t i32x8 __attribute__((vector_size(32)));
  i32x8 parts[2];
  std::memcpy(parts, &v, sizeof(v));
  const __m256i packed =
      _mm256_packs_epi32((__m256i)bf16_lanes(parts[0]), (__m256i)bf16_lanes(parts[1]));
  return (u16x16)_mm256_permute4x64_epi64(packed, 0xd8);
#elif defined(__x86_64__) && !defined(__AVX512F__)
  typedef int32_t i32x4 __attribute__((vector_size(16)));
  i32x4 parts[4];
  std::memcpy(parts, &v, sizeof(v));
  const __m128i packed[2] = {
      _mm_packs_epi32((__m128i)bf16_lanes(parts[0]), (__m128i)bf16_lanes(parts[1])),
      _mm_packs_epi32((__m128i)bf16_lanes(parts[2]), (__m128i)bf16_lanes(parts[3]))};
  u16x16 out;
  std::memcpy(&out, packed, sizeof(out));
  return out;
#else
  return __builtin_convertvector(bf16_lanes(reinterpret_cast<i32x16>(v)), u16x16);
#endif
}

#if defined(__aarch64__)
using Half = __fp16;
#else
using Half = _Float16;
#endif

FASTRL_INLINE uint16_t narrow_f16(float value) {
  const Half half = static_cast<Half>(value);
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof(bits));
  return bits;
}

FASTRL_INLINE u16x16 narrow_f16(f32x16 v) {
#if defined(__AVX512F__)
  return (u16x16)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  __m256 parts[2];
  std::memcpy(parts, &v, sizeof(v));
  return (u16x16)_mm256_set_m128i(_mm256_cvtps_ph(parts[1], _MM_FROUND_TO_NEAREST_INT),
                                  _mm256_cvtps_ph(parts[0], _MM_FROUND_TO_NEAREST_INT));
#else
  float lanes[16];
  uint16_t out[16];
  std::memcpy(lanes, &v, sizeof(v));
  for (int i = 0; i < 16; ++i) out[i] = narrow_f16(lanes[i]);
  u16x16 packed;
  std::memcpy(&packed, out, sizeof(packed));
  return packed;
#endif
}

// kLanes<T> elements starting at `index`, converted to T. For T = double the elements are doubles.
template <typename T>
FASTRL_INLINE Vec<T> load_as(const void* data, Kind kind, int64_t index) {
  if constexpr (sizeof(T) == 8) {
    return load(static_cast<const T*>(data) + index);
  } else {
    if (__builtin_expect(kind == Kind::f32, 1)) return load(static_cast<const T*>(data) + index);
    u16x16 bits;
    std::memcpy(&bits, static_cast<const uint16_t*>(data) + index, sizeof(bits));
    return kind == Kind::bf16 ? widen_bf16(bits) : widen_f16(bits);
  }
}

// The same for the first n elements only; the other lanes are zero.
template <typename T>
FASTRL_INLINE Vec<T> load_first_as(const void* data, Kind kind, int64_t index, int n) {
  if constexpr (sizeof(T) == 8) {
    return load_first(static_cast<const T*>(data) + index, n);
  } else {
    if (__builtin_expect(kind == Kind::f32, 1)) {
      return load_first(static_cast<const T*>(data) + index, n);
    }
    u16x16 bits = {};
    std::memcpy(&bits, static_cast<const uint16_t*>(data) + index,
                sizeof(uint16_t) * static_cast<size_t>(n));
    return kind == Kind::bf16 ? widen_bf16(bits) : widen_f16(bits);
  }
}

// First n lanes stored in `kind`, rounded to nearest even.
template <typename T>
FASTRL_INLINE void store_first_as(void* data, Kind kind, int64_t index, Vec<T> v, int n) {
  if constexpr (sizeof(T) == 8) {
    store_first(static_cast<T*>(data) + index, v, n);
  } else {
    if (__builtin_expect(kind == Kind::f32, 1)) {
      if (n == kLanes<T>) {
        store(static_cast<T*>(data) + index, v);
      } else {
        store_first(static_cast<T*>(data) + index, v, n);
      }
      return;
    }
    const u16x16 bits = kind == Kind::bf16 ? narrow_bf16(v) : narrow_f16(v);
    std::memcpy(static_cast<uint16_t*>(data) + index, &bits,
                sizeof(uint16_t) * static_cast<size_t>(n));
  }
}

// ---- masks
// ----------------------------------------------------------------------------------------------------------

FASTRL_INLINE bool mask_at(const MaskView& mask, int64_t index) {
  switch (mask.width) {
    case 1:
      return (static_cast<const uint8_t*>(mask.data)[index] & mask.significant) != 0;
    case 2:
      return (static_cast<const uint16_t*>(mask.data)[index] & mask.significant) != 0;
    case 4:
      return (static_cast<const uint32_t*>(mask.data)[index] & mask.significant) != 0;
    default:
      return (static_cast<const uint64_t*>(mask.data)[index] & mask.significant) != 0;
  }
}

// Bit i says whether element index + i is valid, for i < n <= 16.
FASTRL_INLINE uint32_t mask_bits(const MaskView& mask, int64_t index, int n) {
#if defined(__x86_64__)
  if (mask.width == 1 && n == 16) {
    __m128i bytes;
    std::memcpy(&bytes, static_cast<const uint8_t*>(mask.data) + index, sizeof(bytes));
    const __m128i zero = _mm_cmpeq_epi8(bytes, _mm_setzero_si128());
    return ~static_cast<uint32_t>(_mm_movemask_epi8(zero)) & 0xffff;
  }
#endif
#if defined(__AVX512F__)
  // Trainers keep masks as int64 as often as bool. Whole vectors take the plain loads: masked ones
  // are slower.
  if (mask.width == 8) {
    const auto* const p = static_cast<const int64_t*>(mask.data) + index;
    const __m512i significant = _mm512_set1_epi64(static_cast<int64_t>(mask.significant));
    __m512i first, second;
    if (n == 16) {
      first = _mm512_loadu_si512(p);
      second = _mm512_loadu_si512(p + 8);
    } else {
      const uint32_t valid = first_bits(n);
      first = _mm512_maskz_loadu_epi64(static_cast<__mmask8>(valid), p);
      second = _mm512_maskz_loadu_epi64(static_cast<__mmask8>(valid >> 8), p + 8);
    }
    return static_cast<uint32_t>(_mm512_test_epi64_mask(first, significant)) |
           static_cast<uint32_t>(_mm512_test_epi64_mask(second, significant)) << 8;
  }
  if (mask.width == 4) {
    const auto* const p = static_cast<const int32_t*>(mask.data) + index;
    const __m512i values = n == 16
                               ? _mm512_loadu_si512(p)
                               : _mm512_maskz_loadu_epi32(static_cast<__mmask16>(first_bits(n)), p);
    return _mm512_test_epi32_mask(values,
                                  _mm512_set1_epi32(static_cast<int32_t>(mask.significant)));
  }
#elif defined(__AVX2__)
  if (mask.width == 8 && n == 16) {
    const auto* const p = static_cast<const int64_t*>(mask.data) + index;
    const __m256i significant = _mm256_set1_epi64x(static_cast<int64_t>(mask.significant));
    uint32_t zero = 0;
    for (int i = 0; i < 16; i += 4) {
      const __m256i part = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i));
      const __m256i is_zero =
          _mm256_cmpeq_epi64(_mm256_and_si256(part, significant), _mm256_setzero_si256());
      zero |= static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(is_zero))) << i;
    }
    return ~zero & 0xffff;
  }
#endif
  uint32_t bits = 0;
  for (int i = 0; i < n; ++i) bits |= static_cast<uint32_t>(mask_at(mask, index + i)) << i;
  return bits;
}

}  // namespace fastrl::FASTRL_CAPABILITY
