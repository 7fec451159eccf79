// From the tensors of a call to the arguments of the policy loss, on CPU and CUDA.
#pragma once

#include <array>

#include "common/loss_inputs.h"
#include "policy_loss/policy_loss_args.h"

namespace fastrl {

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

inline PolicyTerms<double> policy_terms(const std::vector<double>& numbers,
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

// Fills the views of a call, without its gradients, and keeps the unit-stride copies behind them.
class PolicyLossInputs {
 public:
  PolicyLossInputs(RowsOf rows_of, const Tensor& logp, const Tensor& old_logp,
                   const Tensor& advantages, const std::optional<Tensor>& mask,
                   const std::optional<Tensor>& is_weights, const std::optional<Tensor>& ref_logp,
                   const std::optional<Tensor>& entropy, const std::optional<Tensor>& cu_seqlens,
                   const std::vector<double>& numbers, const std::vector<int64_t>& choices,
                   PolicyLossViews& views)
      : logp_(logp, logp, "logp", views.logp),
        old_(old_logp, logp, "old_logp", views.old_logp),
        ref_(ref_logp, logp, "ref_logp", views.ref_logp),
        entropy_(entropy, logp, "entropy", views.entropy),
        mask_(mask, logp, views.mask) {
    views.terms = policy_terms(numbers, choices);
    agg = aggregation_of(choices[4]);
    views.rows = rows_of(logp, cu_seqlens);
    views.out_stride = dense_row_stride(logp);
    advantages_.emplace(advantages, logp, views.rows.count, "advantages", views.advantages);
    is_weights_.emplace(is_weights, logp, views.rows.count, "is_weights", views.is_weights);
  }

  Aggregation agg = Aggregation::token_mean;

 private:
  LossInput logp_, old_, ref_, entropy_;
  LossMask mask_;
  std::optional<TokenOrRowInput> advantages_, is_weights_;
};

}  // namespace fastrl
