// From the losses of tokens to one number.
#pragma once

#include <cstdint>

#include "common/hd.h"

namespace fastrl {

enum class Aggregation : int64_t {
  token_mean,
  token_sum,
  seq_mean_token_sum,
  seq_mean_token_mean,
  seq_mean_token_sum_norm,
};

// What a call knows of its valid tokens: how many, in how many sequences, of which padded width.
struct TokenCounts {
  double tokens = 0;
  double sequences = 0;  // rows with at least one valid token
  double width = 0;
};

// What the sum of a loss is divided by; `given` is 0 when the caller leaves it to the default.
FASTRL_HD double divisor(Aggregation agg, double given, const TokenCounts& counts) {
  if (agg == Aggregation::token_sum) return 1.0;
  if (given != 0.0) return given;
  const double count = agg == Aggregation::token_mean ? counts.tokens
                       : agg == Aggregation::seq_mean_token_sum_norm
                           ? counts.sequences * counts.width
                           : counts.sequences;
  return count < 1.0 ? 1.0 : count;
}

// The factor of each token's loss in a row with so many valid tokens.
FASTRL_HD double row_weight(Aggregation agg, double divisor, int64_t row_tokens) {
  const double scale = 1.0 / divisor;
  if (agg != Aggregation::seq_mean_token_mean) return scale;
  return scale / static_cast<double>(row_tokens < 1 ? 1 : row_tokens);
}

}  // namespace fastrl
