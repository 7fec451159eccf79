// The affine scan and its adjoint on the device: what the scan of scan_rows.cuh reads and writes.
#pragma once

#include "affine_scan/affine_scan_args.h"
#include "common/scan_rows.cuh"

namespace fastrl::cuda {

// Eight consecutive tokens of a row as eight positions of a scan in either direction.
struct Window {
  int64_t first;  // token of the first item in memory
  ItemRange range;
  bool is_reversed;  // positions run against memory

  __device__ __forceinline__ Window(bool reversed, int64_t position, int64_t length)
      : first(reversed ? length - position - kItems : position),
        range(ItemRange::within(first, 0, length)),
        is_reversed(reversed) {}

  // Between the order of memory and that of the positions.
  template <typename T>
  __device__ __forceinline__ void turn(T (&x)[kItems]) const {
#pragma unroll
    for (int i = 0; i < kItems / 2; ++i) {
      const T low = x[i], high = x[kItems - 1 - i];
      x[i] = is_reversed ? high : low;
      x[kItems - 1 - i] = is_reversed ? low : high;
    }
  }
  // Whether position i of the eight is a token of the row.
  __device__ __forceinline__ bool has(int i) const {
    return range.has(is_reversed ? kItems - 1 - i : i);
  }
};

// x_t = a_t x_{t+1} + b_t with `reverse`, a_t x_{t-1} + b_t without.
template <typename T>
struct AffineScanProblem {
  using Number = T;
  using Args = AffineScanArgs;
  static constexpr int kScans = 1;
  static constexpr bool kHasLink = false;

  struct Loads {
    FloatItems<T> a, b;

    __device__ __forceinline__ void load(const AffineScanProblem& p, int64_t position) {
      const Window w(p.args_.reverse, position, p.row_.length);
      a.load(p.args_.a, p.row_.at(p.args_.a.row_stride) + w.first, w.range);
      b.load(p.args_.b, p.row_.at(p.args_.b.row_stride) + w.first, w.range);
    }
  };

  static __device__ __forceinline__ const Rows& rows(const AffineScanArgs& args) {
    return args.rows;
  }
  template <int kTeam>
  static __device__ __forceinline__ int64_t anchor(const AffineScanArgs&, const Row&, int) {
    return 0;
  }
  __device__ __forceinline__ AffineScanProblem(const AffineScanArgs& args, const Row& row, int64_t)
      : args_(args), row_(row) {}

  __device__ __forceinline__ int64_t positions() const { return row_.length; }
  __device__ __forceinline__ int64_t padding() const { return 0; }
  __device__ __forceinline__ void pad(int64_t) const {}
  __device__ __forceinline__ T first_link() const { return 0; }
  __device__ __forceinline__ T first_carry(int) const {
    if (args_.initial.data == nullptr || row_.length == 0) return 0;
    return element<T>(args_.initial, row_.index * args_.initial.row_stride);
  }
  __device__ __forceinline__ void prepare(const Loads& loads, int64_t position) {
    position_ = position;
    const Window w(args_.reverse, position, row_.length);
    loads.a.numbers(args_.a, a_);
    loads.b.numbers(args_.b, b_);
    w.turn(a_);
    w.turn(b_);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!w.has(i)) {
        a_[i] = 1;
        b_[i] = 0;
      }
    }
  }
  __device__ __forceinline__ Affine<T> aggregate(int) const {
    Affine<T> all;
#pragma unroll
    for (int i = 0; i < kItems; ++i) all = all.then({b_[i], a_[i]});
    return all;
  }
  __device__ __forceinline__ void finish(const T (&carry)[1]) const {
    T x[kItems], running = carry[0];
#pragma unroll
    for (int i = 0; i < kItems; ++i) x[i] = running = Affine<T>{b_[i], a_[i]}(running);
    const Window w(args_.reverse, position_, row_.length);
    w.turn(x);
    store_items(static_cast<T*>(args_.out), row_.at(args_.out_stride) + w.first, w.range, x);
  }
  __device__ __forceinline__ void finish_row(T, const T (&)[1]) const {}

 private:
  const AffineScanArgs& args_;
  const Row& row_;
  int64_t position_ = 0;
  T a_[kItems], b_[kItems];
};

// The adjoint runs the other way, here for the reverse scan: with g the gradient of x,
//   u_t = g_t + a_{t-1} u_{t-1},  grad b_t = u_t,  grad a_t = u_t x_{t+1},  grad initial = a_T u_T
template <typename T>
struct AffineScanGradProblem {
  using Number = T;
  using Args = AffineScanArgs;
  static constexpr int kScans = 1;
  static constexpr bool kHasLink = false;

  struct Loads {
    FloatItems<T> a, g, x;

    // a from the position before, x from the one after; the ends are filled in by prepare.
    __device__ __forceinline__ void load(const AffineScanGradProblem& p, int64_t position) {
      const Window w(p.is_reversed(), position, p.row_.length);
      const int next = p.is_reversed() ? -1 : 1;
      const auto shifted = [&](const FloatView& view, FloatItems<T>& items, int offset) {
        const int64_t first = w.first + offset;
        items.load(view, p.row_.at(view.row_stride) + first,
                   ItemRange::within(first, 0, p.row_.length));
      };
      shifted(p.args_.a, a, -next);
      shifted(p.args_.b, g, 0);
      shifted(p.args_.x, x, next);
    }
  };

  static __device__ __forceinline__ const Rows& rows(const AffineScanArgs& args) {
    return args.rows;
  }
  template <int kTeam>
  static __device__ __forceinline__ int64_t anchor(const AffineScanArgs&, const Row&, int) {
    return 0;
  }
  __device__ __forceinline__ AffineScanGradProblem(const AffineScanArgs& args, const Row& row,
                                                   int64_t)
      : args_(args), row_(row) {}

  __device__ __forceinline__ int64_t positions() const { return row_.length; }
  __device__ __forceinline__ int64_t padding() const { return 0; }
  __device__ __forceinline__ void pad(int64_t) const {}
  __device__ __forceinline__ T first_link() const { return 0; }
  __device__ __forceinline__ T first_carry(int) const { return 0; }
  __device__ __forceinline__ void prepare(const Loads& loads, int64_t position) {
    position_ = position;
    const Window w(is_reversed(), position, row_.length);
    loads.a.numbers(args_.a, a_);
    loads.g.numbers(args_.b, g_);
    loads.x.numbers(args_.x, x_);
    w.turn(a_);
    w.turn(g_);
    w.turn(x_);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (position + i == 0) a_[i] = 0;
      if (position + i == row_.length - 1) x_[i] = initial();
      if (!w.has(i)) {
        a_[i] = 1;
        g_[i] = 0;
      }
    }
  }
  __device__ __forceinline__ Affine<T> aggregate(int) const {
    Affine<T> all;
#pragma unroll
    for (int i = 0; i < kItems; ++i) all = all.then({g_[i], a_[i]});
    return all;
  }
  __device__ __forceinline__ void finish(const T (&carry)[1]) const {
    T grad_a[kItems], grad_b[kItems], running = carry[0];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      grad_b[i] = running = Affine<T>{g_[i], a_[i]}(running);
      grad_a[i] = running * x_[i];
    }
    const Window w(is_reversed(), position_, row_.length);
    w.turn(grad_a);
    w.turn(grad_b);
    const int64_t out = row_.at(args_.out_stride) + w.first;
    store_items(static_cast<T*>(args_.grad_a), out, w.range, grad_a);
    store_items(static_cast<T*>(args_.out), out, w.range, grad_b);
  }
  __device__ __forceinline__ void finish_row(T, const T (&carry)[1]) const {
    T factor = 0;
    if (row_.length > 0) {
      const int64_t last = is_reversed() ? 0 : row_.length - 1;
      factor = element<T>(args_.a, row_.at(args_.a.row_stride) + last);
    }
    static_cast<T*>(args_.grad_initial)[row_.index] = factor * carry[0];
  }

 private:
  __device__ __forceinline__ bool is_reversed() const { return !args_.reverse; }
  __device__ __forceinline__ T initial() const {
    if (args_.initial.data == nullptr) return 0;
    return element<T>(args_.initial, row_.index * args_.initial.row_stride);
  }

  const AffineScanArgs& args_;
  const Row& row_;
  int64_t position_ = 0;
  T a_[kItems], g_[kItems], x_[kItems];
};

}  // namespace fastrl::cuda
