// The arithmetic of one group, shared by every compiled implementation: from the sums over its
// members to the map that takes a score to its advantage.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/hd.h"

namespace fastrl {

enum class Baseline : int32_t { mean, leave_one_out, length_weighted, none };
enum class Scale : int32_t { std, batch_std, mean, none };

struct GroupOptions {
  Baseline baseline = Baseline::mean;
  Scale scale = Scale::std;
  int32_t ddof = 1;
  double eps = 0;
  bool singleton_raw = false;  // a group of one keeps its score; otherwise it gets 0
};

// Sums over the scored members. Scores are measured from that of the first one, which is also how
// equal scores come out as exactly 0.
struct GroupSums {
  double count = 0;
  double origin = 0;         // score of the first member
  double offset = 0;         // mean = origin + offset
  double m2 = 0;             // sum of squared deviations from the mean
  double length = 0;         // sum of lengths
  double length_offset = 0;  // sum of length * (score - origin)
  bool all_equal = true;     // and finite
};

// A = ((score - origin) - offset) * factor, and 0 where the bracket is 0 whatever the factor.
struct GroupMap {
  double origin = 0;
  double offset = 0;
  double factor = 0;

  FASTRL_HD double operator()(double score) const {
    const double centred = (score - origin) - offset;
    return centred == 0 ? 0 : centred * factor;
  }
};

// 1 / (std + eps); 0 when all scores that determine it are equal.
FASTRL_HD double inverse_std(double count, double m2, bool all_equal, int32_t ddof, double eps) {
  if (all_equal) return 0;
  return 1 / (std::sqrt(m2 / (count - ddof)) + eps);
}

// For a group of two members or more. `inverse_batch_std` is used by Scale::batch_std only.
FASTRL_HD GroupMap group_map(const GroupSums& sums, const GroupOptions& options,
                             double inverse_batch_std) {
  const bool has_baseline = options.baseline != Baseline::none;
  if (sums.all_equal && (has_baseline || options.scale == Scale::std)) {
    return {sums.origin, 0, 0};
  }
  GroupMap map;
  map.factor = 1;
  if (has_baseline) {
    map.origin = sums.origin;
    map.offset = sums.offset;
  }
  if (options.baseline == Baseline::length_weighted) {
    map.offset = sums.length > 0 ? sums.length_offset / sums.length : -sums.origin;
  }
  if (options.baseline == Baseline::leave_one_out) {
    map.factor = sums.count / (sums.count - 1);  // s - mean of the others = (s - mean) n / (n - 1)
  }
  if (options.scale == Scale::std) {
    map.factor *= inverse_std(sums.count, sums.m2, false, options.ddof, options.eps);
  } else if (options.scale == Scale::batch_std) {
    map.factor *= inverse_batch_std;
  } else if (options.scale == Scale::mean) {
    map.factor /= (sums.origin + sums.offset) + options.eps;
  }
  return map;
}

// For a group of one that keeps its score: baseline 0, std or mean 1.
FASTRL_HD GroupMap raw_map(const GroupOptions& options) {
  return {0, 0, options.scale == Scale::none ? 1 : 1 / (1 + options.eps)};
}

}  // namespace fastrl
