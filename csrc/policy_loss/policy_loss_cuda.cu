// torch.ops.fastrl.policy_loss on CUDA.
#include <tuple>

#include "common/loss_launch.h"
#include "policy_loss/policy_loss.cuh"
#include "policy_loss/policy_loss_inputs.h"

namespace fastrl::cuda {
namespace {

template <typename T>
void run(LossLaunch& launch, const PolicyLossViews& views, LossResults<kPolicyMetrics>& out) {
  PolicyLossCall<T> call;
  call.views = views;
  call.terms = terms_in<T>(views.terms);
  call.loss = launch.loss;
  call.chunks = launch.memory<PolicyChunkSums<T>>(launch.num_chunks());
  call.loss_out = static_cast<T*>(out.loss.mutable_data_ptr());
  call.metrics_out = static_cast<double*>(out.metrics.mutable_data_ptr());
  const Ratio ratio = views.terms.ratio;
  if (ratio != Ratio::token) {
    call.log_ratios = launch.memory<T>(launch.num_chunks());
    launch.over_chunks(log_ratio_chunks<T>, call);
  }
  if (ratio == Ratio::sequence) {
    call.gradients = launch.memory<T>(launch.num_chunks());
    launch.over_chunks(policy_loss_chunks<T, Pass::sequence_sums>, call);
    if (views.grad_logp != nullptr || views.grad_entropy != nullptr) {
      launch.over_chunks(policy_loss_chunks<T, Pass::sequence_grads>, call);
    }
  } else {
    launch.over_chunks(policy_loss_chunks<T, Pass::all>, call);
  }
  launch.fold(call);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> policy_loss_cuda(
    const Tensor& logp, const Tensor& old_logp, const Tensor& advantages,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& is_weights,
    const std::optional<Tensor>& ref_logp, const std::optional<Tensor>& entropy,
    const std::optional<Tensor>& cu_seqlens, const std::optional<Tensor>& denom_tensor,
    double denom, const std::vector<double>& numbers, const std::vector<int64_t>& choices,
    bool grad_logp, bool grad_entropy) {
  STD_TORCH_CHECK(!grad_entropy || entropy.has_value(), "fastrl: no entropy to differentiate");
  PolicyLossViews views;
  const PolicyLossInputs inputs(unchecked_rows_of, logp, old_logp, advantages, mask, is_weights,
                                ref_logp, entropy, cu_seqlens, numbers, choices, views);
  LossLaunch launch(logp, views.rows, views.mask, inputs.agg, denom, denom_tensor);
  LossResults<kPolicyMetrics> out(logp);
  Tensor gradient = new_gradient(grad_logp, logp, logp, views.grad_logp);
  Tensor entropy_gradient =
      new_gradient(grad_entropy, logp, entropy.value_or(logp), views.grad_entropy);
  const auto run_in = views.logp.kind == Kind::f64 ? run<double> : run<float>;
  run_in(launch, views, out);
  return {out.loss, out.metrics, gradient, entropy_gradient};
}

}  // namespace

FASTRL_CUDA_LIBRARY_IMPL(m) { m.impl("policy_loss", TORCH_BOX(&policy_loss_cuda)); }

}  // namespace fastrl::cuda
