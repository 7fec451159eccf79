// Scalar arithmetic of the advantage recursion, shared by every compiled implementation.
#pragma once

#include "common/hd.h"

namespace fastrl {

// delta_t = r_t + gamma * V_{t+1} - V_t; T is a scalar or a vector.
template <typename T>
FASTRL_HD T td_error(T reward, T gamma, T next_value, T value) {
  return (reward + gamma * next_value) - value;
}

}  // namespace fastrl
