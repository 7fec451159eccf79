// A chunk of a row as blocks of vectors: which lanes are valid, and the inputs there. For the loss
// kernels.
//
// Include from *_kernel.cpp files only.
#pragma once

#include "common/lanes.h"
#include "common/token_rows_kernel.h"

namespace fastrl::FASTRL_CAPABILITY {

constexpr int kBlockVectors = 16;

template <typename T>
struct TokenBlock {
  int64_t begin = 0;  // first token, counted from the start of the chunk
  int num_vectors = 0;
  int num_last = 0;  // lanes of the last vector
  LaneMask<T> valid[kBlockVectors];

  FASTRL_INLINE int lanes_of(int i) const { return i + 1 < num_vectors ? kLanes<T> : num_last; }
  FASTRL_INLINE int64_t offset(int i) const { return begin + i * kLanes<T>; }
};

// Calls `compute(block)` for the blocks of a chunk, from left to right.
template <typename T, typename Compute>
FASTRL_INLINE void for_each_block(const Rows& rows, const MaskView& mask, const TokenRange& chunk,
                                  const Compute& compute) {
  constexpr int64_t kBlockTokens = kBlockVectors * kLanes<T>;
  const bool has_mask = mask.data != nullptr;
  const int64_t mask_start = has_mask ? rows.begin(chunk.row, mask.row_stride) + chunk.begin : 0;
  TokenBlock<T> block;
  for (int64_t begin = 0; begin < chunk.length; begin += kBlockTokens) {
    const int64_t left = chunk.length - begin;
    const auto size = static_cast<int>(left < kBlockTokens ? left : kBlockTokens);
    block.begin = begin;
    block.num_vectors = (size + kLanes<T> - 1) / kLanes<T>;
    block.num_last = size - (block.num_vectors - 1) * kLanes<T>;
    for (int i = 0; i < block.num_vectors; ++i) {
      const int n = block.lanes_of(i);
      block.valid[i] =
          LaneMask<T>(has_mask ? mask_bits(mask, mask_start + block.offset(i), n) : first_bits(n));
    }
    compute(block);
  }
}

template <typename T>
constexpr Kind kOwnKind = sizeof(T) == 8 ? Kind::f64 : Kind::f32;

// An input at the tokens of a chunk: one value per token, or per row.
template <typename T>
class TokenReader {
 public:
  FASTRL_INLINE TokenReader(const Rows& rows, const FloatView& view, const TokenRange& chunk,
                            bool per_row = false)
      : data_(view.data), kind_(view.kind), per_row_(per_row) {
    if (per_row) {
      row_value_ = Lanes<T>(load_first_as<T>(data_, kind_, chunk.row * view.row_stride, 1)[0]);
    } else if (data_ != nullptr) {
      start_ = rows.begin(chunk.row, view.row_stride) + chunk.begin;
    }
  }
  FASTRL_INLINE bool is_given() const { return data_ != nullptr; }

  // Vector i of the block; zero where a lane is not valid, so that nothing there is ever read in
  // arithmetic.
  FASTRL_INLINE Lanes<T> operator()(const TokenBlock<T>& block, int i) const {
    const Lanes<T> zero = T{0};
    if (per_row_) return select(block.valid[i], row_value_, zero);
    const int n = block.lanes_of(i);
    const int64_t at = start_ + block.offset(i);
    if (__builtin_expect(kind_ == kOwnKind<T> && n == kLanes<T>, 1)) {
      const T* const p = static_cast<const T*>(data_) + at;
      prefetch_read(p + kBlockVectors * kLanes<T>);
      return select(block.valid[i], Lanes<T>::at(p), zero);
    }
    const Vec<T> v =
        n == kLanes<T> ? load_as<T>(data_, kind_, at) : load_first_as<T>(data_, kind_, at, n);
    return select(block.valid[i], Lanes<T>(v), zero);
  }

 private:
  const void* data_;
  Kind kind_;
  bool per_row_;
  int64_t start_ = 0;
  Lanes<T> row_value_ = T{0};
};

// Vector i of the block to `out`, whose first element is that of the chunk plus `out_at`; zero
// where a lane is not valid.
template <typename T>
FASTRL_INLINE void store_block(const TokenBlock<T>& block, int i, void* out, Kind kind,
                               int64_t out_at, Lanes<T> x) {
  x = select(block.valid[i], x, Lanes<T>(T{0}));
  const int n = block.lanes_of(i);
  const int64_t at = out_at + block.offset(i);
  if (__builtin_expect(kind == kOwnKind<T> && n == kLanes<T>, 1)) {
    T* const p = static_cast<T*>(out) + at;
    prefetch_write(p + kBlockVectors * kLanes<T>);
    x.to(p);
  } else {
    store_first_as<T>(out, kind, at, x.vec(), n);
  }
}

}  // namespace fastrl::FASTRL_CAPABILITY
