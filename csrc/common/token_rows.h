// Rows of tokens as the losses walk them: valid spans, fixed chunks, aggregation weights. Tensor
// side of token_rows_kernel.h.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "common/loss_inputs.h"
#include "common/token_rows_kernel.h"

namespace fastrl {

// Tokens of a chunk, counted from the first valid token of a row: padding and neighbours then
// change no rounding.
constexpr int64_t kChunkTokens = 2048;
// Chunks of a task. Partial sums are kept per task and added in order of tasks, whatever thread ran
// them.
constexpr int64_t kTaskChunks = 8;

struct TokenRows {
  Rows rows;
  std::vector<ValidSpan> spans;    // [rows]
  std::vector<TokenRange> chunks;  // all valid tokens, in order of rows
  int64_t tokens = 0;
  int64_t sequences = 0;  // rows with at least one valid token

  TokenCounts counts() const {
    return {static_cast<double>(tokens), static_cast<double>(sequences),
            static_cast<double>(rows.length)};
  }
  int64_t num_chunks() const { return static_cast<int64_t>(chunks.size()); }
  int64_t num_tasks() const { return (num_chunks() + kTaskChunks - 1) / kTaskChunks; }
};

inline TokenRows token_rows(const Rows& rows, const MaskView& mask) {
  constexpr int64_t kRangeTokens = 1 << 16;  // so that one long row keeps all threads busy
  TokenRows out;
  out.rows = rows;
  out.spans.resize(static_cast<size_t>(rows.count));
  if (mask.data == nullptr) {
    for (int64_t row = 0; row < rows.count; ++row) {
      out.spans[row] = ValidSpan{0, rows.size(row), rows.size(row)};
    }
  } else {
    std::vector<TokenRange> ranges;
    ranges.reserve(static_cast<size_t>(rows.count));
    int64_t longest = 0;
    for (int64_t row = 0; row < rows.count; ++row) {
      for (int64_t begin = 0; begin < rows.size(row); begin += kRangeTokens) {
        ranges.push_back({row, begin, std::min(kRangeTokens, rows.size(row) - begin)});
        longest = std::max(longest, ranges.back().length);
      }
    }
    std::vector<ValidSpan> found(ranges.size());
    const auto kernel = FASTRL_DISPATCH(find_valid);
    const int64_t grain = 4 * kRangeTokens / std::max<int64_t>(longest, 1);
    torch::stable::parallel_for(0, static_cast<int64_t>(ranges.size()), grain,
                                [&](int64_t first, int64_t last) {
                                  kernel(rows, mask, ranges.data(), first, last, found.data());
                                });
    for (size_t i = 0; i < ranges.size(); ++i) {
      if (found[i].count == 0) continue;
      ValidSpan& span = out.spans[ranges[i].row];
      if (span.count == 0) span.first = found[i].first;
      span.end = found[i].end;
      span.count += found[i].count;
    }
  }
  for (int64_t row = 0; row < rows.count; ++row) {
    const ValidSpan& span = out.spans[row];
    if (span.count == 0) continue;
    out.tokens += span.count;
    ++out.sequences;
    for (int64_t begin = span.first; begin < span.end; begin += kChunkTokens) {
      out.chunks.push_back({row, begin, std::min(kChunkTokens, span.end - begin)});
    }
  }
  return out;
}

// The factor of each token's loss, by row.
inline std::vector<double> row_weights(Aggregation agg, const double* denom_tensor, double denom,
                                       const TokenRows& rows) {
  // Reading the tensor on CPU waits for nothing.
  const double total = divisor(agg, denom_tensor == nullptr ? denom : *denom_tensor, rows.counts());
  std::vector<double> weights(rows.spans.size());
  for (size_t row = 0; row < weights.size(); ++row) {
    weights[row] = row_weight(agg, total, rows.spans[row].count);
  }
  return weights;
}

// Calls `call(task, first_chunk, last_chunk)` for each task, on torch's threads.
template <typename Call>
void for_each_task(const TokenRows& rows, const Call& call) {
  // A task may be a few short rows: take so many at once that they are worth a dispatch.
  const int64_t grain = row_grain(rows.num_tasks(), rows.tokens);
  torch::stable::parallel_for(0, rows.num_tasks(), grain, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t begin = task * kTaskChunks;
      call(task, begin, std::min(begin + kTaskChunks, rows.num_chunks()));
    }
  });
}

// The sums that `kernel` leaves for each task, added in order of tasks.
template <typename Sums, typename Args>
Sums sum_over_tasks(void (*kernel)(const Args&, int64_t, int64_t, Sums*), const Args& args,
                    const TokenRows& rows) {
  std::vector<Sums> sums(static_cast<size_t>(rows.num_tasks()));
  for_each_task(rows, [&](int64_t task, int64_t first, int64_t last) {
    kernel(args, first, last, &sums[task]);
  });
  Sums total;
  for (const Sums& s : sums) total.add(s);
  return total;
}

// A 0-d loss in the dtype that results have for inputs like `like`.
inline Tensor loss_tensor(const Tensor& like, double value) {
  const ScalarType type = compute_type(kind_of(like, "the first tensor"));
  Tensor out = new_tensor(like, std::array<int64_t, 0>{}, type);
  if (type == ScalarType::Double) {
    *static_cast<double*>(out.mutable_data_ptr()) = value;
  } else {
    *static_cast<float*>(out.mutable_data_ptr()) = static_cast<float>(value);
  }
  return out;
}

template <size_t N>
Tensor metrics_tensor(const Tensor& like, const std::array<double, N>& values) {
  Tensor out = new_tensor(like, std::array<int64_t, 1>{N}, ScalarType::Double);
  std::memcpy(out.mutable_data_ptr(), values.data(), sizeof(values));
  return out;
}

// Zeros where `out`, shaped like the rows, lies outside of the spans: no kernel visits that part.
inline void zero_outside(const TokenRows& rows, const Tensor& out) {
  const int64_t count = rows.rows.count;
  int64_t outside = out.numel();
  for (const ValidSpan& span : rows.spans) outside -= span.end - span.first;
  if (outside == 0) return;
  const int64_t width = out.element_size();
  const int64_t stride = out.dim() == 2 ? out.size(1) : 0;
  auto* const data = static_cast<char*>(out.mutable_data_ptr());
  torch::stable::parallel_for(
      0, count, row_grain(count, outside), [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
          const ValidSpan& span = rows.spans[row];
          char* const begin = data + rows.rows.begin(row, stride) * width;
          std::memset(begin, 0, static_cast<size_t>(span.first * width));
          std::memset(begin + span.end * width, 0,
                      static_cast<size_t>((rows.rows.size(row) - span.end) * width));
        }
      });
}

// A dense gradient shaped like `shape` in the dtype of `dtype_of`, zero where no chunk will write;
// empty when it is not wanted, which leaves `data` null.
inline Tensor gradient_tensor(bool wanted, const Tensor& shape, const Tensor& dtype_of,
                              const TokenRows& rows, void*& data) {
  const ScalarType type = dtype_of.scalar_type();
  if (!wanted) return new_tensor(dtype_of, std::array<int64_t, 1>{0}, type);
  Tensor out = new_output(dtype_of, shape.sizes(), type);
  zero_outside(rows, out);
  data = out.mutable_data_ptr();
  return out;
}

}  // namespace fastrl
