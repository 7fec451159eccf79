// What core headers call unqualified, for plain numbers: one thread's view of lanes.h. Include it
// before them.
#pragma once

#include <cmath>

#include "common/hd.h"

namespace fastrl {

template <typename T>
FASTRL_HD T select(bool condition, T a, T b) {
  return condition ? a : b;
}

// A NaN in x passes both.
template <typename T>
FASTRL_HD T at_most(T x, T bound) {
  return x > bound ? bound : x;
}
template <typename T>
FASTRL_HD T at_least(T x, T bound) {
  return x < bound ? bound : x;
}

FASTRL_HD float magnitude(float x) { return fabsf(x); }
FASTRL_HD double magnitude(double x) { return fabs(x); }

template <typename X>
struct ExpPair {
  X exp;
  X expm1;  // exact near 0, where exp - 1 is not
};

FASTRL_HD ExpPair<float> exp_pair(float x) { return {expf(x), expm1f(x)}; }
FASTRL_HD ExpPair<double> exp_pair(double x) { return {exp(x), expm1(x)}; }

}  // namespace fastrl
