// The value loss on CPU: one pass over chunks of tokens gives the loss, its metrics and its
// gradient. Chunks and their sums are those of the policy loss.
#include "value_loss/value_loss_kernel.h"

#include <limits>

#include "common/token_block.h"
#include "value_loss/value_loss_core.h"

namespace fastrl::FASTRL_CAPABILITY {
namespace {

template <typename T>
struct Sums {
  Lanes<T> loss = T{0}, error = T{0}, error_sq = T{0}, target = T{0}, target_sq = T{0};
  Lanes<T> value = T{0};
  LaneCount<T> nonfinite, clipped;
};

template <typename T>
void run_chunk(const ValueLossArgs& args, const TokenRange chunk, ValueSums& out) {
  const TokenReader<T> value_at(args.rows, args.values, chunk);
  const TokenReader<T> old_at(args.rows, args.old_values, chunk);
  const TokenReader<T> return_at(args.rows, args.returns, chunk);
  const bool has_old = old_at.is_given();
  const T clip = has_old ? static_cast<T>(args.clip) : std::numeric_limits<T>::infinity();
  const T delta = static_cast<T>(args.delta);
  const double row_weight = args.row_weights[chunk.row];
  const Lanes<T> weight = static_cast<T>(row_weight), zero = T{0};
  const int64_t out_at = args.rows.begin(chunk.row, args.out_stride) + chunk.begin;
  void* const grad_values = args.grad_values;
  const Kind kind = args.values.kind;

  Sums<T> total;
  for_each_block<T>(args.rows, args.mask, chunk, [&](const TokenBlock<T>& block) {
    Sums<T> sums = total;
    for (int i = 0; i < block.num_vectors; ++i) {
      const Lanes<T> value = value_at(block, i), target = return_at(block, i);
      const Lanes<T> old_value = has_old ? old_at(block, i) : zero;
      const auto token = value_loss(value, old_value, target, clip, delta);
      const Lanes<T> error = value - target;
      sums.loss += token.loss;
      sums.clipped += token.is_clipped;
      sums.error += error;
      sums.error_sq += error * error;
      sums.target += target;
      sums.target_sq += target * target;
      sums.value += value;
      // Zero unless something is not finite.
      sums.nonfinite += (zero * value + (zero * target + zero * old_value)) != zero;
      if (grad_values != nullptr) {
        store_block(block, i, grad_values, kind, out_at, weight * token.d_value);
      }
    }
    total = sums;
  });
  out.loss += row_weight * lane_total(total.loss);
  out.nonfinite += total.nonfinite.total();
  out.clipped += total.clipped.total();
  out.error += lane_total(total.error);
  out.error_sq += lane_total(total.error_sq);
  out.target += lane_total(total.target);
  out.target_sq += lane_total(total.target_sq);
  out.value += lane_total(total.value);
}

}  // namespace

void value_loss_chunks(const ValueLossArgs& args, int64_t first, int64_t last, ValueSums* sums) {
  const auto run = args.values.kind == Kind::f64 ? run_chunk<double> : run_chunk<float>;
  for (int64_t i = first; i < last; ++i) run(args, args.chunks[i], *sums);
}

}  // namespace fastrl::FASTRL_CAPABILITY
