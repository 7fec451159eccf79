// Arguments and entry points of the CPU whitening kernels, one per capability.
#pragma once

#include "common/capability.h"
#include "common/views.h"

namespace fastrl {

// Elements whose statistics are taken in one piece: both passes of a chunk read it from the
// first-level cache.
constexpr int64_t kMomentsChunk = 4096;

// Of the valid elements of a set. A chunk's are measured from an origin, one of the elements, so
// that equal elements have a mean and m2 of exactly 0.
struct Moments {
  double count = 0;
  double mean = 0;
  double m2 = 0;  // sum of squared deviations from the mean
};

// Of all valid elements of x [count], dense like its mask; the mean is absolute. Deterministic.
Moments moments_of(const FloatView& x, const MaskView& mask, int64_t count);

struct MomentsArgs {
  FloatView x;    // [count], dense
  MaskView mask;  // same; null data: every element is valid
  int64_t count = 0;
  double origin = 0;
};

struct WhitenArgs {
  FloatView x;    // [count], dense
  MaskView mask;  // same; null data: every element is valid
  double mean = 0;
  double factor = 1;
  double added = 0;     // after scaling
  void* out = nullptr;  // [count] float, or double for double input
};

inline int64_t num_chunks(int64_t count) { return (count + kMomentsChunk - 1) / kMomentsChunk; }

// The union of two sets, by the update of Chan, Golub and LeVeque.
inline Moments merged(const Moments& a, const Moments& b) {
  if (b.count == 0) return a;
  if (a.count == 0) return b;
  const double count = a.count + b.count, delta = b.mean - a.mean, share = b.count / count;
  return {count, a.mean + delta * share, a.m2 + b.m2 + delta * delta * a.count * share};
}

#define FASTRL_DECLARE(capability)                                                            \
  namespace capability {                                                                      \
  /* The first valid element, 0 when there is none. */                                        \
  double first_valid(const MomentsArgs& args);                                                \
  /* out[i] for chunk i. */                                                                   \
  void moments_of_chunks(const MomentsArgs& args, int64_t first, int64_t last, Moments* out); \
  void whiten_elements(const WhitenArgs& args, int64_t first, int64_t last);                  \
  }
FASTRL_FOR_EACH_CAPABILITY(FASTRL_DECLARE)
#undef FASTRL_DECLARE

}  // namespace fastrl
