// Which tokens of a row are valid, for the losses that must know their counts before the first
// gradient is written.
#pragma once

#include "common/capability.h"
#include "common/views.h"

namespace fastrl {

// A piece of one row: `length` tokens from `begin`, counted from the start of the row.
struct TokenRange {
  int64_t row = 0;
  int64_t begin = 0;
  int64_t length = 0;
};

// The valid tokens of a row or of a piece of it: how many, and the smallest range that holds them.
struct ValidSpan {
  int64_t first = 0;
  int64_t end = 0;
  int64_t count = 0;
};

#define FASTRL_DECLARE(capability)                                                                 \
  namespace capability {                                                                           \
  void find_valid(const Rows& rows, const MaskView& mask, const TokenRange* ranges, int64_t first, \
                  int64_t last, ValidSpan* spans);                                                 \
  }
FASTRL_FOR_EACH_CAPABILITY(FASTRL_DECLARE)
#undef FASTRL_DECLARE

}  // namespace fastrl
