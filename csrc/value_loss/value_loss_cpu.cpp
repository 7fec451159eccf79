// torch.ops.fastrl.value_loss on CPU: tensors in, chunks of tokens over torch's thread pool, sums
// in order.
#include <array>
#include <tuple>

#include "common/token_rows.h"
#include "value_loss/value_loss_inputs.h"
#include "value_loss/value_loss_kernel.h"

namespace fastrl {
namespace {

std::tuple<Tensor, Tensor, Tensor> value_loss_cpu(
    const Tensor& values, const std::optional<Tensor>& old_values, const Tensor& returns,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& cu_seqlens,
    const std::optional<Tensor>& denom_tensor, double denom, double clip, double huber_delta,
    int64_t agg, bool grad_values) {
  ValueLossArgs args;
  const ValueLossInputs inputs(rows_of, values, old_values, returns, mask, cu_seqlens, clip,
                               huber_delta, args);

  const TokenRows rows = token_rows(args.rows, args.mask);
  const std::vector<double> weights =
      row_weights(aggregation_of(agg), denominator(denom_tensor), denom, rows);
  args.chunks = rows.chunks.data();
  args.row_weights = weights.data();
  Tensor gradient = gradient_tensor(grad_values, values, values, rows, args.grad_values);
  const ValueSums sums = sum_over_tasks(FASTRL_DISPATCH(value_loss_chunks), args, rows);
  std::array<double, kValueMetrics> metrics;
  value_metrics(rows.counts(), sums, metrics.data());
  return {loss_tensor(values, sums.loss), metrics_tensor(values, metrics), gradient};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) { m.impl("value_loss", TORCH_BOX(&value_loss_cpu)); }

}  // namespace fastrl
