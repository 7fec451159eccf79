// Arguments of the advantage kernels, on CPU and CUDA.
#pragma once

#include "common/views.h"

namespace fastrl {

enum class Holes : int32_t { carry, zero_step, ignore };

struct GaeArgs {
  Rows rows;
  FloatView rewards;    // [rows, T] or [N]
  FloatView values;     // same shape; null data means discounted returns: V = 0 and lambda = 1
  MaskView mask;        // null data: every token is valid
  MaskView dones;       // null data: no episode ends inside a row
  FloatView bootstrap;  // [rows], row_stride between elements; null data: 0
  FloatView lam_rows;   // [rows]; null data: the scalar `lam`
  double gamma = 1.0;
  double lam = 1.0;
  double returns_lam = 1.0;
  bool two_lambdas = false;  // returns use returns_lam, advantages use lam
  Holes holes = Holes::carry;
  bool fill_carry = false;     // masked outputs hold the running value instead of 0
  void* advantages = nullptr;  // float, or double for double input
  void* returns = nullptr;     // null for discounted returns
  int64_t out_stride = 0;
  bool stream = false;  // the results are too large to stay in the caches
};

struct GaeGradArgs {
  GaeArgs forward;                 // the forward call; advantages and returns unused
  FloatView grad_advantages;       // [rows, T] or [N], null data: zero
  FloatView grad_returns;          // same
  void* grad_rewards = nullptr;    // compute dtype, dense like the outputs of the forward call
  void* grad_values = nullptr;     // null for discounted returns
  void* grad_bootstrap = nullptr;  // [rows] or null
};

}  // namespace fastrl
