// The scan inside one block of lanes, from the right end to the left; *_kernel.cpp files only.
#pragma once

#include "common/vec.h"

namespace fastrl::FASTRL_CAPABILITY {

// x_i <- x_i + factor_i x_{i+1}, and factor_i becomes the product of the factors from lane i to the
// right end, so that x_i + factor_i * carry is the value with `carry` coming from the right. Idle
// lanes hold x = 0 and factor = 1.
template <typename T>
FASTRL_INLINE void suffix_scan(Vec<T>& x, Vec<T>& factor) {
  const Vec<T> zero = {}, one = broadcast<T>(1);
  const auto step = [&](Vec<T> shifted_x, Vec<T> shifted_factor) {
    x += factor * shifted_x;
    factor *= shifted_factor;
  };
  step(shift_down<T, 1>(x, zero), shift_down<T, 1>(factor, one));
  step(shift_down<T, 2>(x, zero), shift_down<T, 2>(factor, one));
  step(shift_down<T, 4>(x, zero), shift_down<T, 4>(factor, one));
  if constexpr (kLanes<T> == 16) step(shift_down<T, 8>(x, zero), shift_down<T, 8>(factor, one));
}

}  // namespace fastrl::FASTRL_CAPABILITY
