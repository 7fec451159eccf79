// Masked mean and variance, and whitening by them, on CPU.
//
// A chunk is centred on its own mean in a second pass that hits the cache, so memory is read once
// and nothing cancels. All sums are in double, lane by lane in a fixed order.
#include "whiten/whiten_kernel.h"

#include "common/wide.h"

namespace fastrl::FASTRL_CAPABILITY {
namespace {

template <typename T>
FASTRL_INLINE uint32_t valid_bits(const MaskView& mask, int64_t index, int n) {
  return mask.data == nullptr ? first_bits(n) : mask_bits(mask, index, n);
}

// Calls visit(values, bits, n) for each vector of [begin, end).
template <typename T, typename Visit>
FASTRL_INLINE void for_each_vector(const FloatView& x, const MaskView& mask, int64_t begin,
                                   int64_t end, const Visit& visit) {
  constexpr int kStep = kLanes<T>;
  int64_t at = begin;
  for (; at + kStep <= end; at += kStep) {
    visit(load_as<T>(x.data, x.kind, at), valid_bits<T>(mask, at, kStep), at, kStep);
  }
  if (at < end) {
    const int n = static_cast<int>(end - at);
    visit(load_first_as<T>(x.data, x.kind, at, n), valid_bits<T>(mask, at, n), at, n);
  }
}

template <typename T>
Moments chunk_moments(const MomentsArgs& args, int64_t begin, int64_t end) {
  constexpr int kParts = Wide<T>::kParts;
  Wide<T> sums = {};
  int64_t count = 0;
  for_each_vector<T>(args.x, args.mask, begin, end, [&](Vec<T> x, uint32_t bits, int64_t, int) {
    Wide<T> offset = widen<T>(x);
    for (int p = 0; p < kParts; ++p) offset.part[p] -= args.origin;
    offset = keep<T>(offset, bits);
    for (int p = 0; p < kParts; ++p) sums.part[p] += offset.part[p];
    count += count_bits(bits);
  });
  if (count == 0) return {};
  const double mean = lane_sum<T>(sums) / static_cast<double>(count);

  Wide<T> squares = {};
  for_each_vector<T>(args.x, args.mask, begin, end, [&](Vec<T> x, uint32_t bits, int64_t, int) {
    Wide<T> deviation = widen<T>(x);
    for (int p = 0; p < kParts; ++p) deviation.part[p] = (deviation.part[p] - args.origin) - mean;
    deviation = keep<T>(deviation, bits);
    for (int p = 0; p < kParts; ++p) squares.part[p] += deviation.part[p] * deviation.part[p];
  });
  return {static_cast<double>(count), mean, lane_sum<T>(squares)};
}

template <typename T>
void chunk_range(const MomentsArgs& args, int64_t first, int64_t last, Moments* out) {
  for (int64_t chunk = first; chunk < last; ++chunk) {
    const int64_t begin = chunk * kMomentsChunk;
    const int64_t left = args.count - begin;
    out[chunk] =
        chunk_moments<T>(args, begin, begin + (left < kMomentsChunk ? left : kMomentsChunk));
  }
}

template <typename T>
void whiten_range(const WhitenArgs& args, int64_t first, int64_t last) {
  T* const out = static_cast<T*>(args.out);
  for_each_vector<T>(args.x, args.mask, first, last,
                     [&](Vec<T> x, uint32_t bits, int64_t at, int n) {
                       Wide<T> wide = widen<T>(x);
                       for (int p = 0; p < Wide<T>::kParts; ++p) {
                         wide.part[p] = (wide.part[p] - args.mean) * args.factor + args.added;
                       }
                       const Vec<T> result = keep<T>(narrow<T>(wide), bits);
                       if (n == kLanes<T>) {
                         store(out + at, result);
                       } else {
                         store_first(out + at, result, n);
                       }
                     });
}

template <typename T>
double first_valid_of(const MomentsArgs& args) {
  for (int64_t at = 0; at < args.count; at += 16) {
    const int n = static_cast<int>(args.count - at < 16 ? args.count - at : 16);
    const uint32_t bits = valid_bits<T>(args.mask, at, n);
    if (bits != 0) {
      const int64_t index = at + __builtin_ctz(bits);
      return load_first_as<T>(args.x.data, args.x.kind, index, 1)[0];
    }
  }
  return 0;
}

}  // namespace

double first_valid(const MomentsArgs& args) {
  return args.x.kind == Kind::f64 ? first_valid_of<double>(args) : first_valid_of<float>(args);
}

void moments_of_chunks(const MomentsArgs& args, int64_t first, int64_t last, Moments* out) {
  if (args.x.kind == Kind::f64) {
    chunk_range<double>(args, first, last, out);
  } else {
    chunk_range<float>(args, first, last, out);
  }
}

void whiten_elements(const WhitenArgs& args, int64_t first, int64_t last) {
  if (args.x.kind == Kind::f64) {
    whiten_range<double>(args, first, last);
  } else {
    whiten_range<float>(args, first, last);
  }
}

}  // namespace fastrl::FASTRL_CAPABILITY
