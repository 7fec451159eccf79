// The scan x_t = a_t x_{t+1} + b_t (or x_{t-1}, left to right) on CPU, a block of lanes at a time.
//
// Inside a block the pairs (a, b) are composed by log-steps without what comes from outside; the
// carry is added last, so the chain from block to block is one multiply-add. Left to right is the
// same with the lanes of a block reversed.
#include "affine_scan/affine_scan_kernel.h"

#include "common/scan.h"
#include "common/vec.h"

namespace fastrl::FASTRL_CAPABILITY {
namespace {

template <typename T>
FASTRL_INLINE T scalar(const FloatView& view, int64_t index) {
  return load_first_as<T>(view.data, view.kind, index, 1)[0];
}

// Scans `length` columns; factor(column, n) and term(column, n) load lanes, emit(column, n, x)
// takes the result. Returns the last x that was computed, `carry` when there is none.
template <typename T, bool kRightToLeft, typename Factor, typename Term, typename Emit>
FASTRL_INLINE T scan(int64_t length, T carry, Factor factor, Term term, Emit emit) {
  for (int64_t done = 0; done < length;) {
    const int n = static_cast<int>(length - done < kLanes<T> ? length - done : kLanes<T>);
    const int64_t column = kRightToLeft ? length - done - n : done;
    done += n;
    Lanes<T> f = factor(column, n), x = term(column, n);
    if (n < kLanes<T>) f = select(LaneMask<T>(first_bits(n)), f, Lanes<T>(T{1}));
    if constexpr (!kRightToLeft) {
      f = reversed(f);
      x = reversed(x);
    }
    suffix_scan(x, f);
    x += f * Lanes<T>(carry);
    // Reversed, the idle lanes of a short block stand on the far side and end up holding its last
    // value as well.
    carry = first_lane(x);
    if constexpr (!kRightToLeft) x = reversed(x);
    emit(column, n, x);
  }
  return carry;
}

template <typename T, bool kReverse>
void affine_scan_row(const AffineScanArgs& args, int64_t row) {
  const int64_t a_row = args.rows.begin(row, args.a.row_stride);
  const int64_t b_row = args.rows.begin(row, args.b.row_stride);
  T* const out = static_cast<T*>(args.out) + args.rows.begin(row, args.out_stride);
  const T initial =
      args.initial.data == nullptr ? T{0} : scalar<T>(args.initial, row * args.initial.row_stride);
  scan<T, kReverse>(
      args.rows.size(row), initial,
      [&](int64_t column, int n) { return load_row<T>(args.a, a_row + column, n); },
      [&](int64_t column, int n) { return load_row<T>(args.b, b_row + column, n); },
      [&](int64_t column, int n, Lanes<T> x) { store_row(out + column, x, n); });
}

// With g the gradient of x, for the reverse scan: u_t = g_t + a_{t-1} u_{t-1} runs the other way,
// grad b_t = u_t, grad a_t = u_t x_{t+1}, and grad initial = a_T u_T.
template <typename T, bool kReverse>
void affine_scan_grad_row(const AffineScanArgs& args, int64_t row) {
  const int64_t length = args.rows.size(row);
  const int64_t a_row = args.rows.begin(row, args.a.row_stride);
  const int64_t g_row = args.rows.begin(row, args.b.row_stride);
  const int64_t x_row = args.rows.begin(row, args.x.row_stride);
  const int64_t out_row = args.rows.begin(row, args.out_stride);
  T* const grad_b = static_cast<T*>(args.out) + out_row;
  T* const grad_a = static_cast<T*>(args.grad_a) + out_row;
  const T initial =
      args.initial.data == nullptr ? T{0} : scalar<T>(args.initial, row * args.initial.row_stride);

  // `view` read `offset` columns away, with `outside` where that leaves the row.
  const auto shifted = [&](const FloatView& view, int64_t start, int64_t column, int n, int offset,
                           T outside) {
    T lanes[kLanes<T>] = {};
    const bool inside = column + offset >= 0 && column + offset + n <= length;
    if (inside) return load_row<T>(view, start + column + offset, n);
    for (int i = 0; i < n; ++i) {
      const int64_t at = column + i + offset;
      lanes[i] = at >= 0 && at < length ? scalar<T>(view, start + at) : outside;
    }
    return Lanes<T>::at(lanes);
  };
  constexpr int kNext = kReverse ? 1 : -1;  // where the forward scan came from
  const T last = scan<T, !kReverse>(
      length, T{0},
      [&](int64_t column, int n) { return shifted(args.a, a_row, column, n, -kNext, T{0}); },
      [&](int64_t column, int n) { return load_row<T>(args.b, g_row + column, n); },
      [&](int64_t column, int n, Lanes<T> u) {
        store_row(grad_b + column, u, n);
        const Lanes<T> next_x = shifted(args.x, x_row, column, n, kNext, initial);
        store_row(grad_a + column, u * next_x, n);
      });
  if (args.grad_initial != nullptr) {
    const int64_t end = kReverse ? length - 1 : 0;
    const T factor = length > 0 ? scalar<T>(args.a, a_row + end) : T{0};
    static_cast<T*>(args.grad_initial)[row] = factor * last;
  }
}

template <typename T>
void forward_rows(const AffineScanArgs& args, int64_t first_row, int64_t last_row) {
  const auto kernel = args.reverse ? affine_scan_row<T, true> : affine_scan_row<T, false>;
  for (int64_t row = first_row; row < last_row; ++row) kernel(args, row);
}

template <typename T>
void grad_rows(const AffineScanArgs& args, int64_t first_row, int64_t last_row) {
  const auto kernel = args.reverse ? affine_scan_grad_row<T, true> : affine_scan_grad_row<T, false>;
  for (int64_t row = first_row; row < last_row; ++row) kernel(args, row);
}

}  // namespace

void affine_scan_rows(const AffineScanArgs& args, int64_t first_row, int64_t last_row) {
  const auto rows = args.a.kind == Kind::f64 ? forward_rows<double> : forward_rows<float>;
  rows(args, first_row, last_row);
}

void affine_scan_grad_rows(const AffineScanArgs& args, int64_t first_row, int64_t last_row) {
  const auto rows = args.a.kind == Kind::f64 ? grad_rows<double> : grad_rows<float>;
  rows(args, first_row, last_row);
}

}  // namespace fastrl::FASTRL_CAPABILITY
