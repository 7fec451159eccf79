// Launches that every loss makes around its own kernels, with their workspaces. For *_cuda.cu
// files.
#pragma once

#include <array>
#include <vector>

#include "common/launch.h"
#include "common/loss_inputs.h"
#include "common/loss_sums.cuh"

namespace fastrl::cuda {

inline int64_t blocks_of(int64_t items, int64_t per_block) {
  return (items + per_block - 1) / per_block;
}

// One call on the device and stream of a tensor. Memory it hands out lives as long as it does,
// which is long enough: torch reuses memory in the order of the stream.
class LossLaunch {
 public:
  // Finds out which tokens are valid.
  LossLaunch(const Tensor& like, const Rows& rows, const MaskView& mask, Aggregation agg,
             double denom, const std::optional<Tensor>& denom_tensor)
      : like_(like), launch_(like) {
    loss.rows = rows;
    loss.agg = agg;
    loss.denom = denom;
    loss.denom_tensor = denominator(denom_tensor);
    const bool has_mask = mask.data != nullptr;
    if (!has_mask && !rows.packed()) return;
    const int64_t pieces = MaskPieces::count(rows), words = 2 + 3 * rows.count;
    ValidRows& valid = loss.valid;
    valid.counts = memory<unsigned long long>(words);
    valid.spans = reinterpret_cast<RowSpan*>(valid.counts + 2);
    if (has_mask) valid.bits = memory<uint8_t>(pieces * (MaskPieces::kTokens / 8));
    launch_(clear_words, blocks_of(words, kLossThreads), kLossThreads, valid.counts, words);
    launch_(find_valid, blocks_of(pieces, kLossWarps), kLossThreads, rows, mask, pieces, valid);
  }

  template <typename T>
  T* memory(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    kept_.push_back(
        new_tensor(like_, std::array<int64_t, 1>{blocks_of(bytes, 8)}, ScalarType::Double));
    return static_cast<T*>(kept_.back().mutable_data_ptr());
  }

  int64_t num_chunks() const { return LossChunks::count(loss.rows); }

  // A warp per chunk.
  template <typename Call>
  void over_chunks(void (*kernel)(Call, int64_t), const Call& call) {
    launch_(kernel, blocks_of(num_chunks(), kLossWarps), kLossThreads, call, num_chunks());
  }

  // From the sums of chunks to the results. There are results even without a row.
  template <typename Call>
  void fold(const Call& call) {
    using Sums = typename Call::Sums;
    const int64_t blocks = std::max<int64_t>(blocks_of(loss.rows.count, kFoldRows), 1);
    Sums* const of_blocks = blocks > 1 ? memory<Sums>(blocks) : nullptr;
    launch_(fold_rows<Call>, blocks, kFoldThreads, call, of_blocks);
    if (blocks > 1) launch_(fold_blocks<Call>, 1, kFoldThreads, call, of_blocks, blocks);
  }

  LossRows loss;

 private:
  const Tensor& like_;
  Launcher launch_;
  std::vector<Tensor> kept_;
};

// The loss of a call, its metrics and gradients, to be written by kernels.
template <int kMetrics>
struct LossResults {
  Tensor loss, metrics;

  explicit LossResults(const Tensor& like)
      : loss(new_tensor(like, std::array<int64_t, 0>{},
                        compute_type(kind_of(like, "the first tensor")))),
        metrics(new_tensor(like, std::array<int64_t, 1>{kMetrics}, ScalarType::Double)) {}
};

// A dense gradient shaped like `shape` in the dtype of `dtype_of`; empty when it is not wanted,
// which leaves `data` null.
inline Tensor new_gradient(bool wanted, const Tensor& shape, const Tensor& dtype_of, void*& data) {
  const ScalarType type = dtype_of.scalar_type();
  if (!wanted) return new_tensor(dtype_of, std::array<int64_t, 1>{0}, type);
  Tensor out = new_tensor(dtype_of, shape.sizes(), type);
  data = out.mutable_data_ptr();
  return out;
}

}  // namespace fastrl::cuda
