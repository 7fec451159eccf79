// torch.ops.fastrl.value_loss on CPU: tensors in, chunks of tokens over torch's thread pool, sums
// in order.
#include <tuple>

#include "common/token_rows.h"
#include "value_loss/value_loss_kernel.h"

namespace fastrl {
namespace {

std::tuple<Tensor, Tensor, Tensor> value_loss_cpu(
    const Tensor& values, const std::optional<Tensor>& old_values, const Tensor& returns,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& cu_seqlens,
    const std::optional<Tensor>& denom_tensor, double denom, double clip, double huber_delta,
    int64_t agg, bool grad_values) {
  ValueLossArgs args;
  args.rows = rows_of(values, cu_seqlens);
  args.clip = clip;
  args.delta = huber_delta;
  args.out_stride = values.dim() == 2 ? values.size(1) : 0;
  // Unit-stride copies, alive for as long as the raw views are used.
  const LossInput kept_values(values, values, "values", args.values);
  const LossInput kept_old(old_values, values, "old_values", args.old_values);
  const LossInput kept_returns(returns, values, "returns", args.returns);
  const LossMask kept_mask(mask, values, args.mask);

  const TokenRows rows = token_rows(args.rows, args.mask);
  const std::vector<double> weights =
      row_weights(aggregation_of(agg), given_denominator(denom_tensor, denom), rows);
  args.chunks = rows.chunks.data();
  args.row_weights = weights.data();
  Tensor gradient = gradient_tensor(grad_values, values, values, rows, args.grad_values);
  const ValueSums sums = sum_over_tasks(FASTRL_DISPATCH(value_loss_chunks), args, rows);
  // In the order of VALUE_METRICS.
  const std::array<double, 9> metrics = {
      static_cast<double>(rows.tokens),
      static_cast<double>(rows.sequences),
      sums.nonfinite,
      sums.clipped,
      sums.error,
      sums.error_sq,
      sums.target,
      sums.target_sq,
      sums.value,
  };
  return {loss_tensor(values, sums.loss), metrics_tensor(values, metrics), gradient};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) { m.impl("value_loss", TORCH_BOX(&value_loss_cpu)); }

}  // namespace fastrl
