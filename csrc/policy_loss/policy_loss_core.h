// The policy loss of one token and its derivatives, shared by every compiled implementation.
//
// T is a number: a scalar, or the vector of lanes.h. Beside operators it has select, at_most,
// at_least, magnitude and exp_pair, which are called unqualified. S is its scalar.
#pragma once

#include <cstdint>

#include "common/hd.h"

namespace fastrl {

enum class Ratio : int64_t { token, sequence, sequence_token };
enum class Surrogate : int64_t { clip, cispo, reinforce };
enum class Kl : int64_t { k1, k2, k3, abs };
enum class KlGrad : int64_t { pathwise, k2, ratio };

// Infinity stands for "no bound".
template <typename S>
struct PolicyTerms {
  Ratio ratio = Ratio::token;
  Surrogate surrogate = Surrogate::clip;
  Kl kl = Kl::k1;
  KlGrad kl_grad = KlGrad::pathwise;
  S ratio_low = 0, ratio_high = 0;  // 1 - clip_low, 1 + clip_high
  S dual_clip = 0, ratio_cap = 0, log_ratio_clamp = 0;
  S kl_coef = 0, kl_input_clamp = 0, kl_clamp = 0, entropy_coef = 0;
  bool has_cap = false;
};

// A loss with its derivative where logp appears in it directly, and where it appears through the
// log-ratio.
template <typename T, typename M>
struct PolicyToken {
  T loss;
  T d_logp;
  T d_log_ratio;
  M is_clipped{};
  M is_dual_clipped{};
};

template <typename T, typename S>
FASTRL_HD auto surrogate_loss(const PolicyTerms<S>& terms, T logp, T ratio, T advantage) {
  PolicyToken<T, decltype(ratio < ratio)> out;
  const T zero = S{0};
  out.d_logp = out.d_log_ratio = zero;
  const T negated = -advantage;
  if (terms.surrogate == Surrogate::reinforce) {
    out.d_logp = negated;
    out.loss = negated * logp;
    return out;
  }
  const T clipped_ratio = at_least(at_most(ratio, T(terms.ratio_high)), T(terms.ratio_low));
  if (terms.surrogate == Surrogate::cispo) {
    out.d_logp = negated * clipped_ratio;
    out.loss = out.d_logp * logp;
    out.is_clipped = clipped_ratio != ratio;
    return out;
  }
  const T plain = negated * (terms.has_cap ? at_most(ratio, T(terms.ratio_cap)) : ratio);
  const T clipped = negated * clipped_ratio;
  const T bound = negated * T(terms.dual_clip);
  out.is_clipped = clipped > plain;
  const T larger = select(out.is_clipped, clipped, plain);
  out.is_dual_clipped = (advantage < zero) & (larger > bound);
  out.loss = select(out.is_dual_clipped, bound, larger);
  if (terms.has_cap) {
    // A cap below the edge of the clip can make the clipped branch win inside of the clip, where it
    // has a gradient.
    const T of_clipped = select(clipped_ratio != ratio, zero, larger);
    const T of_plain = select(ratio > T(terms.ratio_cap), zero, larger);
    out.d_log_ratio =
        select(out.is_dual_clipped, zero, select(out.is_clipped, of_clipped, of_plain));
  } else {
    out.d_log_ratio = select(out.is_clipped | out.is_dual_clipped, zero, larger);
  }
  return out;
}

// For KlGrad::ratio the derivative through the log-ratio is the loss itself, otherwise there is
// none.
template <typename T>
struct KlToken {
  T estimate;
  T loss;  // the estimate, times the ratio for KlGrad::ratio
  T d_logp;
};

template <typename T, typename S>
FASTRL_HD KlToken<T> kl_loss(const PolicyTerms<S>& terms, T logp, T ref_logp, T ratio) {
  const T zero = S{0}, one = S{1};
  const T x = logp - ref_logp;
  KlToken<T> out;
  switch (terms.kl) {
    case Kl::k1:
      out.estimate = x;
      out.d_logp = one;
      break;
    case Kl::abs:
      out.estimate = magnitude(x);
      out.d_logp = select(x > zero, one, select(x < zero, -one, zero));
      break;
    case Kl::k2:
      out.estimate = T(S{0.5}) * (x * x);
      out.d_logp = x;
      break;
    case Kl::k3: {
      const T bound = terms.kl_input_clamp, top = terms.kl_clamp;
      const T y = at_least(at_most(ref_logp - logp, bound), -bound);
      const auto minus_one = exp_pair(y).expm1;
      const T value = minus_one - y;
      out.estimate = at_most(value, top);
      out.d_logp = select((magnitude(x) > bound) | (value > top), zero, -minus_one);
      break;
    }
  }
  out.loss = out.estimate;
  if (terms.kl_grad == KlGrad::k2) {
    out.d_logp = x;
  } else if (terms.kl_grad == KlGrad::ratio) {
    out.loss = out.estimate * ratio;
    out.d_logp = out.d_logp * ratio;
  }
  return out;
}

}  // namespace fastrl
