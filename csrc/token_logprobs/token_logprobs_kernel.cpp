// Log-probabilities of chosen tokens and entropies of their rows on CPU, one read of the logits.
//
// A row is taken a tile at a time: while the exponentials of one tile, which is in the nearest
// cache, are summed relative to the largest logit so far, the next tile is read from memory for its
// largest, so memory and arithmetic overlap. The running sums are rescaled when the largest grows.
// Within a tile sums are single precision in independent accumulators; tiles are added in double.
#include "token_logprobs/token_logprobs_kernel.h"

#include "common/math.h"
#include "common/vec.h"
#include "token_logprobs/token_logprobs_core.h"

namespace fastrl::FASTRL_CAPABILITY {
namespace {

constexpr int kNumStatistics = 3;
constexpr int64_t kTile = 4096;  // elements; two tiles fit the first-level cache
constexpr int kUnroll = 4;       // vectors of 64 bytes per step
template <typename T>
constexpr int64_t kStep = kUnroll * kLanes<T>;

template <typename T>
constexpr T kLowest = sizeof(T) == 4 ? T{-88} : T{-750};  // e^x is 0 there

// e^x for x <= 0, and x itself made finite, so that 0 * x is 0 where a logit is -inf. NaN passes.
FASTRL_INLINE f32n exp_of(f32n& x) {
  x = native_max(f32n{} + kLowest<float>, x);
  return native_exp_nonpositive(x);
}
FASTRL_INLINE f64n exp_of(f64n& x) {
  x = native_max(f64n{} + kLowest<double>, x);
  return native_exp(x);
}

template <typename T>
constexpr int kNativeLanes = kNativeBytes / sizeof(T);

// Four accumulators to one number, always in the same order.
template <typename T>
FASTRL_INLINE T total(const Native<T>* accumulators) {
  const Native<T> sum = (accumulators[0] + accumulators[1]) + (accumulators[2] + accumulators[3]);
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_reduce_add_ps((__m512)sum);
#endif
  T lanes[kNativeLanes<T>];
  std::memcpy(lanes, &sum, sizeof(sum));
  for (int width = kNativeLanes<T> / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// The largest element seen by kUnroll accumulators; NaN is passed over.
template <typename T>
struct Largest {
  Native<T> seen[kUnroll];

  Largest() {
    for (Native<T>& s : seen) s = Native<T>{} - static_cast<T>(INFINITY);
  }
  FASTRL_INLINE void add(Native<T> v, int a) { seen[a] = native_max(v, seen[a]); }
  FASTRL_INLINE T value() const {
    const Native<T> found = native_max(native_max(seen[0], seen[1]), native_max(seen[2], seen[3]));
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) return _mm512_reduce_max_ps((__m512)found);
#endif
    T lanes[kNativeLanes<T>];
    std::memcpy(lanes, &found, sizeof(found));
    T result = lanes[0];
    for (int i = 1; i < kNativeLanes<T>; ++i) result = result < lanes[i] ? lanes[i] : result;
    return result;
  }
};

// Calls body(part, accumulator) for the native parts of the vector that starts at element `index`.
template <typename T, typename Body>
FASTRL_INLINE void for_parts(Vec<T> v, int u, Body&& body) {
  Native<T> parts[kNativeParts];
  std::memcpy(parts, &v, sizeof(v));
  for (int i = 0; i < kNativeParts; ++i) body(parts[i], (u * kNativeParts + i) % kUnroll);
}

template <typename T, Kind kKind, typename Body>
FASTRL_INLINE void for_step(const void* data, int64_t index, Body&& body) {
#pragma GCC unroll 4
  for (int u = 0; u < kUnroll; ++u) {
    for_parts<T>(load_as<T>(data, kKind, index + u * kLanes<T>), u, body);
  }
}

// The same for n elements, any number; lanes past the end hold -inf.
template <typename T, Kind kKind, typename Body>
FASTRL_INLINE void for_elements(const void* data, int64_t index, int64_t n, Body&& body) {
  int64_t at = 0;
  for (; at + kStep<T> <= n; at += kStep<T>) for_step<T, kKind>(data, index + at, body);
  for (; at < n; at += kLanes<T>) {
    const int rest = static_cast<int>(n - at < kLanes<T> ? n - at : kLanes<T>);
    const Vec<T> v = load_first_as<T>(data, kKind, index + at, rest);
    T lanes[kLanes<T>];
    std::memcpy(lanes, &v, sizeof(v));
    for (int i = rest; i < kLanes<T>; ++i) lanes[i] = -INFINITY;
    for_parts<T>(load(lanes), 0, body);
  }
}

template <typename T>
struct Tile {
  T exps, weighted;  // sums of e^x and of x e^x
  T next_largest;
};

// Sums over the n elements from `index`, relative to `reference`, and the largest of the num_next
// elements behind them.
template <typename T, Kind kKind, bool kEntropy>
Tile<T> tile_sums(const void* data, int64_t index, int64_t n, int64_t num_next, T reference,
                  T inverse_temperature) {
  Native<T> exps[kUnroll] = {}, weighted[kUnroll] = {};
  Largest<T> largest;
  const auto sum = [&](Native<T> logits, int a) {
    Native<T> x = (logits - reference) * inverse_temperature;
    const Native<T> e = exp_of(x);
    exps[a] += e;
    if constexpr (kEntropy) weighted[a] += e * x;
  };
  const auto look = [&](Native<T> logits, int a) { largest.add(logits, a); };
  int64_t at = 0;  // num_next <= n, because only the last tile is shorter
  for (; at + kStep<T> <= num_next; at += kStep<T>) {
    for_step<T, kKind>(data, index + n + at, look);
    for_step<T, kKind>(data, index + at, sum);
  }
  for_elements<T, kKind>(data, index + n + at, num_next - at, look);
  for_elements<T, kKind>(data, index + at, n - at, sum);
  return {total<T>(exps), kEntropy ? total<T>(weighted) : T{0}, largest.value()};
}

template <typename T>
T temperature_of(const TokenLogprobsArgs& args, int64_t row) {
  return args.temperatures == nullptr ? static_cast<T>(args.temperature)
                                      : static_cast<const T*>(args.temperatures)[row];
}

template <typename T, Kind kKind, bool kEntropy>
void logprobs_row(const TokenLogprobsArgs& args, int64_t row) {
  const LogitsView& logits = args.logits;
  const int64_t begin = logits.begin(row);
  const T inverse_temperature = T{1} / temperature_of<T>(args, row);
  const auto tile_size = [&](int64_t at) {
    return logits.classes - at < kTile ? logits.classes - at : kTile;
  };
  Largest<T> first;
  for_elements<T, kKind>(logits.data, begin, tile_size(0),
                         [&](Native<T> v, int a) { first.add(v, a); });
  RowSums sums;
  T largest = first.value();
  for (int64_t at = 0; at < logits.classes; at += kTile) {
    const int64_t n = tile_size(at);
    if (largest > sums.largest) sums.raise(largest, inverse_temperature);
    // With nothing but -inf so far any reference serves; NaN, which no maximum shows, must reach
    // the sums.
    const T reference = sums.largest > -INFINITY ? static_cast<T>(sums.largest) : T{0};
    const Tile<T> tile = tile_sums<T, kKind, kEntropy>(
        logits.data, begin + at, n, tile_size(at + n), reference, inverse_temperature);
    sums.exps += tile.exps;
    sums.weighted += tile.weighted;
    largest = tile.next_largest;
  }

  const T logit = load_first_as<T>(logits.data, kKind, begin + args.tokens[row], 1)[0];
  static_cast<T*>(args.logp)[row] = static_cast<T>(sums.log_prob(logit, inverse_temperature));
  T* const statistics = static_cast<T*>(args.statistics) + row * kNumStatistics;
  statistics[0] = static_cast<T>(sums.largest);
  statistics[1] = static_cast<T>(sums.exps);
  statistics[2] = kEntropy ? static_cast<T>(sums.mean()) : T{0};
  if constexpr (kEntropy) static_cast<T*>(args.entropy)[row] = static_cast<T>(sums.entropy());
}

template <Kind kKind>
constexpr int kBytesOf = kKind == Kind::f64   ? 8
                         : kKind == Kind::f32 ? 4
                                              : 2;

// A whole vector in `kKind` to where it need not pass through the caches; `p` is aligned to its
// size.
template <typename T, Kind kKind>
FASTRL_INLINE void stream(void* p, Vec<T> v) {
  char bytes[kLanes<T> * kBytesOf<kKind>];
  store_first_as<T>(bytes, kKind, 0, v, kLanes<T>);
  stream_bytes<sizeof(bytes)>(p, bytes);
}

template <typename T, Kind kKind>
void logprobs_grad_row(const TokenLogprobsGradArgs& args, int64_t row) {
  constexpr int kBytes = kBytesOf<kKind>;
  const TokenLogprobsArgs& f = args.forward;
  const int64_t classes = f.logits.classes, begin = f.logits.begin(row);
  char* const out = static_cast<char*>(args.grad_logits) + row * classes * kBytes;
  const auto upstream = [&](const void* grads) {
    return grads == nullptr ? T{0} : static_cast<const T*>(grads)[row];
  };
  const T g = upstream(args.grad_logp), h = upstream(args.grad_entropy);
  if (g == 0 && h == 0) {
    std::memset(out, 0, static_cast<size_t>(classes * kBytes));
    return;
  }
  const T* const statistics = static_cast<const T*>(f.statistics) + row * kNumStatistics;
  const T reference = statistics[0];
  const T inverse_temperature = T{1} / temperature_of<T>(f, row);
  const RowGradient gradient(g, h, statistics[1], statistics[2], inverse_temperature);
  const T alpha = static_cast<T>(gradient.alpha), beta = static_cast<T>(gradient.beta);
  const auto gradient_of = [&](Vec<T> logits) {
    Native<T> parts[kNativeParts];
    std::memcpy(parts, &logits, sizeof(logits));
    for (Native<T>& part : parts) {
      Native<T> x = (part - reference) * inverse_temperature;
      const Native<T> e = exp_of(x);
      part = e * (alpha + beta * x);
    }
    std::memcpy(&logits, parts, sizeof(logits));
    return logits;
  };
  // Looked at before anything is written: the gradient may take the place of the logits.
  const int64_t token = f.tokens[row];
  Vec<T> chosen = gradient_of(load_first_as<T>(f.logits.data, kKind, begin + token, 1));
  chosen -= static_cast<T>(gradient.gamma);
  const auto some = [&](int64_t at, int n) {
    const Vec<T> logits = load_first_as<T>(f.logits.data, kKind, begin + at, n);
    store_first_as<T>(out, kKind, at, gradient_of(logits), n);
  };

  int64_t at = 0;
  if (args.stream) {
    constexpr int kVectorBytes = kLanes<T> * kBytes;
    const auto misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(out) % kVectorBytes);
    const int head = misaligned == 0 ? 0 : (kVectorBytes - misaligned) / kBytes;
    if (head <= classes) {
      some(0, head);
      for (at = head; at + kLanes<T> <= classes; at += kLanes<T>) {
        const Vec<T> logits = load_as<T>(f.logits.data, kKind, begin + at);
        stream<T, kKind>(out + at * kBytes, gradient_of(logits));
      }
      end_of_stream();
    }
  }
  for (; at + kLanes<T> <= classes; at += kLanes<T>) {
    const Vec<T> logits = load_as<T>(f.logits.data, kKind, begin + at);
    store_first_as<T>(out, kKind, at, gradient_of(logits), kLanes<T>);
  }
  some(at, static_cast<int>(classes - at));
  store_first_as<T>(out, kKind, token, chosen, 1);
}

template <typename T, Kind kKind>
void logprobs_range(const TokenLogprobsArgs& args, int64_t first_row, int64_t last_row) {
  const auto kernel =
      args.entropy == nullptr ? logprobs_row<T, kKind, false> : logprobs_row<T, kKind, true>;
  for (int64_t row = first_row; row < last_row; ++row) kernel(args, row);
}

template <typename T, Kind kKind>
void logprobs_grad_range(const TokenLogprobsGradArgs& args, int64_t first_row, int64_t last_row) {
  for (int64_t row = first_row; row < last_row; ++row) logprobs_grad_row<T, kKind>(args, row);
}

}  // namespace

void token_logprobs_rows(const TokenLogprobsArgs& args, int64_t first_row, int64_t last_row) {
  switch (args.logits.kind) {
    case Kind::f32:
      return logprobs_range<float, Kind::f32>(args, first_row, last_row);
    case Kind::bf16:
      return logprobs_range<float, Kind::bf16>(args, first_row, last_row);
    case Kind::f16:
      return logprobs_range<float, Kind::f16>(args, first_row, last_row);
    case Kind::f64:
      return logprobs_range<double, Kind::f64>(args, first_row, last_row);
  }
}

void token_logprobs_grad_rows(const TokenLogprobsGradArgs& args, int64_t first_row,
                              int64_t last_row) {
  switch (args.forward.logits.kind) {
    case Kind::f32:
      return logprobs_grad_range<float, Kind::f32>(args, first_row, last_row);
    case Kind::bf16:
      return logprobs_grad_range<float, Kind::bf16>(args, first_row, last_row);
    case Kind::f16:
      return logprobs_grad_range<float, Kind::f16>(args, first_row, last_row);
    case Kind::f64:
      return logprobs_grad_range<double, Kind::f64>(args, first_row, last_row);
  }
}

}  // namespace fastrl::FASTRL_CAPABILITY
