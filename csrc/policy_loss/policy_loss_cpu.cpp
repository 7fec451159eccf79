// torch.ops.fastrl.policy_loss on CPU: tensors in, chunks of tokens over torch's thread pool, sums
// in order.
#include <array>
#include <tuple>

#include "common/token_rows.h"
#include "policy_loss/policy_loss_inputs.h"
#include "policy_loss/policy_loss_kernel.h"

namespace fastrl {
namespace {

// Sequence ratios: the mean log-ratio of each row, the sums with it, then the gradient with what
// the sums say.
PolicySums run_sequences(PolicyLossArgs& args, const TokenRows& rows) {
  std::vector<RowRatio> ratios(rows.spans.size());
  std::vector<double> chunk_sums(rows.chunks.size());
  args.row_ratios = ratios.data();
  args.chunk_sums = chunk_sums.data();
  // Adds the sums of chunks, in order, as means over the valid tokens of their rows.
  const auto add_means = [&](double RowRatio::* field) {
    for (size_t i = 0; i < chunk_sums.size(); ++i) {
      const int64_t row = rows.chunks[i].row;
      ratios[row].*field += chunk_sums[i] / static_cast<double>(rows.spans[row].count);
    }
  };

  const auto log_ratio_kernel = FASTRL_DISPATCH(log_ratio_sums);
  for_each_task(rows,
                [&](int64_t, int64_t first, int64_t last) { log_ratio_kernel(args, first, last); });
  add_means(&RowRatio::log_ratio);
  if (args.terms.ratio == Ratio::sequence_token) {
    return sum_over_tasks(FASTRL_DISPATCH(policy_loss_chunks), args, rows);
  }
  const PolicySums total = sum_over_tasks(FASTRL_DISPATCH(sequence_sum_chunks), args, rows);
  if (args.grad_logp == nullptr && args.grad_entropy == nullptr) return total;
  add_means(&RowRatio::gradient);
  const auto gradient_kernel = FASTRL_DISPATCH(sequence_grad_chunks);
  for_each_task(rows,
                [&](int64_t, int64_t first, int64_t last) { gradient_kernel(args, first, last); });
  return total;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> policy_loss_cpu(
    const Tensor& logp, const Tensor& old_logp, const Tensor& advantages,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& is_weights,
    const std::optional<Tensor>& ref_logp, const std::optional<Tensor>& entropy,
    const std::optional<Tensor>& cu_seqlens, const std::optional<Tensor>& denom_tensor,
    double denom, const std::vector<double>& numbers, const std::vector<int64_t>& choices,
    bool grad_logp, bool grad_entropy) {
  STD_TORCH_CHECK(!grad_entropy || entropy.has_value(), "fastrl: no entropy to differentiate");
  PolicyLossArgs args;
  const PolicyLossInputs inputs(rows_of, logp, old_logp, advantages, mask, is_weights, ref_logp,
                                entropy, cu_seqlens, numbers, choices, args);

  const TokenRows rows = token_rows(args.rows, args.mask);
  const std::vector<double> weights =
      row_weights(inputs.agg, denominator(denom_tensor), denom, rows);
  args.chunks = rows.chunks.data();
  args.row_weights = weights.data();
  Tensor gradient = gradient_tensor(grad_logp, logp, logp, rows, args.grad_logp);
  Tensor entropy_gradient =
      gradient_tensor(grad_entropy, logp, entropy.value_or(logp), rows, args.grad_entropy);
  const PolicySums sums = args.terms.ratio == Ratio::token
                              ? sum_over_tasks(FASTRL_DISPATCH(policy_loss_chunks), args, rows)
                              : run_sequences(args, rows);
  std::array<double, kPolicyMetrics> metrics;
  policy_metrics(rows.counts(), sums, metrics.data());
  return {loss_tensor(logp, policy_loss_of(args.terms, sums)), metrics_tensor(logp, metrics),
          gradient, entropy_gradient};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) { m.impl("policy_loss", TORCH_BOX(&policy_loss_cpu)); }

}  // namespace fastrl
