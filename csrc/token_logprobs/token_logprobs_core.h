// Scalar arithmetic of log-probabilities and entropy of a row, shared by every compiled
// implementation.
#pragma once

#include <cmath>

#include "common/hd.h"

namespace fastrl {

// Running sums over a row of logits l, relative to the largest logit m seen so far; x_v = (l_v - m)
// / temperature.
struct RowSums {
  double largest = -INFINITY;
  double exps = 0;      // sum of e^x
  double weighted = 0;  // sum of x e^x: no term is positive, so nothing cancels

  // Express the sums relative to a larger logit. Before the first finite one they hold zeros, or
  // the NaN of a row.
  FASTRL_HD void raise(double to, double inverse_temperature) {
    if (largest > -INFINITY) {
      const double step = (largest - to) * inverse_temperature;
      const double factor = std::exp(step);
      weighted = factor > 0 ? factor * (weighted + step * exps) : 0 * weighted;
      exps *= factor;
    }
    largest = to;
  }

  // Mean of x under the softmax, <= 0.
  FASTRL_HD double mean() const { return weighted / exps; }
  FASTRL_HD double log_prob(double logit, double inverse_temperature) const {
    return (logit - largest) * inverse_temperature - std::log(exps);
  }
  FASTRL_HD double entropy() const { return std::log(exps) - mean(); }
};

// The gradient of g logp + h entropy with respect to logit v is  e^x_v (alpha + beta x_v) - gamma
// [v = token].
struct RowGradient {
  double alpha, beta, gamma;

  FASTRL_HD RowGradient(double g, double h, double exps, double mean, double inverse_temperature)
      : alpha((h * mean - g) / exps * inverse_temperature),
        beta(-h / exps * inverse_temperature),
        gamma(-g * inverse_temperature) {}
};

}  // namespace fastrl
