// Generalised advantage estimation on the device: what the scan of scan_rows.cuh reads and writes.
#pragma once

#include "common/scan_rows.cuh"
#include "common/valid.cuh"
#include "gae/gae_args.h"
#include "gae/gae_core.h"

namespace fastrl::cuda {

// Whether one item of a bit set is there.
__device__ __forceinline__ bool has_bit(uint32_t bits, int i) { return ((bits >> i) & 1) != 0; }

// The tokens of eight positions: which count, which are steps, which end an episode.
struct StepBits {
  uint32_t kept = 0;  // valid
  uint32_t read = 0;  // inputs are used
  uint32_t step = 0;
  uint32_t done = 0;

  StepBits() = default;
  __device__ __forceinline__ StepBits(const GaeArgs& args, const MaskItems& mask, ItemRange range,
                                      int64_t done_first) {
    kept = mask.bits(args.mask, range);
    read = args.holes == Holes::ignore ? range.bits() : kept;
    step = args.holes == Holes::carry ? kept : range.bits();
    if (args.dones.data != nullptr) {
      MaskItems dones;
      dones.load(args.dones, done_first, range);
      done = dones.bits(args.dones, range) & read;
    }
  }
};

// Right to left: A_t = delta_t + c A_{t+1} over the steps, with the value of the next step as link.
// Without values V = 0, the returns alone are wanted and go to `advantages`.
template <typename T, bool kValues, bool kTwo>
struct GaeProblem {
  using Number = T;
  using Args = GaeArgs;
  static constexpr int kScans = kTwo ? 2 : 1;
  static constexpr bool kHasLink = true;

  struct Loads {
    FloatItems<T> rewards, values;
    MaskItems mask;

    __device__ __forceinline__ void load(const GaeProblem& p, int64_t position) {
      const int64_t first = p.token_of(position);
      const ItemRange range = ItemRange::within(first, 0, p.end_);
      rewards.load(p.args_.rewards, p.row_.at(p.args_.rewards.row_stride) + first, range);
      if constexpr (kValues) {
        values.load(p.args_.values, p.row_.at(p.args_.values.row_stride) + first, range);
      }
      mask.load(p.args_.mask, p.row_.at(p.args_.mask.row_stride) + first, range);
    }
  };

  static __device__ __forceinline__ const Rows& rows(const GaeArgs& args) { return args.rows; }

  // Padding on the right changes no state unless it bootstraps through steps of its own.
  template <int kTeam>
  static __device__ __forceinline__ int64_t anchor(const GaeArgs& args, const Row& row,
                                                   int thread) {
    const bool is_inert =
        args.holes == Holes::carry || (args.holes == Holes::zero_step && !args.bootstrap.data);
    if (args.mask.data == nullptr || !is_inert) return row.length;
    return valid_end<kTeam>(args.mask, row, thread);
  }

  __device__ __forceinline__ GaeProblem(const GaeArgs& args, const Row& row, int64_t end)
      : args_(args), row_(row), end_(end), gamma_(static_cast<T>(args.gamma)) {
    T lam = static_cast<T>(args.lam);
    if (args.lam_rows.data != nullptr && row.length > 0) {
      lam = element<T>(args.lam_rows, row.index * args.lam_rows.row_stride);
    }
    decay_[0] = gamma_ * lam;
    if constexpr (kTwo) decay_[1] = gamma_ * static_cast<T>(args.returns_lam);
  }

  __device__ __forceinline__ int64_t positions() const { return end_; }
  __device__ __forceinline__ T first_carry(int) const { return 0; }
  __device__ __forceinline__ T first_link() const {
    if (args_.bootstrap.data == nullptr || row_.length == 0) return 0;
    return element<T>(args_.bootstrap, row_.index * args_.bootstrap.row_stride);
  }

  __device__ __forceinline__ void prepare(const Loads& loads, int64_t position) {
    first_ = token_of(position);
    range_ = ItemRange::within(first_, 0, end_);
    bits_ = StepBits(args_, loads.mask, range_, row_.at(args_.dones.row_stride) + first_);
    loads.rewards.numbers(args_.rewards, rewards_);
    if constexpr (kValues) loads.values.numbers(args_.values, values_);
  }

  __device__ __forceinline__ bool has_link() const { return bits_.step != 0; }
  __device__ __forceinline__ T link_out() const {
    T out = 0;
#pragma unroll
    for (int i = kItems - 1; i >= 0; --i) {
      if (has_bit(bits_.step, i)) out = value(i);
    }
    return out;
  }
  // Leaves delta in the place of the rewards.
  __device__ __forceinline__ void link(T next_value) {
#pragma unroll
    for (int i = kItems - 1; i >= 0; --i) {
      const T reward = has_bit(bits_.read, i) ? rewards_[i] : T{0};
      const T following = has_bit(bits_.done, i) ? T{0} : next_value;
      const bool is_step = has_bit(bits_.step, i);
      rewards_[i] = is_step ? td_error(reward, gamma_, following, value(i)) : T{0};
      if (is_step) next_value = value(i);
    }
  }
  __device__ __forceinline__ bool is_link_at(int64_t position) const {
    return args_.holes != Holes::carry || is_valid(end_ - 1 - position);
  }
  __device__ __forceinline__ T link_at(int64_t position) const {
    const int64_t token = end_ - 1 - position;
    if (!kValues || (args_.holes != Holes::ignore && !is_valid(token))) return 0;
    return element<T>(args_.values, row_.at(args_.values.row_stride) + token);
  }

  __device__ __forceinline__ Affine<T> aggregate(int s) const {
    Affine<T> all;
#pragma unroll
    for (int i = kItems - 1; i >= 0; --i) all = all.then(at(i, s));
    return all;
  }
  __device__ __forceinline__ void finish(const T (&carry)[kScans]) const {
    T advantages[kItems], returns[kItems], running[kScans];
#pragma unroll
    for (int s = 0; s < kScans; ++s) running[s] = carry[s];
#pragma unroll
    for (int i = kItems - 1; i >= 0; --i) {
#pragma unroll
      for (int s = 0; s < kScans; ++s) running[s] = at(i, s)(running[s]);
      const bool shows = args_.fill_carry || has_bit(bits_.kept, i);
      advantages[i] = shows ? running[0] : T{0};
      if constexpr (kValues) {
        // A hole that shows the running value shows it on top of its own, unused value.
        const bool has_value = args_.holes == Holes::carry || has_bit(bits_.read, i);
        returns[i] = shows ? running[kScans - 1] + (has_value ? values_[i] : T{0}) : T{0};
      }
    }
    const int64_t out = row_.at(args_.out_stride) + first_;
    store_items(static_cast<T*>(args_.advantages), out, range_, advantages);
    if constexpr (kValues) store_items(static_cast<T*>(args_.returns), out, range_, returns);
  }
  __device__ __forceinline__ void finish_row(T, const T (&)[kScans]) const {}

  // Eight tokens at a time from where a multiple of eight lets them be aligned.
  __device__ __forceinline__ int64_t padding() const {
    return row_.length > end_ ? row_.length - pad_start() : 0;
  }
  __device__ __forceinline__ void pad(int64_t at) const {
    const int64_t first = pad_start() + at;
    const ItemRange range = ItemRange::within(first, end_, row_.length);
    const int64_t out = row_.at(args_.out_stride) + first;
    T zeros[kItems] = {}, values[kItems] = {};
    store_items(static_cast<T*>(args_.advantages), out, range, zeros);
    if constexpr (kValues) {
      if (args_.fill_carry && args_.holes == Holes::carry) {
        FloatItems<T> items;
        items.load(args_.values, row_.at(args_.values.row_stride) + first, range);
        items.numbers(args_.values, values);
      }
      store_items(static_cast<T*>(args_.returns), out, range, values);
    }
  }

 private:
  __device__ __forceinline__ int64_t token_of(int64_t position) const {
    return end_ - position - kItems;
  }
  __device__ __forceinline__ int64_t pad_start() const { return end_ - end_ % kItems; }
  __device__ __forceinline__ bool is_valid(int64_t token) const {
    return args_.mask.data == nullptr ||
           mask_element(args_.mask, row_.at(args_.mask.row_stride) + token);
  }
  // The value of a step: that of a hole is 0.
  __device__ __forceinline__ T value(int i) const {
    if constexpr (!kValues) return 0;
    return has_bit(bits_.read, i) ? values_[i] : T{0};
  }
  __device__ __forceinline__ Affine<T> at(int i, int s) const {
    if (!has_bit(bits_.step, i)) return {};
    return {rewards_[i], has_bit(bits_.done, i) ? T{0} : decay_[s]};
  }

  const GaeArgs& args_;
  const Row& row_;
  int64_t end_;
  T gamma_;
  T decay_[kScans];
  int64_t first_ = 0;
  ItemRange range_;
  StepBits bits_;
  T rewards_[kItems], values_[kItems];
};

// The adjoint, left to right over the same steps:
//   u_t = gA_t + c u_{t-1},  w_t = gR_t + c' w_{t-1},  d_t = u_t + w_t  (the gradient of delta_t)
//   grad r_t = d_t,  grad V_t = gR_t - d_t + gamma d_{t-1},  grad bootstrap = gamma d_last
// with c, c' and gamma replaced by 0 across the end of an episode, which is the link. Masked
// results are constants. With one lambda u and w are one scan.
template <typename T, bool kTwo>
struct GaeGradProblem {
  using Number = T;
  using Args = GaeGradArgs;
  static constexpr int kScans = kTwo ? 2 : 1;
  static constexpr bool kHasLink = true;

  struct Loads {
    FloatItems<T> advantages, returns;
    MaskItems mask;

    __device__ __forceinline__ void load(const GaeGradProblem& p, int64_t position) {
      const int64_t first = p.begin_ + position;
      const ItemRange range = ItemRange::within(first, p.begin_, p.row_.length);
      const auto read = [&](const FloatView& view, FloatItems<T>& items) {
        if (view.data != nullptr) items.load(view, p.row_.at(view.row_stride) + first, range);
      };
      read(p.args_.grad_advantages, advantages);
      read(p.args_.grad_returns, returns);
      mask.load(p.forward_.mask, p.row_.at(p.forward_.mask.row_stride) + first, range);
    }
  };

  static __device__ __forceinline__ const Rows& rows(const GaeGradArgs& args) {
    return args.forward.rows;
  }
  // Nothing flows before the first valid token.
  template <int kTeam>
  static __device__ __forceinline__ int64_t anchor(const GaeGradArgs& args, const Row& row,
                                                   int thread) {
    if (args.forward.mask.data == nullptr) return 0;
    return valid_begin<kTeam>(args.forward.mask, row, thread);
  }

  __device__ __forceinline__ GaeGradProblem(const GaeGradArgs& args, const Row& row, int64_t begin)
      : args_(args),
        forward_(args.forward),
        row_(row),
        begin_(begin),
        gamma_(static_cast<T>(args.forward.gamma)) {
    T lam = static_cast<T>(forward_.lam);
    if (forward_.lam_rows.data != nullptr && row.length > 0) {
      lam = element<T>(forward_.lam_rows, row.index * forward_.lam_rows.row_stride);
    }
    decay_[0] = gamma_ * lam;
    if constexpr (kTwo) decay_[1] = gamma_ * static_cast<T>(forward_.returns_lam);
  }

  __device__ __forceinline__ int64_t positions() const { return row_.length - begin_; }
  __device__ __forceinline__ T first_carry(int) const { return 0; }
  __device__ __forceinline__ T first_link() const { return 1; }

  __device__ __forceinline__ void prepare(const Loads& loads, int64_t position) {
    first_ = begin_ + position;
    range_ = ItemRange::within(first_, begin_, row_.length);
    bits_ = StepBits(forward_, loads.mask, range_, row_.at(forward_.dones.row_stride) + first_);
    const auto take = [&](const FloatView& view, const FloatItems<T>& items, T(&out)[kItems]) {
      if (view.data != nullptr) items.numbers(view, out);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (view.data == nullptr || !has_bit(bits_.kept, i)) out[i] = 0;
      }
    };
    take(args_.grad_advantages, loads.advantages, advantages_);
    take(args_.grad_returns, loads.returns, returns_);
  }

  __device__ __forceinline__ bool has_link() const { return bits_.step != 0; }
  __device__ __forceinline__ T link_out() const {
    const int last = 31 - __clz(static_cast<int>(bits_.step | 1));
    return has_bit(bits_.done, last) ? 1 : 0;
  }
  __device__ __forceinline__ void link(T is_cut) {
    cut_ = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (is_cut != 0) cut_ |= 1u << i;
      if (has_bit(bits_.step, i)) is_cut = has_bit(bits_.done, i) ? 1 : 0;
    }
  }
  __device__ __forceinline__ bool is_link_at(int64_t position) const {
    return forward_.holes != Holes::carry || is_valid(begin_ + position);
  }
  __device__ __forceinline__ T link_at(int64_t position) const {
    const int64_t token = begin_ + position;
    if (forward_.dones.data == nullptr) return 0;
    if (forward_.holes != Holes::ignore && !is_valid(token)) return 0;
    return mask_element(forward_.dones, row_.at(forward_.dones.row_stride) + token) ? 1 : 0;
  }

  __device__ __forceinline__ Affine<T> aggregate(int s) const {
    Affine<T> all;
#pragma unroll
    for (int i = 0; i < kItems; ++i) all = all.then(at(i, s));
    return all;
  }
  __device__ __forceinline__ void finish(const T (&carry)[kScans]) const {
    T rewards[kItems], values[kItems], running[kScans];
#pragma unroll
    for (int s = 0; s < kScans; ++s) running[s] = carry[s];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const T before = total(running);
#pragma unroll
      for (int s = 0; s < kScans; ++s) running[s] = at(i, s)(running[s]);
      const T delta = total(running);
      const bool flows = has_bit(bits_.step & bits_.read, i);
      const T decay = has_bit(cut_, i) ? T{0} : gamma_;
      rewards[i] = flows ? delta : T{0};
      values[i] = flows ? returns_[i] - delta + decay * before : T{0};
    }
    write(first_, range_, rewards, values);
  }
  __device__ __forceinline__ void finish_row(T is_cut, const T (&carry)[kScans]) const {
    static_cast<T*>(args_.grad_bootstrap)[row_.index] = is_cut != 0 ? T{0} : gamma_ * total(carry);
  }

  __device__ __forceinline__ int64_t padding() const { return begin_; }
  __device__ __forceinline__ void pad(int64_t first) const {
    const T zeros[kItems] = {};
    write(first, ItemRange::within(first, 0, begin_), zeros, zeros);
  }

 private:
  __device__ __forceinline__ bool is_valid(int64_t token) const {
    return forward_.mask.data == nullptr ||
           mask_element(forward_.mask, row_.at(forward_.mask.row_stride) + token);
  }
  static __device__ __forceinline__ T total(const T (&x)[kScans]) {
    T sum = x[0];
    if constexpr (kTwo) sum += x[1];
    return sum;
  }
  __device__ __forceinline__ Affine<T> at(int i, int s) const {
    if (!has_bit(bits_.step, i)) return {};
    const T source = !kTwo ? advantages_[i] + returns_[i] : s == 0 ? advantages_[i] : returns_[i];
    return {source, has_bit(cut_, i) ? T{0} : decay_[s]};
  }
  __device__ __forceinline__ void write(int64_t first, ItemRange range, const T (&rewards)[kItems],
                                        const T (&values)[kItems]) const {
    const int64_t out = row_.at(forward_.out_stride) + first;
    store_items(static_cast<T*>(args_.grad_rewards), out, range, rewards);
    if (args_.grad_values != nullptr) {
      store_items(static_cast<T*>(args_.grad_values), out, range, values);
    }
  }

  const GaeGradArgs& args_;
  const GaeArgs& forward_;
  const Row& row_;
  int64_t begin_;
  T gamma_;
  T decay_[kScans];
  int64_t first_ = 0;
  ItemRange range_;
  StepBits bits_;
  uint32_t cut_ = 0;
  T advantages_[kItems], returns_[kItems];
};

}  // namespace fastrl::cuda
