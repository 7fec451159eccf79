// Rows of tokens as the losses walk them on the device: which tokens are valid, chunks of them for
// a warp each, and sums over chunks, rows and the batch.
//
// A chunk is 512 tokens counted from the first valid token of its row; the tokens in front of that
// one follow behind the last, so that the chunks of a row cover it once. A thread takes every 32nd
// token: that is coalesced wherever a row begins in memory, and packed rows begin anywhere. Chunks
// are summed by a fixed tree in the compute dtype, the chunks of a row, rows and blocks of rows by
// fixed trees in double, so what a row contributes depends on the row alone.
#pragma once

#include <type_traits>

#include "common/aggregation.h"
#include "common/reduce.cuh"
#include "common/rows.cuh"

namespace fastrl::cuda {

constexpr int kLossThreads = 256;
constexpr int kLossWarps = kLossThreads / kWarp;

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ __forceinline__ int warp_index() { return static_cast<int>(threadIdx.x) / kWarp; }
__device__ __forceinline__ int64_t global_warp() {
  return int64_t{blockIdx.x} * (blockDim.x / kWarp) + warp_index();
}

// Numbers for the pieces of kSize tokens of all rows, without a look at the lengths: padded rows
// have as many as their width needs, and a packed row that starts at element e has them from
// e / kSize + row on, which leaves room for its length and never overlaps the next.
template <int kSize>
struct Pieces {
  static constexpr int kTokens = kSize;

  static __host__ __device__ int64_t of(int64_t length) { return (length + kSize - 1) / kSize; }
  static int64_t count(const Rows& rows) {
    return rows.packed() ? rows.tokens / kSize + rows.count : rows.count * of(rows.length);
  }
  static __device__ int64_t first(const Rows& rows, int64_t row) {
    return rows.packed() ? Row(rows, row).start / kSize + row : row * of(rows.length);
  }
  // Called by a whole warp. Packed, every lane looks at one row out of 32 equal steps at a time;
  // whatever the offsets hold, the answer is a row.
  static __device__ int64_t row_of(const Rows& rows, int64_t piece) {
    if (!rows.packed()) return piece / of(rows.length);
    int64_t low = 0, high = rows.count;  // first(low) <= piece < first(high)
    while (high - low > 1) {
      const int64_t step = (high - low + kWarp - 1) / kWarp;
      const int64_t row = low + lane_index() * step;
      const bool reached = row == low || (row < high && first(rows, row) <= piece);
      low += (__popc(__ballot_sync(kAllLanes, reached)) - 1) * step;
      high = low + step < high ? low + step : high;
    }
    return low;
  }
};

using MaskPieces = Pieces<1024>;
using LossChunks = Pieces<512>;

// ---- which tokens are valid

// Of a row without a valid token all are 0, which is how memory is before the first one is found.
struct RowSpan {
  unsigned long long lead;  // tokens from the first valid one to the end of the row
  unsigned long long end;   // one past the last valid token
  unsigned long long count;
};

// What find_valid leaves.
struct ValidRows {
  RowSpan* spans = nullptr;              // [rows]; null: every token is valid, and rows are padded
  unsigned long long* counts = nullptr;  // tokens, and sequences: rows with at least one
  uint8_t* bits = nullptr;               // by MaskPieces, a bit per token; null: all are valid
};

static __global__ void __launch_bounds__(kLossThreads)
    clear_words(unsigned long long* words, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kLossThreads + threadIdx.x;
  if (i < count) words[i] = 0;
}

// A warp per piece. Atomics on whole numbers give the same result in any order.
static __global__ void __launch_bounds__(kLossThreads)
    find_valid(const __grid_constant__ Rows rows, const __grid_constant__ MaskView mask,
               int64_t num_pieces, ValidRows out) {
  constexpr int kPieceBytes = MaskPieces::kTokens / 8, kRounds = kPieceBytes / kWarp;
  __shared__ unsigned long long found[kLossWarps][2];
  const int lane = lane_index(), warp = warp_index();
  const int64_t piece = global_warp();
  int count = 0;
  bool is_first = false;
  if (piece < num_pieces) {
    const Row row(rows, MaskPieces::row_of(rows, piece));
    const int64_t begin = (piece - MaskPieces::first(rows, row.index)) * MaskPieces::kTokens;
    if (begin >= 0 && begin < row.length) {
      MaskItems items[kRounds];
      ItemRange range[kRounds];
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const int64_t token = begin + (i * kWarp + lane) * kItems;
        range[i] = ItemRange::within(token, 0, row.length);
        items[i].load(mask, row.at(mask.row_stride) + token, range[i]);
      }
      int low = MaskPieces::kTokens, high = 0;  // of the valid tokens of the piece
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const uint32_t bits = items[i].bits(mask, range[i]);
        const int byte = i * kWarp + lane, token = byte * kItems;
        if (out.bits != nullptr) {
          out.bits[piece * kPieceBytes + byte] = static_cast<uint8_t>(bits);
        }
        if (bits == 0) continue;
        const int first = token + __ffs(static_cast<int>(bits)) - 1;
        low = first < low ? first : low;
        high = token + kWarp - __clz(static_cast<int>(bits));
        count += __popc(bits);
      }
      count = warp_reduce(count, Sum{});
      low = warp_reduce(low, Least{});
      high = warp_reduce(high, Greatest{});
      if (lane == 0 && count > 0) {
        RowSpan& span = out.spans[row.index];
        atomicMax(&span.lead, static_cast<unsigned long long>(row.length - (begin + low)));
        atomicMax(&span.end, static_cast<unsigned long long>(begin + high));
        is_first = atomicAdd(&span.count, static_cast<unsigned long long>(count)) == 0;
      }
    }
  }
  if (lane == 0) {
    found[warp][0] = static_cast<unsigned long long>(count);
    found[warp][1] = is_first;
  }
  __syncthreads();
  if (threadIdx.x < 2) {
    unsigned long long total = 0;
    for (int w = 0; w < kLossWarps; ++w) total += found[w][threadIdx.x];
    if (total > 0) atomicAdd(out.counts + threadIdx.x, total);
  }
}

// ---- rows with their weights

struct LossRows {
  Rows rows;
  ValidRows valid;
  Aggregation agg = Aggregation::token_mean;
  double denom = 0;                      // 0: the default
  const double* denom_tensor = nullptr;  // on the device, instead of `denom`

  __device__ __forceinline__ TokenCounts counts() const {
    TokenCounts out;
    out.width = static_cast<double>(rows.length);
    if (valid.counts == nullptr) {
      out.tokens = static_cast<double>(rows.count * rows.length);
      out.sequences = static_cast<double>(rows.length > 0 ? rows.count : 0);
    } else {
      out.tokens = static_cast<double>(valid.counts[0]);
      out.sequences = static_cast<double>(valid.counts[1]);
    }
    return out;
  }
  __device__ __forceinline__ double weight(int64_t row_tokens) const {
    const double given = denom_tensor == nullptr ? denom : *denom_tensor;
    return row_weight(agg, divisor(agg, given, counts()), row_tokens);
  }
};

// A row from its first valid token to one past its last.
struct LossRow : Row {
  int64_t first = 0, end = 0, count = 0;

  __device__ __forceinline__ LossRow(const LossRows& loss, int64_t row) : Row(loss.rows, row) {
    end = count = length;
    if (loss.valid.spans == nullptr) return;
    const RowSpan& span = loss.valid.spans[row];
    end = static_cast<int64_t>(span.end);
    count = static_cast<int64_t>(span.count);
    first = count == 0 ? 0 : length - static_cast<int64_t>(span.lead);
  }
  __device__ __forceinline__ int64_t num_chunks() const { return LossChunks::of(end - first); }
};

// ---- chunks

// Tokens of a thread that are loaded together, 32 apart: a strip of a chunk.
constexpr int kStrip = 4;
constexpr int kStripTokens = kStrip * kWarp;
constexpr int kStrips = LossChunks::kTokens / kStripTokens;

// The part of a strip that one lane has.
struct LossStrip {
  int64_t token;       // its first token, counted from the start of the row
  int num_loaded;      // how many of its tokens lie in front of the end of the valid ones
  bool is_in_row;      // all tokens of the warp lie in the row, none has wrapped around
  uint32_t valid = 0;  // a bit per token

  __device__ __forceinline__ bool is_valid(int i) const { return (valid >> i) & 1; }
};

// A chunk of a row seen from one lane of its warp.
class LossChunk {
 public:
  LossRow row;
  int64_t begin;  // counted from the first valid token of the row

  // Called by a whole warp.
  __device__ __forceinline__ LossChunk(const LossRows& loss, int64_t chunk)
      : row(loss, LossChunks::row_of(loss.rows, chunk)),
        begin((chunk - LossChunks::first(loss.rows, row.index)) * LossChunks::kTokens) {
    if (!exists() || !has_tokens()) return;
    const int64_t token = row.first + begin;
    if (loss.valid.bits == nullptr) {
      const int64_t left = row.end - token - lane_index() * kWarp;
      words_ = left >= kWarp ? ~0u : left <= 0 ? 0 : (1u << left) - 1;
      return;
    }
    // Lane i gets the bits of tokens 32 i and on, from two words of the row.
    const auto* const words = reinterpret_cast<const uint32_t*>(loss.valid.bits) +
                              MaskPieces::first(loss.rows, row.index) * kWarp;
    const int64_t word = token / kWarp + lane_index();
    const bool is_needed = lane_index() <= LossChunks::kTokens / kWarp;
    const bool exists = word < MaskPieces::of(row.length) * kWarp;
    const uint32_t low = is_needed && exists ? words[word] : 0;
    const uint32_t high = __shfl_down_sync(kAllLanes, low, 1);
    const int shift = static_cast<int>(token % kWarp);
    words_ = shift == 0 ? low : (low >> shift) | (high << (kWarp - shift));
  }
  // Rows shorter than the widest leave numbers of chunks unused.
  __device__ __forceinline__ bool exists() const { return begin >= 0 && begin < row.length; }
  __device__ __forceinline__ bool has_tokens() const { return row.first + begin < row.end; }
  __device__ __forceinline__ bool has_strip(int index) const {
    return begin + index * kStripTokens < row.length;
  }
  // Called by a whole warp.
  __device__ __forceinline__ LossStrip strip(int index) const {
    LossStrip out;
    const int64_t first = row.first + begin + index * kStripTokens;
    out.token = first + lane_index();
    const int64_t left = row.end - out.token;
    out.num_loaded = left >= kStripTokens ? kStrip
                     : left <= 0          ? 0
                                          : (static_cast<int>(left) + kWarp - 1) / kWarp;
    out.is_in_row = first + kStripTokens <= row.length;
#pragma unroll
    for (int i = 0; i < kStrip; ++i) {
      const uint32_t word = __shfl_sync(kAllLanes, words_, index * kStrip + i);
      out.valid |= ((word >> lane_index()) & 1) << i;
    }
    return out;
  }
  // To dense rows `out`. Over the strips of a row every element is stored once.
  template <typename T>
  __device__ __forceinline__ void store(void* out, Kind kind, int64_t row_stride,
                                        const LossStrip& strip, const T (&x)[kStrip]) const {
    const int64_t start = row.at(row_stride);
    if constexpr (sizeof(T) == 8) {
      store_row(static_cast<T*>(out) + start, strip, x);
    } else if (kind == Kind::f32) {
      store_row(static_cast<T*>(out) + start, strip, x);
    } else {
      uint16_t half[kStrip];
#pragma unroll
      for (int i = 0; i < kStrip; ++i) half[i] = kind == Kind::bf16 ? to_bf16(x[i]) : to_f16(x[i]);
      store_row(static_cast<uint16_t*>(out) + start, strip, half);
    }
  }
  // Zero for all tokens of a chunk without a valid one, when `out` is wanted.
  template <typename T>
  __device__ __forceinline__ void store_zeros(void* out, Kind kind, int64_t row_stride) const {
    if (out == nullptr) return;
    const T zeros[kStrip] = {};
#pragma unroll 1
    for (int i = 0; i < kStrips; ++i) store(out, kind, row_stride, strip(i), zeros);
  }

 private:
  template <typename Element>
  __device__ __forceinline__ void store_row(Element* out, const LossStrip& strip,
                                            const Element (&x)[kStrip]) const {
    if (strip.is_in_row) {
#pragma unroll
      for (int i = 0; i < kStrip; ++i) out[strip.token + i * kWarp] = x[i];
      return;
    }
#pragma unroll
    for (int i = 0; i < kStrip; ++i) {
      const int64_t token = strip.token + i * kWarp;
      if (token - row.first < row.length) {
        out[token < row.length ? token : token - row.length] = x[i];
      }
    }
  }

  uint32_t words_ = 0;
};

// An input at the tokens of a strip: one value per token, or per row.
template <typename T>
class StripInput {
 public:
  __device__ __forceinline__ StripInput(const FloatView& view, const LossChunk& chunk,
                                        bool per_row = false)
      : data_(view.data), kind_(view.kind), per_row_(per_row) {
    if (per_row) {
      row_value_ = element<T>(view, chunk.row.index * view.row_stride);
    } else {
      start_ = chunk.row.at(view.row_stride);
    }
  }
  __device__ __forceinline__ bool is_given() const { return data_ != nullptr; }

  // Moves bits only, so that the loads of all inputs are in flight before the first is waited for.
  __device__ __forceinline__ void load(const LossStrip& strip) {
    if (data_ == nullptr || per_row_) return;
    const int64_t at = start_ + strip.token;
    if constexpr (sizeof(T) == 8) {
      load_as(static_cast<const double*>(data_) + at, strip);
    } else if (kind_ == Kind::f32) {
      load_as(static_cast<const uint32_t*>(data_) + at, strip);
    } else {
      load_as(static_cast<const uint16_t*>(data_) + at, strip);
    }
  }
  // What was loaded as numbers, zero where a token is not valid, so that nothing there is ever read
  // in arithmetic.
  __device__ __forceinline__ void prepare(const LossStrip& strip) {
    if (data_ == nullptr) {
#pragma unroll
      for (int i = 0; i < kStrip; ++i) x_[i] = 0;
    } else if (per_row_) {
#pragma unroll
      for (int i = 0; i < kStrip; ++i) x_[i] = strip.is_valid(i) ? row_value_ : T{0};
    } else if constexpr (sizeof(T) == 8) {
#pragma unroll
      for (int i = 0; i < kStrip; ++i) x_[i] = strip.is_valid(i) ? raw_[i] : 0.0;
    } else if (kind_ == Kind::f32) {
#pragma unroll
      for (int i = 0; i < kStrip; ++i) x_[i] = strip.is_valid(i) ? __uint_as_float(raw_[i]) : 0.0f;
    } else {
#pragma unroll
      for (int i = 0; i < kStrip; ++i) {
        const float number = kind_ == Kind::bf16 ? from_bf16(raw_[i]) : from_f16(raw_[i]);
        x_[i] = strip.is_valid(i) ? number : 0.0f;
      }
    }
  }
  __device__ __forceinline__ T operator[](int i) const { return x_[i]; }

 private:
  template <typename Element>
  __device__ __forceinline__ void load_as(const Element* p, const LossStrip& strip) {
#pragma unroll
    for (int i = 0; i < kStrip; ++i) raw_[i] = i < strip.num_loaded ? p[i * kWarp] : Element{0};
  }

  const void* data_;
  Kind kind_;
  bool per_row_;
  int64_t start_ = 0;
  T row_value_ = 0;
  std::conditional_t<sizeof(T) == 8, double, uint32_t> raw_[kStrip];
  T x_[kStrip];
};

}  // namespace fastrl::cuda
