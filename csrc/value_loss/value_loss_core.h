// The value loss of one token and its derivative; T and S as in policy_loss_core.h.
#pragma once

#include "common/hd.h"

namespace fastrl {

// e^2 / 2, beyond an error of delta linear; an infinite delta makes it the squared error.
template <typename T, typename S>
FASTRL_HD T error_loss(T error, S delta) {
  const T inside = at_least(at_most(error, T(delta)), T(-delta));
  // delta (|e| - delta / 2) = inside * (e - inside / 2), and inside is e up to delta.
  return inside * (error - T(S{0.5}) * inside);
}

template <typename T, typename M>
struct ValueToken {
  T loss;
  T d_value;
  M is_clipped{};
};

// An infinite clip means none.
template <typename T, typename S>
FASTRL_HD auto value_loss(T value, T old_value, T target, S clip, S delta) {
  ValueToken<T, decltype(value < value)> out;
  const T error = value - target;
  const T near = at_least(at_most(value, old_value + T(clip)), old_value - T(clip));
  const T plain = error_loss(error, delta), clipped = error_loss(near - target, delta);
  out.is_clipped = clipped > plain;
  out.loss = select(out.is_clipped, clipped, plain);
  // Where the clipped loss is the larger one the value lies outside of the clip, and nothing
  // depends on it.
  out.d_value = select(out.is_clipped, T(S{0}), at_least(at_most(error, T(delta)), T(-delta)));
  return out;
}

}  // namespace fastrl
