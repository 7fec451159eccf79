// Entry points of the per-token half of group advantages, one per capability: rows in, one number a
// row, and back.
#pragma once

#include "common/capability.h"
#include "group_advantages/group_advantages_args.h"

namespace fastrl {

#define FASTRL_DECLARE(capability)                                                              \
  namespace capability {                                                                        \
  /* scores[row] = sum of the valid token rewards */                                            \
  void sum_tokens(const TokenRows& rows, int64_t first, int64_t last, double* scores);          \
  /* lengths[row] = number of valid tokens */                                                   \
  void count_tokens(const TokenRows& rows, int64_t first, int64_t last, double* lengths);       \
  /* scores[k * rows + row] = rewards[row, k]; `length` is the number of objectives k */        \
  void read_scores(const TokenRows& rows, int64_t num_rows, double* scores);                    \
  /* out[row, t] = values[row] where valid, 0 where masked; out is float, or double if asked */ \
  void spread_rows(const TokenRows& rows, int64_t first, int64_t last, const double* values,    \
                   bool to_double, void* out);                                                  \
  }
FASTRL_FOR_EACH_CAPABILITY(FASTRL_DECLARE)
#undef FASTRL_DECLARE

}  // namespace fastrl
