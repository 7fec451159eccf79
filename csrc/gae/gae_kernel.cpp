// Generalised advantage estimation on CPU, a block of lanes at a time from the right end of a row
// to the left.
//
// A_t = delta_t + c A_{t+1} with c = gamma * lambda is scanned inside a block by log-steps of shift
// and add, without the carry; what comes from the right is added afterwards with the powers of c.
// So the only chain from block to block is one multiply-add. Holes are closed by compressing a
// block to its valid lanes first and opened again at the store.
//
// The first block ends at the last valid token, not at the end of the row, so that a row gives the
// same bits with any amount of padding, on either side, and packed.
#include "gae/gae_kernel.h"

#include "common/scan.h"
#include "common/vec.h"
#include "gae/gae_core.h"

namespace fastrl::FASTRL_CAPABILITY {
namespace {

// c^k for the distances that a block can need, laid out so that one unaligned load gives c^(n-i)
// for lane i < n.
template <typename T>
struct Powers {
  T step[4];                    // c, c^2, c^4, c^8: factors of the log-steps
  T descending[2 * kLanes<T>];  // c^L, ..., c^1, then zeros

  explicit Powers(T c) {
    T power = c;
    for (T& s : step) {
      s = power;
      power *= power;
    }
    power = c;
    for (int i = kLanes<T> - 1; i >= 0; --i) {
      descending[i] = power;
      power *= c;
    }
    for (int i = kLanes<T>; i < 2 * kLanes<T>; ++i) descending[i] = 0;
  }
  FASTRL_INLINE Lanes<T> to_right_end(int n) const {
    return Lanes<T>::at(descending + (kLanes<T> - n));
  }
};

// Suffix sums s_i = x_i + c s_{i+1} within the block, nothing coming from the right.
template <typename T>
FASTRL_INLINE Lanes<T> constant_suffix_scan(Lanes<T> x, const Powers<T>& powers) {
  const Lanes<T> zero(T{0});
  x += Lanes<T>(powers.step[0]) * shift_down<1>(x, zero);
  x += Lanes<T>(powers.step[1]) * shift_down<2>(x, zero);
  x += Lanes<T>(powers.step[2]) * shift_down<4>(x, zero);
  if constexpr (kLanes<T> == 16) x += Lanes<T>(powers.step[3]) * shift_down<8>(x, zero);
  return x;
}

// One recursion: its constant, and the value that the next block to the left receives.
template <typename T, bool kDones>
struct Recursion {
  Powers<T> powers;
  T constant;
  T carry = 0;

  explicit Recursion(T c) : powers(c), constant(c) {}

  FASTRL_INLINE Lanes<T> block(Lanes<T> delta, uint32_t done_bits, int n) {
    Lanes<T> sums = delta, reach;
    if constexpr (kDones) {
      reach = select(LaneMask<T>(first_bits(n)), Lanes<T>(constant), Lanes<T>(T{1}));
      reach = select(LaneMask<T>(done_bits), Lanes<T>(T{0}), reach);
      suffix_scan(sums, reach);
    } else {
      sums = constant_suffix_scan(delta, powers);
      reach = powers.to_right_end(n);
    }
    const Lanes<T> out = sums + reach * Lanes<T>(carry);
    carry = first_lane(out);
    return out;
  }
};

template <typename T>
FASTRL_INLINE T element(const FloatView& view, int64_t index, T missing) {
  if (view.data == nullptr) return missing;
  return load_first_as<T>(view.data, view.kind, index, 1)[0];
}

// The bits of `bits` at the set positions of `kept`, packed to the low end.
FASTRL_INLINE uint32_t compress_bits(uint32_t bits, uint32_t kept) {
  uint32_t packed = 0;
  for (int n = 0; kept != 0; kept &= kept - 1, ++n) {
    packed |= ((bits >> __builtin_ctz(kept)) & 1) << n;
  }
  return packed;
}

// Masked outputs that keep the running value (verl's convention) depend on the nearest valid lane
// to the right.
template <typename T>
void fill_holes(Lanes<T>& advantages, Lanes<T>& returns, Lanes<T> values, uint32_t bits, int n,
                T carried_advantage, T carried_return) {
  T a[kLanes<T>], r[kLanes<T>], v[kLanes<T>];
  advantages.to(a);
  returns.to(r);
  values.to(v);
  for (int i = n - 1; i >= 0; --i) {
    if ((bits >> i) & 1) {
      carried_advantage = a[i];
      carried_return = r[i] - v[i];
    } else {
      a[i] = carried_advantage;
      r[i] = carried_return + v[i];
    }
  }
  advantages = Lanes<T>::at(a);
  returns = Lanes<T>::at(r);
}

template <typename T>
FASTRL_INLINE Lanes<T> packed(Lanes<T> x, uint32_t bits) {
  return Lanes<T>(compress<T>(x.vec(), bits));
}
template <typename T>
FASTRL_INLINE Lanes<T> spread(Lanes<T> x, uint32_t bits) {
  return Lanes<T>(expand<T>(x.vec(), bits));
}
template <typename T>
FASTRL_INLINE Lanes<T> kept_or_zero(Lanes<T> x, uint32_t bits) {
  return select(LaneMask<T>(bits), x, Lanes<T>(T{0}));
}

template <typename T, bool kMask, bool kDones, bool kValues, bool kTwo>
void gae_row(const GaeArgs& args, int64_t row) {
  const int64_t length = args.rows.size(row);
  const int64_t reward_at = args.rows.begin(row, args.rewards.row_stride);
  const int64_t value_at = args.rows.begin(row, args.values.row_stride);
  const int64_t mask_at_row = args.rows.begin(row, args.mask.row_stride);
  const int64_t done_at = args.rows.begin(row, args.dones.row_stride);
  const int64_t out_at = args.rows.begin(row, args.out_stride);
  T* const out_advantages = static_cast<T*>(args.advantages) + out_at;
  T* const out_returns = kValues ? static_cast<T*>(args.returns) + out_at : nullptr;

  const T gamma = static_cast<T>(args.gamma);
  const T lam = element<T>(args.lam_rows, row * args.lam_rows.row_stride, static_cast<T>(args.lam));
  Recursion<T, kDones> main(gamma * lam);
  Recursion<T, kDones> second(gamma * static_cast<T>(args.returns_lam));
  T next_value = element<T>(args.bootstrap, row * args.bootstrap.row_stride, T{0});

  int64_t end = length;
  if constexpr (kMask) {
    // Padding on the right changes no state unless it bootstraps through steps of its own.
    const bool padding_is_inert = args.holes == Holes::carry || (args.holes == Holes::zero_step &&
                                                                 args.bootstrap.data == nullptr);
    if (padding_is_inert) {
      while (end > 0 && !mask_at(args.mask, mask_at_row + end - 1)) {
        --end;
        const T value =
            kValues && args.fill_carry && args.holes == Holes::carry
                ? load_first_as<T>(args.values.data, args.values.kind, value_at + end, 1)[0]
                : T{0};
        out_advantages[end] = 0;
        if constexpr (kValues) out_returns[end] = value;
      }
    }
  }

  for (int64_t stop = end; stop > 0;) {
    const int n = static_cast<int>(stop < kLanes<T> ? stop : kLanes<T>);
    const int64_t column = stop - n;
    stop = column;

    Lanes<T> rewards = load_row<T>(args.rewards, reward_at + column, n);
    Lanes<T> values(T{0});
    if constexpr (kValues) values = load_row<T>(args.values, value_at + column, n);
    uint32_t done_bits = kDones ? mask_bits(args.dones, done_at + column, n) : 0;
    uint32_t valid = first_bits(n);
    int count = n;
    [[maybe_unused]] uint32_t kept = valid;  // lanes that the mask lets out
    [[maybe_unused]] const Lanes<T> raw_values = values;
    if constexpr (kMask) {
      kept = mask_bits(args.mask, mask_at_row + column, n);
      if (args.holes == Holes::carry) {
        valid = kept;
        count = count_bits(valid);
        if (count < kLanes<T>) {
          rewards = packed(rewards, valid);
          if constexpr (kValues) values = packed(values, valid);
          if constexpr (kDones) done_bits = compress_bits(done_bits, valid);
        }
      } else if (args.holes == Holes::zero_step) {
        rewards = kept_or_zero(rewards, kept);
        if constexpr (kValues) values = kept_or_zero(values, kept);
        done_bits &= kept;
      }
    }

    Lanes<T> advantages(T{0}), returns(T{0});
    const T right_advantage = main.carry;
    const T right_return = kTwo ? second.carry : main.carry;
    if (count > 0) {
      // Lanes past the last valid one hold zeros in all that follows.
      const Lanes<T> right(next_value);
      Lanes<T> next_values;
      if (count == kLanes<T>) {
        next_values = shift_down<1>(values, right);
      } else {
        const LaneMask<T> last(uint32_t{1} << (count - 1));
        next_values = select(last, right, shift_down<1>(values, Lanes<T>(T{0})));
      }
      if constexpr (kDones)
        next_values = select(LaneMask<T>(done_bits), Lanes<T>(T{0}), next_values);
      const Lanes<T> delta = td_error(rewards, Lanes<T>(gamma), next_values, values);
      advantages = main.block(delta, done_bits, count);
      if constexpr (kTwo) {
        returns = second.block(delta, done_bits, count) + values;
      } else if constexpr (kValues) {
        returns = advantages + values;
      }
      // Discounted returns carry G itself: V = 0, so the bootstrap enters once, through the first
      // TD error.
      next_value = kValues ? first_lane(values) : T{0};
    }

    if constexpr (kMask) {
      if (args.holes == Holes::carry) {
        if (count < n || count < kLanes<T>) {
          advantages = spread(advantages, valid);
          if constexpr (kValues) returns = spread(returns, valid);
          if (args.fill_carry) {
            fill_holes<T>(advantages, returns, raw_values, valid, n, right_advantage, right_return);
          }
        }
      } else if (!args.fill_carry) {
        advantages = kept_or_zero(advantages, kept);
        if constexpr (kValues) returns = kept_or_zero(returns, kept);
      }
    }
    store_row(out_advantages + column, advantages, n, args.stream);
    if constexpr (kValues) store_row(out_returns + column, returns, n, args.stream);
  }
}

template <typename T, bool kMask, bool kDones>
void gae_range(const GaeArgs& args, int64_t first_row, int64_t last_row) {
  const auto kernel = args.values.data == nullptr ? gae_row<T, kMask, kDones, false, false>
                      : args.two_lambdas          ? gae_row<T, kMask, kDones, true, true>
                                                  : gae_row<T, kMask, kDones, true, false>;
  for (int64_t row = first_row; row < last_row; ++row) kernel(args, row);
}

template <typename T>
void gae_range(const GaeArgs& args, int64_t first_row, int64_t last_row) {
  const bool mask = args.mask.data != nullptr, dones = args.dones.data != nullptr;
  const auto range = mask ? (dones ? gae_range<T, true, true> : gae_range<T, true, false>)
                          : (dones ? gae_range<T, false, true> : gae_range<T, false, false>);
  range(args, first_row, last_row);
}

// The adjoint runs left to right over the same valid tokens:
//   u_t = gA_t + c u_{t-1},  w_t = gR_t + c' w_{t-1},  d_t = u_t + w_t  (the gradient of delta_t)
//   grad r_t = d_t,  grad V_t = gR_t - d_t + gamma d_{t-1},  grad bootstrap = gamma d_last
// with c, c' and gamma replaced by 0 across the end of an episode. Training never differentiates
// through advantages in bulk, so this is a plain loop.
template <typename T>
void gae_grad_row(const GaeGradArgs& args, int64_t row) {
  const GaeArgs& f = args.forward;
  const int64_t length = f.rows.size(row);
  const int64_t mask_row = f.rows.begin(row, f.mask.row_stride);
  const int64_t done_row = f.rows.begin(row, f.dones.row_stride);
  const int64_t out_row = f.rows.begin(row, f.out_stride);
  const int64_t advantage_row = f.rows.begin(row, args.grad_advantages.row_stride);
  const int64_t return_row = f.rows.begin(row, args.grad_returns.row_stride);
  const bool has_values = f.values.data != nullptr;

  const T gamma = static_cast<T>(f.gamma);
  const T lam = element<T>(f.lam_rows, row * f.lam_rows.row_stride, static_cast<T>(f.lam));
  const T returns_lam = f.two_lambdas ? static_cast<T>(f.returns_lam) : lam;
  T* const grad_rewards = static_cast<T*>(args.grad_rewards) + out_row;
  T* const grad_values = has_values ? static_cast<T*>(args.grad_values) + out_row : nullptr;

  T u = 0, w = 0, delta = 0;
  bool cut = true;  // no step to the left, or an episode ended there
  for (int64_t t = 0; t < length; ++t) {
    const bool valid = f.mask.data == nullptr || mask_at(f.mask, mask_row + t);
    const bool is_step = valid || f.holes != Holes::carry;
    T value_grad = 0, reward_grad = 0;
    if (is_step) {
      // Masked outputs are constants: 0, or values that only mirror a trainer's padding.
      const T g_advantage =
          valid ? element<T>(args.grad_advantages, advantage_row + t, T{0}) : T{0};
      const T g_return = valid ? element<T>(args.grad_returns, return_row + t, T{0}) : T{0};
      const T decay = cut ? T{0} : gamma;
      u = g_advantage + decay * lam * u;
      w = g_return + decay * returns_lam * w;
      value_grad = g_return - (u + w) + decay * delta;
      delta = u + w;
      const bool reads_inputs = valid || f.holes == Holes::ignore;
      reward_grad = reads_inputs ? delta : T{0};
      value_grad = reads_inputs ? value_grad : T{0};
      cut = f.dones.data != nullptr && (valid || f.holes == Holes::ignore) &&
            mask_at(f.dones, done_row + t);
    }
    grad_rewards[t] = reward_grad;
    if (has_values) grad_values[t] = value_grad;
  }
  if (args.grad_bootstrap != nullptr) {
    static_cast<T*>(args.grad_bootstrap)[row] = cut ? T{0} : gamma * delta;
  }
}

}  // namespace

void gae_rows(const GaeArgs& args, int64_t first_row, int64_t last_row) {
  if (args.rewards.kind == Kind::f64) {
    gae_range<double>(args, first_row, last_row);
  } else {
    gae_range<float>(args, first_row, last_row);
  }
  if (args.stream) end_of_stream();
}

void gae_grad_rows(const GaeGradArgs& args, int64_t first_row, int64_t last_row) {
  const bool is_double = args.forward.rewards.kind == Kind::f64;
  const auto kernel = is_double ? gae_grad_row<double> : gae_grad_row<float>;
  for (int64_t row = first_row; row < last_row; ++row) kernel(args, row);
}

}  // namespace fastrl::FASTRL_CAPABILITY
