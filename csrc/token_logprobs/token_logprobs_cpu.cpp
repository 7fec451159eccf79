// torch.ops.fastrl.token_logprobs and its gradient on CPU: tensors in, rows over torch's thread
// pool.
#include <tuple>

#include "token_logprobs/token_logprobs_inputs.h"
#include "token_logprobs/token_logprobs_kernel.h"

namespace fastrl {
namespace {

void check_tokens(const TokenLogprobsInputs& in) {
  for (int64_t row = 0; row < in.rows; ++row) {
    STD_TORCH_CHECK(in.args.tokens[row] >= 0 && in.args.tokens[row] < in.args.logits.classes,
                    "fastrl: tokens must be in [0, V)");
  }
}

std::tuple<Tensor, Tensor, Tensor> token_logprobs_cpu(const Tensor& logits, const Tensor& tokens,
                                                      const std::optional<Tensor>& temperatures,
                                                      double temperature, bool entropy) {
  TokenLogprobsInputs in = gather_logits(logits, tokens, temperatures, temperature);
  check_tokens(in);
  auto results = new_results(in, tokens, entropy);
  const auto kernel = FASTRL_DISPATCH(token_logprobs_rows);
  torch::stable::parallel_for(0, in.rows, row_grain(in.rows, logits.numel()),
                              [&](int64_t first, int64_t last) { kernel(in.args, first, last); });
  return results;
}

void write_gradient(const std::optional<Tensor>& grad_logp,
                    const std::optional<Tensor>& grad_entropy, const Tensor& logits,
                    const Tensor& tokens, const std::optional<Tensor>& temperatures,
                    double temperature, const Tensor& statistics, Tensor& grad_logits,
                    bool in_place) {
  const TokenLogprobsInputs in = gather_logits(logits, tokens, temperatures, temperature);
  check_tokens(in);
  TokenLogprobsGradInputs grad =
      gather_upstream(in, grad_logp, grad_entropy, statistics, grad_logits, in_place);
  grad.args.stream = logits.numel() * static_cast<int64_t>(logits.element_size()) >= kStreamBytes;
  const auto kernel = FASTRL_DISPATCH(token_logprobs_grad_rows);
  torch::stable::parallel_for(0, in.rows, row_grain(in.rows, logits.numel()),
                              [&](int64_t first, int64_t last) { kernel(grad.args, first, last); });
}

Tensor token_logprobs_backward_cpu(const std::optional<Tensor>& grad_logp,
                                   const std::optional<Tensor>& grad_entropy, const Tensor& logits,
                                   const Tensor& tokens, const std::optional<Tensor>& temperatures,
                                   double temperature, const Tensor& statistics) {
  Tensor grad_logits = new_output(logits, logits.sizes(), logits.scalar_type());
  write_gradient(grad_logp, grad_entropy, logits, tokens, temperatures, temperature, statistics,
                 grad_logits, false);
  return grad_logits;
}

void token_logprobs_backward_inplace_cpu(const std::optional<Tensor>& grad_logp,
                                         const std::optional<Tensor>& grad_entropy, Tensor logits,
                                         const Tensor& tokens,
                                         const std::optional<Tensor>& temperatures,
                                         double temperature, const Tensor& statistics) {
  write_gradient(grad_logp, grad_entropy, logits, tokens, temperatures, temperature, statistics,
                 logits, true);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) {
  m.impl("token_logprobs", TORCH_BOX(&token_logprobs_cpu));
  m.impl("token_logprobs_backward", TORCH_BOX(&token_logprobs_backward_cpu));
  m.impl("token_logprobs_backward_", TORCH_BOX(&token_logprobs_backward_inplace_cpu));
}

}  // namespace fastrl
