// The per-token half of group advantages on CPU: sums of token rewards, and the advantage of a
// sample at each of its tokens. This is where the bytes are; both loops run at the speed of memory.
#include "group_advantages/group_advantages_kernel.h"

#include "common/wide.h"

namespace fastrl::FASTRL_CAPABILITY {
namespace {

FASTRL_INLINE int step_of(int64_t left, int lanes) {
  return static_cast<int>(left < lanes ? left : lanes);
}

FASTRL_INLINE uint32_t bits_at(const MaskView& mask, int64_t index, int n) {
  return mask.data == nullptr ? first_bits(n) : mask_bits(mask, index, n);
}

// Index of the first valid token, `length` when there is none.
template <typename T>
int64_t first_valid(const MaskView& mask, int64_t begin, int64_t length) {
  if (mask.data == nullptr) return 0;
  int64_t t = 0;
  for (; t + kLanes<T> <= length; t += kLanes<T>) {
    const uint32_t bits = mask_bits(mask, begin + t, kLanes<T>);
    if (bits != 0) return t + __builtin_ctz(bits);
  }
  while (t < length && !mask_at(mask, begin + t)) ++t;
  return t;
}

// Lanes are counted from the first valid token, so that a row has the same sum whatever its
// padding.
template <typename T>
double row_sum(const TokenRows& rows, int64_t row) {
  const FloatView& rewards = rows.rewards;
  const int64_t reward_at = row * rewards.row_stride, mask_at = row * rows.mask.row_stride;
  Wide<T> sums = {};
  const auto add = [&](Vec<T> x, uint32_t bits) {
    const Wide<T> kept = keep<T>(widen<T>(x), bits);
    for (int p = 0; p < Wide<T>::kParts; ++p) sums.part[p] += kept.part[p];
  };
  int64_t t = first_valid<T>(rows.mask, mask_at, rows.length);
  for (; t + kLanes<T> <= rows.length; t += kLanes<T>) {
    const uint32_t bits = bits_at(rows.mask, mask_at + t, kLanes<T>);
    if (bits != 0) add(load_as<T>(rewards.data, rewards.kind, reward_at + t), bits);
  }
  if (t < rows.length) {
    const int n = static_cast<int>(rows.length - t);
    add(load_first_as<T>(rewards.data, rewards.kind, reward_at + t, n),
        bits_at(rows.mask, mask_at + t, n));
  }
  return lane_sum<T>(sums);
}

template <typename T>
void spread(const TokenRows& rows, int64_t first, int64_t last, const double* values, T* out) {
  for (int64_t row = first; row < last; ++row) {
    const Vec<T> value = broadcast<T>(static_cast<T>(values[row]));
    const int64_t mask_at = row * rows.mask.row_stride;
    T* const out_row = out + row * rows.length;
    int64_t t = 0;
    for (; t + kLanes<T> <= rows.length; t += kLanes<T>) {
      store(out_row + t, keep<T>(value, mask_bits(rows.mask, mask_at + t, kLanes<T>)));
    }
    if (t < rows.length) {
      const int n = static_cast<int>(rows.length - t);
      store_first(out_row + t, keep<T>(value, mask_bits(rows.mask, mask_at + t, n)), n);
    }
  }
}

}  // namespace

void sum_tokens(const TokenRows& rows, int64_t first, int64_t last, double* scores) {
  const bool is_double = rows.rewards.kind == Kind::f64;
  for (int64_t row = first; row < last; ++row) {
    scores[row] = is_double ? row_sum<double>(rows, row) : row_sum<float>(rows, row);
  }
}

void count_tokens(const TokenRows& rows, int64_t first, int64_t last, double* lengths) {
  for (int64_t row = first; row < last; ++row) {
    const int64_t mask_at = row * rows.mask.row_stride;
    int64_t count = 0;
    for (int64_t t = 0; t < rows.length; t += 16) {
      count += count_bits(mask_bits(rows.mask, mask_at + t, step_of(rows.length - t, 16)));
    }
    lengths[row] = static_cast<double>(count);
  }
}

void read_scores(const TokenRows& rows, int64_t num_rows, double* scores) {
  const FloatView& rewards = rows.rewards;
  if (rewards.kind == Kind::f64) {
    const auto* const data = static_cast<const double*>(rewards.data);
    for (int64_t k = 0; k < rows.length; ++k) {
      for (int64_t row = 0; row < num_rows; ++row) {
        scores[k * num_rows + row] = data[row * rewards.row_stride + k];
      }
    }
    return;
  }
  if (rows.length == 1 && rewards.row_stride == 1) {
    int64_t at = 0;
    for (; at + 16 <= num_rows; at += 16) {
      const Wide<float> wide = widen<float>(load_as<float>(rewards.data, rewards.kind, at));
      std::memcpy(scores + at, &wide, sizeof(wide));
    }
    for (; at < num_rows; ++at) {
      scores[at] = load_first_as<float>(rewards.data, rewards.kind, at, 1)[0];
    }
    return;
  }
  for (int64_t k = 0; k < rows.length; ++k) {
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t at = row * rewards.row_stride + k;
      scores[k * num_rows + row] = load_first_as<float>(rewards.data, rewards.kind, at, 1)[0];
    }
  }
}

void spread_rows(const TokenRows& rows, int64_t first, int64_t last, const double* values,
                 bool to_double, void* out) {
  if (to_double) {
    spread(rows, first, last, values, static_cast<double*>(out));
  } else {
    spread(rows, first, last, values, static_cast<float*>(out));
  }
}

}  // namespace fastrl::FASTRL_CAPABILITY
