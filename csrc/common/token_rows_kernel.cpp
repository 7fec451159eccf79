// Counts the valid tokens of ranges, 64 at a time.
#include "common/token_rows_kernel.h"

#include "common/vec.h"

namespace fastrl::FASTRL_CAPABILITY {
namespace {

FASTRL_INLINE uint64_t mask_bits64(const MaskView& mask, int64_t index, int64_t n) {
  uint64_t bits = 0;
  for (int shift = 0; shift < 64 && shift < n; shift += 16) {
    const auto step = static_cast<int>(n - shift < 16 ? n - shift : 16);
    bits |= static_cast<uint64_t>(mask_bits(mask, index + shift, step)) << shift;
  }
  return bits;
}

}  // namespace

void find_valid(const Rows& rows, const MaskView& mask, const TokenRange* ranges, int64_t first,
                int64_t last, ValidSpan* spans) {
  for (int64_t i = first; i < last; ++i) {
    const TokenRange& range = ranges[i];
    const int64_t start = rows.begin(range.row, mask.row_stride) + range.begin;
    ValidSpan span;
    for (int64_t t = 0; t < range.length; t += 64) {
      const uint64_t bits = mask_bits64(mask, start + t, range.length - t);
      if (bits == 0) continue;
      if (span.count == 0) span.first = range.begin + t + __builtin_ctzll(bits);
      span.end = range.begin + t + 64 - __builtin_clzll(bits);
      span.count += __builtin_popcountll(bits);
    }
    spans[i] = span;
  }
}

}  // namespace fastrl::FASTRL_CAPABILITY
