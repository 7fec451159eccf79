// Arguments and entry points of the CPU whitening kernels, one per capability.
#pragma once

#include "common/capability.h"
#include "whiten/whiten_args.h"

namespace fastrl {

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
