// torch.ops.fastrl.policy_loss on CPU: tensors in, chunks of tokens over torch's thread pool, sums
// in order.
#include <array>
#include <tuple>

#include "common/token_rows.h"
#include "policy_loss/policy_loss_kernel.h"

namespace fastrl {
namespace {

// An input with one value per token, or per row: as [rows], or as [rows, 1] expanded over the
// tokens.
class TokenOrRowInput {
 public:
  TokenOrRowInput(const std::optional<Tensor>& t, const Tensor& logp, int64_t rows,
                  const char* name, TokenInput& input) {
    if (!t.has_value()) return;
    const bool is_shaped_like_logp = t->dim() == logp.dim() && t->size(0) == logp.size(0);
    const bool is_expanded = is_shaped_like_logp && t->dim() == 2 && t->stride(1) == 0;
    const bool is_per_row = !is_shaped_like_logp && t->dim() == 1 && t->size(0) == rows;
    if (is_expanded) check_same_shape(*t, logp, name);
    if (!is_expanded && !is_per_row) {
      per_token_.emplace(t, logp, name, input.view);
      return;
    }
    const Kind kind = kind_of(*t, name);
    STD_TORCH_CHECK((kind == Kind::f64) == (kind_of(logp, "logp") == Kind::f64), "fastrl: ", name,
                    " and logp must both be float64 or neither");
    input = {FloatView{t->const_data_ptr(), kind, t->stride(0)}, true};
  }

 private:
  std::optional<LossInput> per_token_;
};

PolicyTerms<double> terms_of(const std::vector<double>& numbers,
                             const std::vector<int64_t>& choices) {
  STD_TORCH_CHECK(numbers.size() == 9 && choices.size() == 5,
                  "fastrl: policy_loss takes 9 numbers and 5 choices");
  const std::array<int64_t, 4> num_values = {3, 3, 4, 3};
  for (size_t i = 0; i < num_values.size(); ++i) {
    STD_TORCH_CHECK(choices[i] >= 0 && choices[i] < num_values[i],
                    "fastrl: a choice of policy_loss is out of range");
  }
  PolicyTerms<double> terms;
  terms.ratio_low = 1 - numbers[0];
  terms.ratio_high = 1 + numbers[1];
  terms.dual_clip = numbers[2];
  terms.ratio_cap = numbers[3];
  terms.has_cap = std::isfinite(numbers[3]);
  terms.log_ratio_clamp = numbers[4];
  terms.kl_coef = numbers[5];
  terms.kl_input_clamp = numbers[6];
  terms.kl_clamp = numbers[7];
  terms.entropy_coef = numbers[8];
  terms.ratio = static_cast<Ratio>(choices[0]);
  terms.surrogate = static_cast<Surrogate>(choices[1]);
  terms.kl = static_cast<Kl>(choices[2]);
  terms.kl_grad = static_cast<KlGrad>(choices[3]);
  return terms;
}

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

// In the order of POLICY_METRICS.
std::array<double, 18> metrics_of(const TokenRows& rows, const PolicySums& sums) {
  const bool is_empty = rows.tokens == 0;
  return {
      static_cast<double>(rows.tokens),
      static_cast<double>(rows.sequences),
      sums.nonfinite,
      sums.clip_high,
      sums.clip_low,
      sums.clipped,
      sums.dual_clip,
      0.0 - sums.log_ratio,
      sums.kl3,
      sums.ref_kl,
      sums.entropy,
      sums.ratio,
      sums.ratio_sq,
      is_empty ? 1.0 : sums.ratio_min,
      is_empty ? 1.0 : sums.ratio_max,
      sums.policy_term,
      sums.kl_term,
      sums.entropy_term,
  };
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
  args.terms = terms_of(numbers, choices);
  args.rows = rows_of(logp, cu_seqlens);
  args.out_stride = logp.dim() == 2 ? logp.size(1) : 0;
  // Unit-stride copies, alive for as long as the raw views are used.
  const int64_t num_rows = args.rows.count;
  const LossInput kept_logp(logp, logp, "logp", args.logp);
  const LossInput kept_old(old_logp, logp, "old_logp", args.old_logp);
  const LossInput kept_ref(ref_logp, logp, "ref_logp", args.ref_logp);
  const LossInput kept_entropy(entropy, logp, "entropy", args.entropy);
  const TokenOrRowInput kept_advantages(advantages, logp, num_rows, "advantages", args.advantages);
  const TokenOrRowInput kept_weights(is_weights, logp, num_rows, "is_weights", args.is_weights);
  const LossMask kept_mask(mask, logp, args.mask);

  const TokenRows rows = token_rows(args.rows, args.mask);
  const std::vector<double> weights =
      row_weights(aggregation_of(choices[4]), given_denominator(denom_tensor, denom), rows);
  args.chunks = rows.chunks.data();
  args.row_weights = weights.data();
  Tensor gradient = gradient_tensor(grad_logp, logp, logp, rows, args.grad_logp);
  Tensor entropy_gradient =
      gradient_tensor(grad_entropy, logp, entropy.value_or(logp), rows, args.grad_entropy);
  const PolicySums sums = args.terms.ratio == Ratio::token
                              ? sum_over_tasks(FASTRL_DISPATCH(policy_loss_chunks), args, rows)
                              : run_sequences(args, rows);
  const double loss = sums.policy_term + args.terms.kl_coef * sums.kl_term -
                      args.terms.entropy_coef * sums.entropy_term;
  return {loss_tensor(logp, loss), metrics_tensor(logp, metrics_of(rows, sums)), gradient,
          entropy_gradient};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) { m.impl("policy_loss", TORCH_BOX(&policy_loss_cpu)); }

}  // namespace fastrl
