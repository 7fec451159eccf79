// Moments and arguments of whitening, on CPU and CUDA.
#pragma once

#include <cmath>

#include "common/views.h"

namespace fastrl {

// Elements whose statistics are taken in one piece: both passes of a chunk read it from the
// first-level cache, or from registers.
constexpr int64_t kMomentsChunk = 4096;

FASTRL_HD int64_t num_chunks(int64_t count) { return (count + kMomentsChunk - 1) / kMomentsChunk; }

// Of the valid elements of a set. A chunk's are measured from an origin, one of the elements, so
// that equal elements have a mean and m2 of exactly 0.
struct Moments {
  double count = 0;
  double mean = 0;
  double m2 = 0;  // sum of squared deviations from the mean
};

// The union of two sets, by the update of Chan, Golub and LeVeque.
FASTRL_HD Moments merged(const Moments& a, const Moments& b) {
  if (b.count == 0) return a;
  if (a.count == 0) return b;
  const double count = a.count + b.count, delta = b.mean - a.mean, share = b.count / count;
  return {count, a.mean + delta * share, a.m2 + b.m2 + delta * delta * a.count * share};
}

enum class EpsMode : int64_t { rsqrt_add, rsqrt_max, std_add };

// What the deviations from the mean are multiplied by. Without a variance (count <= ddof), or with
// none to speak of, there is nothing to divide by.
FASTRL_HD double whitening_factor(double count, double m2, int64_t ddof, double eps, EpsMode mode) {
  const double degrees = count - static_cast<double>(ddof);
  if (degrees <= 0 || m2 == 0) return 1;
  const double variance = m2 / degrees;
  switch (mode) {
    case EpsMode::rsqrt_add:
      return 1 / sqrt(variance + eps);
    case EpsMode::rsqrt_max:
      return 1 / sqrt(variance < eps ? eps : variance);
    default:
      return 1 / (sqrt(variance) + eps);
  }
}

}  // namespace fastrl
