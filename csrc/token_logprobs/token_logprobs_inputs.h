// The tensors of token log-probabilities as raw views, on CPU and CUDA.
#pragma once

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "common/tensors.h"
#include "token_logprobs/token_logprobs_args.h"

namespace fastrl {

// Keeps the copies that were needed alive for as long as the raw views are used.
struct TokenLogprobsInputs {
  Tensor logits, tokens;
  std::optional<Tensor> temperatures;
  TokenLogprobsArgs args;
  int64_t rows = 0;
};

// Folds the leading dimensions into at most two strides; false when the layout needs more.
inline bool fold_rows(const Tensor& logits, LogitsView& view) {
  const int64_t last = logits.dim() - 1;
  if (logits.stride(last) != 1 && logits.size(last) > 1) return false;
  std::vector<std::array<int64_t, 2>> folded;  // size and stride, outermost first
  for (int64_t d = 0; d < last; ++d) {
    const int64_t size = logits.size(d), stride = logits.stride(d);
    if (size == 1) continue;
    if (!folded.empty() && folded.back()[1] == size * stride) {
      folded.back() = {folded.back()[0] * size, stride};
    } else {
      folded.push_back({size, stride});
    }
  }
  if (folded.size() > 2) return false;
  if (!folded.empty()) {
    view.inner_rows = folded.back()[0];
    view.inner_stride = folded.back()[1];
  }
  if (folded.size() == 2) view.outer_stride = folded.front()[1];
  return true;
}

inline Tensor per_row(const Tensor& t, int64_t rows, ScalarType type, const char* name) {
  STD_TORCH_CHECK(t.numel() == rows && t.scalar_type() == type, "fastrl: ", name,
                  " must have one element per row of logits, in the expected dtype");
  return dense(t);
}

inline TokenLogprobsInputs gather_logits(const Tensor& logits, const Tensor& tokens,
                                         const std::optional<Tensor>& temperatures,
                                         double temperature) {
  STD_TORCH_CHECK(logits.dim() > 0 && logits.size(logits.dim() - 1) > 0,
                  "fastrl: logits must be [..., V] with V >= 1");
  TokenLogprobsInputs in;
  LogitsView& view = in.args.logits;
  view.classes = logits.size(logits.dim() - 1);
  view.kind = kind_of(logits, "logits");
  in.rows = logits.numel() / view.classes;
  in.logits = logits;
  if (in.rows > 0 && !fold_rows(logits, view)) {
    in.logits = dense(logits);
    fold_rows(in.logits, view);
  }
  view.data = in.logits.const_data_ptr();
  in.tokens = per_row(tokens, in.rows, ScalarType::Long, "tokens");
  in.args.tokens = static_cast<const int64_t*>(in.tokens.const_data_ptr());
  if (temperatures.has_value()) {
    in.temperatures = per_row(*temperatures, in.rows, compute_type(view.kind), "temperatures");
    in.args.temperatures = in.temperatures->const_data_ptr();
  }
  in.args.temperature = temperature;
  return in;
}

// The results of the forward, allocated and entered into `in.args`. Without entropy the second one
// is empty.
inline std::tuple<Tensor, Tensor, Tensor> new_results(TokenLogprobsInputs& in, const Tensor& tokens,
                                                      bool entropy) {
  const ScalarType type = compute_type(in.args.logits.kind);
  std::vector<int64_t> shape(tokens.sizes().begin(), tokens.sizes().end());
  Tensor logp = new_tensor(in.logits, shape, type);
  Tensor entropies = entropy ? new_tensor(in.logits, shape, type)
                             : new_tensor(in.logits, std::array<int64_t, 1>{0}, type);
  shape.push_back(kNumStatistics);
  Tensor statistics = new_tensor(in.logits, shape, type);
  in.args.logp = logp.mutable_data_ptr();
  if (entropy) in.args.entropy = entropies.mutable_data_ptr();
  in.args.statistics = statistics.mutable_data_ptr();
  return {logp, entropies, statistics};
}

// What the gradient needs beside the inputs of the forward. Either upstream gradient may be
// missing, which means zero.
struct TokenLogprobsGradInputs {
  std::optional<Tensor> grad_logp, grad_entropy;
  TokenLogprobsGradArgs args;
};

// `grad_logits` is dense, or the logits themselves.
inline TokenLogprobsGradInputs gather_upstream(const TokenLogprobsInputs& in,
                                               const std::optional<Tensor>& grad_logp,
                                               const std::optional<Tensor>& grad_entropy,
                                               const Tensor& statistics, Tensor& grad_logits,
                                               bool in_place) {
  const ScalarType type = compute_type(in.args.logits.kind);
  STD_TORCH_CHECK(statistics.is_contiguous() && statistics.numel() == kNumStatistics * in.rows &&
                      statistics.scalar_type() == type,
                  "fastrl: statistics must be what token_logprobs returned");
  STD_TORCH_CHECK(!in_place || in.logits.data_ptr() == grad_logits.data_ptr(),
                  "fastrl: in place, logits must have unit stride along V and rows at up to two "
                  "strides");
  TokenLogprobsGradInputs grad;
  grad.args.forward = in.args;
  grad.args.forward.statistics = statistics.mutable_data_ptr();
  if (grad_logp) grad.grad_logp = per_row(*grad_logp, in.rows, type, "grad_logp");
  if (grad_entropy) grad.grad_entropy = per_row(*grad_entropy, in.rows, type, "grad_entropy");
  if (grad.grad_logp) grad.args.grad_logp = grad.grad_logp->const_data_ptr();
  if (grad.grad_entropy) grad.args.grad_entropy = grad.grad_entropy->const_data_ptr();
  grad.args.grad_logits = grad_logits.mutable_data_ptr();
  grad.args.in_place = in_place;
  return grad;
}

}  // namespace fastrl
