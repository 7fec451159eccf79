// torch.ops.fastrl.token_logprobs and its gradient on CUDA.
//
// Nothing looks at tokens before the kernels do: a token outside of [0, V) makes the results of its
// row NaN.
#include <tuple>

#include "common/launch.h"
#include "token_logprobs/token_logprobs.cuh"
#include "token_logprobs/token_logprobs_inputs.h"

namespace fastrl::cuda {
namespace {

// Calls run(kind, threads of a row) with both as constants.
template <typename Run>
void with_constants(const LogitsView& logits, const Run& run) {
  const auto with_kind = [&](auto kind) {
    if (logits.classes <= kWarpClasses) {
      run(kind, std::integral_constant<int, kWarp>{});
    } else {
      run(kind, std::integral_constant<int, kLogitThreads>{});
    }
  };
  switch (logits.kind) {
    case Kind::f32:
      return with_kind(std::integral_constant<Kind, Kind::f32>{});
    case Kind::bf16:
      return with_kind(std::integral_constant<Kind, Kind::bf16>{});
    case Kind::f16:
      return with_kind(std::integral_constant<Kind, Kind::f16>{});
    case Kind::f64:
      return with_kind(std::integral_constant<Kind, Kind::f64>{});
  }
}

int64_t blocks_of(int64_t rows, int row_threads) {
  const int64_t per_block = kLogitThreads / row_threads;
  return (rows + per_block - 1) / per_block;
}

std::tuple<Tensor, Tensor, Tensor> token_logprobs_cuda(const Tensor& logits, const Tensor& tokens,
                                                       const std::optional<Tensor>& temperatures,
                                                       double temperature, bool entropy) {
  TokenLogprobsInputs in = gather_logits(logits, tokens, temperatures, temperature);
  auto results = new_results(in, tokens, entropy);
  Launcher launch(logits);
  with_constants(in.args.logits, [&](auto kind, auto row_threads) {
    const auto kernel = entropy ? token_logprobs_rows<kind(), true, row_threads()>
                                : token_logprobs_rows<kind(), false, row_threads()>;
    launch(kernel, blocks_of(in.rows, row_threads()), kLogitThreads, in.args, in.rows);
  });
  return results;
}

void write_gradient(const std::optional<Tensor>& grad_logp,
                    const std::optional<Tensor>& grad_entropy, const Tensor& logits,
                    const Tensor& tokens, const std::optional<Tensor>& temperatures,
                    double temperature, const Tensor& statistics, Tensor& grad_logits,
                    bool in_place) {
  const TokenLogprobsInputs in = gather_logits(logits, tokens, temperatures, temperature);
  const TokenLogprobsGradInputs grad =
      gather_upstream(in, grad_logp, grad_entropy, statistics, grad_logits, in_place);
  Launcher launch(logits);
  with_constants(in.args.logits, [&](auto kind, auto row_threads) {
    launch(token_logprobs_grad_rows<kind(), row_threads()>, blocks_of(in.rows, row_threads()),
           kLogitThreads, grad.args, in.rows);
  });
}

Tensor token_logprobs_backward_cuda(const std::optional<Tensor>& grad_logp,
                                    const std::optional<Tensor>& grad_entropy, const Tensor& logits,
                                    const Tensor& tokens, const std::optional<Tensor>& temperatures,
                                    double temperature, const Tensor& statistics) {
  Tensor grad_logits = new_tensor(logits, logits.sizes(), logits.scalar_type());
  write_gradient(grad_logp, grad_entropy, logits, tokens, temperatures, temperature, statistics,
                 grad_logits, false);
  return grad_logits;
}

void token_logprobs_backward_inplace_cuda(const std::optional<Tensor>& grad_logp,
                                          const std::optional<Tensor>& grad_entropy, Tensor logits,
                                          const Tensor& tokens,
                                          const std::optional<Tensor>& temperatures,
                                          double temperature, const Tensor& statistics) {
  write_gradient(grad_logp, grad_entropy, logits, tokens, temperatures, temperature, statistics,
                 logits, true);
}

}  // namespace

FASTRL_CUDA_LIBRARY_IMPL(m) {
  m.impl("token_logprobs", TORCH_BOX(&token_logprobs_cuda));
  m.impl("token_logprobs_backward", TORCH_BOX(&token_logprobs_backward_cuda));
  m.impl("token_logprobs_backward_", TORCH_BOX(&token_logprobs_backward_inplace_cuda));
}

}  // namespace fastrl::cuda
