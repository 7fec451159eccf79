// Eight consecutive elements per thread: loads, conversions and stores.
//
// Loads come in two steps. `load` only moves bits, so that all of a thread's loads are in flight
// before it waits for the first; `numbers` and `bits` look at them. Whole, aligned items move 128
// bits at a time, others element by element with the same result.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/views.h"

namespace fastrl::cuda {

constexpr int kItems = 8;
constexpr int kWarp = 32;

// The items of a thread that exist: [low, high) of kItems.
struct ItemRange {
  int low = 0;
  int high = kItems;

  // Those of the elements first, first + 1, ... that lie in [begin, end).
  static __device__ __forceinline__ ItemRange within(int64_t first, int64_t begin, int64_t end) {
    const int64_t low = begin - first, high = end - first;
    ItemRange range;
    range.low = low < 0 ? 0 : low < kItems ? static_cast<int>(low) : kItems;
    range.high = high < 0 ? 0 : high < kItems ? static_cast<int>(high) : kItems;
    return range;
  }
  __device__ __forceinline__ bool whole() const { return low == 0 && high == kItems; }
  __device__ __forceinline__ bool has(int i) const { return i >= low && i < high; }
  __device__ __forceinline__ uint32_t bits() const {
    return high > low ? ((1u << high) - 1) & ~((1u << low) - 1) : 0;
  }
};

// Data that is read once should not push out of the caches what is read twice.
__device__ __forceinline__ uint4 load_once(const uint4* p) { return __ldcs(p); }

__device__ __forceinline__ bool is_aligned(const void* p, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

// Items of `Bytes` bytes each, as 32-bit words.
template <int Bytes>
struct Words {
  static constexpr int kCount = kItems * Bytes / 4;
  uint32_t word[kCount];
};

// Fills the first words of `out` with elements of Bytes bytes; elements out of range become 0.
template <int Bytes, int Count>
__device__ __forceinline__ void load_words(const void* data, int64_t first, ItemRange range,
                                           uint32_t (&out)[Count]) {
  static_assert(Count >= Words<Bytes>::kCount, "room for the items");
  const char* const p = static_cast<const char*>(data) + first * Bytes;
  constexpr int kBytes = kItems * Bytes;
  if (range.whole() && is_aligned(p, kBytes < 16 ? kBytes : 16)) {
    if constexpr (kBytes == 8) {
      const uint2 pair = __ldcs(reinterpret_cast<const uint2*>(p));
      out[0] = pair.x;
      out[1] = pair.y;
    } else {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) {
        const uint4 quad = load_once(reinterpret_cast<const uint4*>(p) + i);
        out[4 * i] = quad.x;
        out[4 * i + 1] = quad.y;
        out[4 * i + 2] = quad.z;
        out[4 * i + 3] = quad.w;
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < Words<Bytes>::kCount; ++i) out[i] = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (!range.has(i)) continue;
    if constexpr (Bytes == 1) {
      out[i / 4] |= uint32_t{reinterpret_cast<const uint8_t*>(p)[i]} << (8 * (i % 4));
    } else if constexpr (Bytes == 2) {
      out[i / 2] |= uint32_t{reinterpret_cast<const uint16_t*>(p)[i]} << (16 * (i % 2));
    } else if constexpr (Bytes == 4) {
      out[i] = reinterpret_cast<const uint32_t*>(p)[i];
    } else {
      const uint64_t element = reinterpret_cast<const uint64_t*>(p)[i];
      out[2 * i] = static_cast<uint32_t>(element);
      out[2 * i + 1] = static_cast<uint32_t>(element >> 32);
    }
  }
}

__device__ __forceinline__ float from_bf16(uint32_t bits) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ float from_f16(uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}
__device__ __forceinline__ uint16_t to_bf16(float x) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}
__device__ __forceinline__ uint16_t to_f16(float x) { return __half_as_ushort(__float2half_rn(x)); }

// Items of a floating tensor, computed in T: float, or double for double tensors only.
template <typename T>
struct FloatItems {
  uint32_t word[Words<sizeof(T)>::kCount];

  __device__ __forceinline__ void load(const FloatView& view, int64_t first, ItemRange range) {
    if constexpr (sizeof(T) == 8) {
      load_words<8>(view.data, first, range, word);
    } else if (view.kind == Kind::f32) {
      load_words<4>(view.data, first, range, word);
    } else {
      load_words<2>(view.data, first, range, word);
    }
  }
  __device__ __forceinline__ void numbers(const FloatView& view, T (&out)[kItems]) const {
    if constexpr (sizeof(T) == 8) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        out[i] = __hiloint2double(static_cast<int>(word[2 * i + 1]), static_cast<int>(word[2 * i]));
      }
    } else if (view.kind == Kind::f32) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) out[i] = __uint_as_float(word[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const uint32_t half = (word[i / 2] >> (16 * (i % 2))) & 0xffffu;
        out[i] = view.kind == Kind::bf16 ? from_bf16(half) : from_f16(half);
      }
    }
  }
};

// Items of a mask. An element is valid when (bits & significant) != 0; no mask means all of them.
struct MaskItems {
  uint32_t word[Words<4>::kCount];

  __device__ __forceinline__ void load(const MaskView& mask, int64_t first, ItemRange range) {
    if (mask.data == nullptr) return;
    if (mask.width == 1) {
      load_words<1>(mask.data, first, range, word);
    } else if (mask.width == 2) {
      load_words<2>(mask.data, first, range, word);
    } else if (mask.width == 4) {
      load_words<4>(mask.data, first, range, word);
    } else {
      uint32_t wide[Words<8>::kCount];
      load_words<8>(mask.data, first, range, wide);
      const auto low = static_cast<uint32_t>(mask.significant);
      const auto high = static_cast<uint32_t>(mask.significant >> 32);
#pragma unroll
      for (int i = 0; i < kItems; ++i) word[i] = (wide[2 * i] & low) | (wide[2 * i + 1] & high);
    }
  }
  // One bit per valid item in `range`.
  __device__ __forceinline__ uint32_t bits(const MaskView& mask, ItemRange range) const {
    if (mask.data == nullptr) return range.bits();
    uint32_t valid = 0;
    const auto significant = static_cast<uint32_t>(mask.significant);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      uint32_t element = word[i];
      if (mask.width == 1) {
        element = (word[i / 4] >> (8 * (i % 4))) & 0xffu & significant;
      } else if (mask.width == 2) {
        element = (word[i / 2] >> (16 * (i % 2))) & 0xffffu & significant;
      } else if (mask.width == 4) {
        element = word[i] & significant;
      }
      valid |= static_cast<uint32_t>(element != 0) << i;
    }
    return valid & range.bits();
  }
};

// One element, for what does not come by rows.
template <typename T>
__device__ __forceinline__ T element(const FloatView& view, int64_t index) {
  if constexpr (sizeof(T) == 8) {
    return static_cast<const double*>(view.data)[index];
  } else {
    if (view.kind == Kind::f32) return static_cast<const float*>(view.data)[index];
    const uint32_t bits = static_cast<const uint16_t*>(view.data)[index];
    return view.kind == Kind::bf16 ? from_bf16(bits) : from_f16(bits);
  }
}
__device__ __forceinline__ bool mask_element(const MaskView& mask, int64_t index) {
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

// Items in `range` to out[first + i].
template <typename T>
__device__ __forceinline__ void store_items(T* out, int64_t first, ItemRange range,
                                            const T (&x)[kItems]) {
  T* const p = out + first;
  if (range.whole() && is_aligned(p, 16)) {
    constexpr int kPerQuad = 16 / sizeof(T);
    struct alignas(16) Quad {
      T x[kPerQuad];
    };
#pragma unroll
    for (int i = 0; i < kItems / kPerQuad; ++i) {
      Quad quad;
#pragma unroll
      for (int k = 0; k < kPerQuad; ++k) quad.x[k] = x[i * kPerQuad + k];
      reinterpret_cast<Quad*>(p)[i] = quad;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (range.has(i)) p[i] = x[i];
  }
}

// The same to a tensor of another floating kind.
template <typename T>
__device__ __forceinline__ void store_items_as(void* out, Kind kind, int64_t first, ItemRange range,
                                               const T (&x)[kItems]) {
  if (sizeof(T) == 8 || kind == Kind::f32) {
    store_items(static_cast<T*>(out), first, range, x);
    return;
  }
  uint16_t half[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    half[i] =
        kind == Kind::bf16 ? to_bf16(static_cast<float>(x[i])) : to_f16(static_cast<float>(x[i]));
  }
  store_items(static_cast<uint16_t*>(out), first, range, half);
}

}  // namespace fastrl::cuda
