// Log-probabilities of chosen tokens, entropies of their rows and the gradient, on the device: one
// read of the logits each way.
//
// A row belongs to a thread block, or to a warp where it is short; which of them depends on V
// alone. Thread l of n takes the vectors l, l + n, ... of 16 bytes, counted from the first class of
// the row, and keeps running sums relative to the largest logit that it has seen; several vectors
// are read before the first is looked at. Threads are combined by a fixed tree in double, so
// neither the address of a row nor its neighbours change a bit. Exponents are in powers of two
// throughout.
#pragma once

#include "common/reduce.cuh"
#include "token_logprobs/token_logprobs_args.h"
#include "token_logprobs/token_logprobs_core.h"

namespace fastrl::cuda {

constexpr int kLogitThreads = 256;
constexpr int64_t kWarpClasses = 1024;  // a warp is enough for rows up to here
constexpr int kAhead = 4;               // vectors that a thread reads at once
constexpr double kLog2E = 1.44269504088896340736, kLn2 = 0.693147180559945309417;

template <Kind kKind>
struct Logit {
  using Compute = float;
  static constexpr int kBytes = kKind == Kind::f32 ? 4 : 2;
};
template <>
struct Logit<Kind::f64> {
  using Compute = double;
  static constexpr int kBytes = 8;
};

// Of a multiprocessor at least: what registers may cost, also where double precision needs many.
template <Kind kKind>
constexpr int kLogitBlocks = kKind == Kind::f64 ? 2 : 3;

__device__ __forceinline__ float power_of_two(float x) { return exp2f(x); }
__device__ __forceinline__ double power_of_two(double x) { return exp2(x); }
// NaN is passed over.
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }

// 16 bytes of logits.
template <Kind kKind>
struct LogitVector {
  using T = typename Logit<kKind>::Compute;
  static constexpr int kBytes = Logit<kKind>::kBytes;
  static constexpr int kCount = 16 / kBytes;
  uint32_t word[4];

  __device__ __forceinline__ T operator[](int i) const {
    if constexpr (kBytes == 8) {
      return __hiloint2double(static_cast<int>(word[2 * i + 1]), static_cast<int>(word[2 * i]));
    } else if constexpr (kBytes == 4) {
      return __uint_as_float(word[i]);
    } else {
      const uint32_t half = i % 2 == 0 ? word[i / 2] & 0xffffu : word[i / 2] >> 16;
      return kKind == Kind::bf16 ? from_bf16(half) : from_f16(half);
    }
  }
  __device__ __forceinline__ void set(int i, T x) {
    if constexpr (kBytes == 8) {
      word[2 * i] = static_cast<uint32_t>(__double2loint(x));
      word[2 * i + 1] = static_cast<uint32_t>(__double2hiint(x));
    } else if constexpr (kBytes == 4) {
      word[i] = __float_as_uint(x);
    } else {
      const uint32_t half = kKind == Kind::bf16 ? to_bf16(x) : to_f16(x);
      word[i / 2] =
          i % 2 == 0 ? (word[i / 2] & 0xffff0000u) | half : (word[i / 2] & 0xffffu) | (half << 16);
    }
  }
};

// `classes` logits from any address that fits an element.
template <Kind kKind>
class LogitRow {
 public:
  using Vector = LogitVector<kKind>;
  using T = typename Vector::T;

  __device__ __forceinline__ LogitRow(const void* data, int64_t begin, int64_t classes)
      : row_(static_cast<const char*>(data) + begin * Vector::kBytes), classes_(classes) {
    const int64_t bytes = classes * Vector::kBytes;
    const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(row_) % 16);
    first_ = past == 0 ? 0 : 1;
    last_ = past == 0 ? bytes / 16 : (bytes + past) / 16 - 1;
    past_ = static_cast<int>(past);
  }

  // Element `index`; it must exist.
  __device__ __forceinline__ T operator[](int64_t index) const {
    FloatView view;
    view.data = row_;
    view.kind = kKind;
    return element<T>(view, index);
  }

  // The vector at element k * kCount; elements that do not exist become -inf. A vector that lies
  // across two aligned ones is cut out of them.
  __device__ __forceinline__ Vector vector(int64_t k) const {
    Vector v;
    const char* const p = row_ + k * 16;
    if (k < first_ || k >= last_) {
#pragma unroll
      for (int i = 0; i < Vector::kCount; ++i) {
        const int64_t index = k * Vector::kCount + i;
        v.set(i, index < classes_ ? (*this)[index] : static_cast<T>(-INFINITY));
      }
    } else if (past_ == 0) {
      const uint4 quad = load_once(reinterpret_cast<const uint4*>(p));
      v.word[0] = quad.x;
      v.word[1] = quad.y;
      v.word[2] = quad.z;
      v.word[3] = quad.w;
    } else {
      const auto* const quads = reinterpret_cast<const uint4*>(p - past_);
      const uint4 a = __ldg(quads), b = __ldg(quads + 1);  // neighbours want them too
      const uint32_t word[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
      uint32_t by_two[7];
#pragma unroll
      for (int i = 0; i < 6; ++i) by_two[i] = (past_ & 8) != 0 ? word[i + 2] : word[i];
      by_two[6] = word[6];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t low = (past_ & 4) != 0 ? by_two[i + 1] : by_two[i];
        const uint32_t high = (past_ & 4) != 0 ? by_two[i + 2] : by_two[i + 1];
        v.word[i] = (past_ & 2) != 0 ? (low >> 16) | (high << 16) : low;
      }
    }
    return v;
  }

 private:
  const char* row_;
  int64_t classes_;
  int64_t first_, last_;  // vectors that can be read in whole quads
  int past_;              // bytes between an aligned address and the row
};

// Running sums of 2^x and x 2^x, x = (logit - largest) * scale.
template <typename T>
struct OnlineSums {
  T largest = static_cast<T>(-INFINITY);
  T exps = 0, weighted = 0;

  // Before the first finite logit the sums are zeros, or the NaN of a row.
  __device__ __forceinline__ void raise(T to, T scale) {
    if (!(to > largest)) return;
    const T step = (largest - to) * scale;
    const T factor = power_of_two(step);
    weighted = factor > 0 ? factor * (weighted + step * exps) : 0 * weighted;
    exps *= factor;
    largest = to;
  }

  template <bool kEntropy, typename Vector, int kCount>
  __device__ __forceinline__ void add(const Vector (&vectors)[kCount], T scale) {
    T found = vectors[0][0];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int i = 0; i < Vector::kCount; ++i) found = larger(found, vectors[u][i]);
    }
    raise(found, scale);
    // With nothing but -inf so far any reference serves; NaN, which no maximum shows, must reach
    // the sums.
    const T reference = largest > static_cast<T>(-INFINITY) ? largest : T{0};
    T step_exps = 0, step_weighted = 0;
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int i = 0; i < Vector::kCount; ++i) {
        const T x = (vectors[u][i] - reference) * scale;
        const T e = power_of_two(x);
        step_exps += e;
        // Finite where the exponential is 0, so that 0 * x is 0.
        if constexpr (kEntropy) step_weighted += e * larger(x, static_cast<T>(-2000));
      }
    }
    exps += step_exps;
    weighted += step_weighted;
  }
};

template <typename T>
__device__ __forceinline__ T temperature_of(const TokenLogprobsArgs& args, int64_t row) {
  return args.temperatures == nullptr ? static_cast<T>(args.temperature)
                                      : static_cast<const T*>(args.temperatures)[row];
}

// The row of this thread and its place in it, kRowThreads threads a row.
template <int kRowThreads>
struct RowThread {
  static constexpr int kRows = kLogitThreads / kRowThreads;  // of a block
  int64_t row = int64_t{blockIdx.x} * kRows + static_cast<int>(threadIdx.x) / kRowThreads;
  int lane = static_cast<int>(threadIdx.x) % kRowThreads;
};

template <Kind kKind, bool kEntropy, int kRowThreads>
__global__ void __launch_bounds__(kLogitThreads, kLogitBlocks<kKind>)
    token_logprobs_rows(const __grid_constant__ TokenLogprobsArgs args, int64_t rows) {
  using Row = LogitRow<kKind>;
  using Vector = typename Row::Vector;
  using T = typename Row::T;
  __shared__ T largest_of_warps[kLogitThreads / kWarp];
  __shared__ double sums_of_warps[kLogitThreads / kWarp];
  const RowThread<kRowThreads> thread;
  const int64_t row = thread.row;
  if (row >= rows) return;  // whole warps, in blocks of one warp a row
  const int64_t classes = args.logits.classes;
  const Row logits(args.logits.data, args.logits.begin(row), classes);
  const T inverse_temperature = T{1} / temperature_of<T>(args, row);
  const T scale = inverse_temperature * static_cast<T>(kLog2E);

  OnlineSums<T> sums;
  const int64_t vectors = (classes + Vector::kCount - 1) / Vector::kCount;
  for (int64_t k = thread.lane; k < vectors; k += kAhead * kRowThreads) {
    Vector v[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) v[u] = logits.vector(k + u * kRowThreads);
    sums.template add<kEntropy>(v, scale);
  }

  sums.raise(block_reduce<kRowThreads>(sums.largest, Greatest{}, largest_of_warps), scale);
  RowSums total;
  total.largest = static_cast<double>(sums.largest);
  total.exps = block_reduce<kRowThreads>(static_cast<double>(sums.exps), Sum{}, sums_of_warps);
  if constexpr (kEntropy) {
    total.weighted =
        block_reduce<kRowThreads>(static_cast<double>(sums.weighted), Sum{}, sums_of_warps) * kLn2;
  }
  if (thread.lane != 0) return;
  const int64_t token = args.tokens[row];
  const bool exists = token >= 0 && token < classes;
  const double logit = exists ? static_cast<double>(logits[token]) : static_cast<double>(NAN);
  static_cast<T*>(args.logp)[row] = static_cast<T>(total.log_prob(logit, inverse_temperature));
  T* const statistics = static_cast<T*>(args.statistics) + row * kNumStatistics;
  statistics[0] = sums.largest;
  statistics[1] = static_cast<T>(total.exps);
  statistics[2] = kEntropy ? static_cast<T>(total.mean()) : T{0};
  if constexpr (kEntropy) static_cast<T*>(args.entropy)[row] = static_cast<T>(total.entropy());
}

// Gradient of a logit: 2^x (alpha + beta x), x = (logit - largest) * scale; less gamma at the
// token.
template <typename T>
struct LogitGradient {
  T largest, scale, alpha, beta;

  __device__ __forceinline__ T operator()(T logit) const {
    const T x = (logit - largest) * scale;
    return power_of_two(x) * (alpha + beta * larger(x, static_cast<T>(-2000)));
  }
};

// Vectors are counted from the first aligned address of the output; no thread reads what another
// one writes, so the output may be the logits themselves.
template <Kind kKind, int kRowThreads>
__global__ void __launch_bounds__(kLogitThreads, kLogitBlocks<kKind>)
    token_logprobs_grad_rows(const __grid_constant__ TokenLogprobsGradArgs args, int64_t rows) {
  using Row = LogitRow<kKind>;
  using Vector = typename Row::Vector;
  using T = typename Row::T;
  constexpr int kCount = Vector::kCount;
  const TokenLogprobsArgs& f = args.forward;
  const RowThread<kRowThreads> thread;
  if (thread.row >= rows) return;
  const int64_t row = rows - 1 - thread.row;  // the last rows of the forward are still in the cache
  const int64_t classes = f.logits.classes;
  char* const out = static_cast<char*>(args.grad_logits) + args.grad_begin(row) * Vector::kBytes;
  const int past = static_cast<int>(reinterpret_cast<uintptr_t>(out) % 16);
  const int64_t to_aligned = past == 0 ? 0 : (16 - past) / Vector::kBytes;
  const int64_t head = to_aligned < classes ? to_aligned : classes;
  const int64_t vectors = (classes - head) / kCount;
  const int64_t tail = head + vectors * kCount;
  const auto store = [&](int64_t k, const Vector& v) {
    reinterpret_cast<uint4*>(out + head * Vector::kBytes)[k] =
        make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
  };
  const auto store_one = [&](int64_t index, T x) {
    if constexpr (Vector::kBytes == 2) {
      reinterpret_cast<uint16_t*>(out)[index] = kKind == Kind::bf16 ? to_bf16(x) : to_f16(x);
    } else {
      reinterpret_cast<T*>(out)[index] = x;
    }
  };
  // Fewer elements than threads on either side of the vectors.
  const auto for_ends = [&](const auto& visit) {
    if (thread.lane < head) visit(int64_t{thread.lane});
    if (thread.lane < classes - tail) visit(tail + thread.lane);
  };

  const auto upstream = [&](const void* grads) {
    return grads == nullptr ? T{0} : static_cast<const T*>(grads)[row];
  };
  T g = upstream(args.grad_logp);
  const T h = upstream(args.grad_entropy);
  if (g == 0 && h == 0) {
    for (int64_t k = thread.lane; k < vectors; k += kRowThreads) store(k, Vector{});
    for_ends([&](int64_t index) { store_one(index, T{0}); });
    return;
  }
  const int64_t token = f.tokens[row];
  if ((token < 0 || token >= classes) && g != 0) g = static_cast<T>(NAN);
  const T* const statistics = static_cast<const T*>(f.statistics) + row * kNumStatistics;
  const T inverse_temperature = T{1} / temperature_of<T>(f, row);
  const RowGradient gradient(g, h, statistics[1], statistics[2], inverse_temperature);
  const LogitGradient<T> of{statistics[0], inverse_temperature * static_cast<T>(kLog2E),
                            static_cast<T>(gradient.alpha), static_cast<T>(gradient.beta * kLn2)};
  const T gamma = static_cast<T>(gradient.gamma);

  const Row logits(f.logits.data, f.logits.begin(row), classes);
  const Row aligned(f.logits.data, f.logits.begin(row) + head, classes - head);
  for (int64_t first = thread.lane; first < vectors; first += kAhead * kRowThreads) {
    Vector v[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) v[u] = aligned.vector(first + u * kRowThreads);
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int64_t k = first + u * kRowThreads;
      if (k >= vectors) break;
      const int64_t at = token - head - k * kCount;  // of the token in this vector
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const T x = of(v[u][i]);
        v[u].set(i, at == i ? x - gamma : x);
      }
      store(k, v[u]);
    }
  }
  for_ends([&](int64_t index) {
    const T x = of(logits[index]);
    store_one(index, index == token ? x - gamma : x);
  });
}

}  // namespace fastrl::cuda
