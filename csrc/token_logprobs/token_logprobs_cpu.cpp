// torch.ops.fastrl.token_logprobs and its gradient on CPU: tensors in, rows over torch's thread
// pool.
#include <array>
#include <tuple>
#include <vector>

#include "common/tensors.h"
#include "token_logprobs/token_logprobs_kernel.h"

namespace fastrl {
namespace {

// Keeps the copies that were needed alive for as long as the raw views are used.
struct Inputs {
  Tensor logits, tokens;
  std::optional<Tensor> temperatures;
  TokenLogprobsArgs args;
  int64_t rows = 0;
};

// Folds the leading dimensions into at most two strides; false when the layout needs more.
bool fold_rows(const Tensor& logits, LogitsView& view) {
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

Tensor per_row(const Tensor& t, int64_t rows, ScalarType type, const char* name) {
  STD_TORCH_CHECK(t.numel() == rows && t.scalar_type() == type, "fastrl: ", name,
                  " must have one element per row of logits, in the expected dtype");
  return dense(t);
}

Inputs gather(const Tensor& logits, const Tensor& tokens, const std::optional<Tensor>& temperatures,
              double temperature) {
  STD_TORCH_CHECK(logits.dim() > 0 && logits.size(logits.dim() - 1) > 0,
                  "fastrl: logits must be [..., V] with V >= 1");
  Inputs in;
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
  for (int64_t row = 0; row < in.rows; ++row) {
    STD_TORCH_CHECK(in.args.tokens[row] >= 0 && in.args.tokens[row] < view.classes,
                    "fastrl: tokens must be in [0, V)");
  }
  return in;
}

std::tuple<Tensor, Tensor, Tensor> token_logprobs_cpu(const Tensor& logits, const Tensor& tokens,
                                                      const std::optional<Tensor>& temperatures,
                                                      double temperature, bool entropy) {
  Inputs in = gather(logits, tokens, temperatures, temperature);
  const ScalarType type = compute_type(in.args.logits.kind);
  std::vector<int64_t> shape(tokens.sizes().begin(), tokens.sizes().end());
  Tensor logp = new_tensor(logits, shape, type);
  Tensor entropies = entropy ? new_tensor(logits, shape, type)
                             : new_tensor(logits, std::array<int64_t, 1>{0}, type);
  shape.push_back(3);
  Tensor statistics = new_tensor(logits, shape, type);
  in.args.logp = logp.mutable_data_ptr();
  if (entropy) in.args.entropy = entropies.mutable_data_ptr();
  in.args.statistics = statistics.mutable_data_ptr();
  const auto kernel = FASTRL_DISPATCH(token_logprobs_rows);
  torch::stable::parallel_for(0, in.rows, row_grain(in.rows, logits.numel()),
                              [&](int64_t first, int64_t last) { kernel(in.args, first, last); });
  return {logp, entropies, statistics};
}

// The gradient of the logits into `grad_logits`, which is dense and may be the logits themselves.
// Either upstream gradient may be missing, which means zero.
void write_gradient(const std::optional<Tensor>& grad_logp,
                    const std::optional<Tensor>& grad_entropy, const Inputs& in,
                    const Tensor& statistics, void* grad_logits, bool stream) {
  const ScalarType type = compute_type(in.args.logits.kind);
  STD_TORCH_CHECK(statistics.is_contiguous() && statistics.numel() == 3 * in.rows &&
                      statistics.scalar_type() == type,
                  "fastrl: statistics must be what token_logprobs returned");
  TokenLogprobsGradArgs args;
  args.forward = in.args;
  args.forward.statistics = statistics.mutable_data_ptr();
  std::optional<Tensor> g, h;
  if (grad_logp) g = per_row(*grad_logp, in.rows, type, "grad_logp");
  if (grad_entropy) h = per_row(*grad_entropy, in.rows, type, "grad_entropy");
  if (g) args.grad_logp = g->const_data_ptr();
  if (h) args.grad_entropy = h->const_data_ptr();
  args.grad_logits = grad_logits;
  args.stream = stream;
  const auto kernel = FASTRL_DISPATCH(token_logprobs_grad_rows);
  torch::stable::parallel_for(0, in.rows, row_grain(in.rows, in.rows * in.args.logits.classes),
                              [&](int64_t first, int64_t last) { kernel(args, first, last); });
}

Tensor token_logprobs_backward_cpu(const std::optional<Tensor>& grad_logp,
                                   const std::optional<Tensor>& grad_entropy, const Tensor& logits,
                                   const Tensor& tokens, const std::optional<Tensor>& temperatures,
                                   double temperature, const Tensor& statistics) {
  const Inputs in = gather(logits, tokens, temperatures, temperature);
  Tensor grad_logits = new_output(logits, logits.sizes(), logits.scalar_type());
  const bool stream = logits.numel() * static_cast<int64_t>(logits.element_size()) >= kStreamBytes;
  write_gradient(grad_logp, grad_entropy, in, statistics, grad_logits.mutable_data_ptr(), stream);
  return grad_logits;
}

// The same with the logits overwritten.
void token_logprobs_backward_inplace_cpu(const std::optional<Tensor>& grad_logp,
                                         const std::optional<Tensor>& grad_entropy, Tensor logits,
                                         const Tensor& tokens,
                                         const std::optional<Tensor>& temperatures,
                                         double temperature, const Tensor& statistics) {
  STD_TORCH_CHECK(logits.is_contiguous(), "fastrl: logits must be contiguous to be overwritten");
  const Inputs in = gather(logits, tokens, temperatures, temperature);
  write_gradient(grad_logp, grad_entropy, in, statistics, logits.mutable_data_ptr(), false);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) {
  m.impl("token_logprobs", TORCH_BOX(&token_logprobs_cpu));
  m.impl("token_logprobs_backward", TORCH_BOX(&token_logprobs_backward_cpu));
  m.impl("token_logprobs_backward_", TORCH_BOX(&token_logprobs_backward_inplace_cpu));
}

}  // namespace fastrl
