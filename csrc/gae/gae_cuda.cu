// torch.ops.fastrl.gae, discounted_returns and their adjoint on CUDA.
#include <array>
#include <tuple>

#include "common/scan_launch.h"
#include "gae/gae.cuh"
#include "gae/gae_inputs.h"

namespace fastrl::cuda {
namespace {

Tensor new_like(const Tensor& rewards) {
  return new_tensor(rewards, rewards.sizes(), compute_type(kind_of(rewards, "rewards")));
}

template <typename T, bool kByRows>
void launch_gae(const GaeInputs& in) {
  const GaeArgs& args = in.args;
  if (args.returns == nullptr) {
    launch_scan<GaeProblem<T, false, false>, kByRows>(args, args.rows, in.rewards);
  } else if (args.two_lambdas) {
    launch_scan<GaeProblem<T, true, true>, kByRows>(args, args.rows, in.rewards);
  } else {
    launch_scan<GaeProblem<T, true, false>, kByRows>(args, args.rows, in.rewards);
  }
}

void run(const GaeInputs& in) {
  if (in.args.rewards.kind == Kind::f64) {
    launch_gae<double, false>(in);
  } else {
    launch_gae<float, true>(in);
  }
}

// returns_lam < 0 means: the same as lam.
void gae_out_cuda(const Tensor& rewards, const Tensor& values, const std::optional<Tensor>& mask,
                  const std::optional<Tensor>& dones, const std::optional<Tensor>& bootstrap,
                  const std::optional<Tensor>& lam_rows, const std::optional<Tensor>& cu_seqlens,
                  double gamma, double lam, double returns_lam, int64_t holes, bool fill_carry,
                  const Tensor& advantages, const Tensor& returns) {
  GaeInputs in = gae_inputs(unchecked_rows_of, rewards, values, mask, dones, bootstrap, lam_rows,
                            cu_seqlens, gamma, lam, returns_lam, holes, fill_carry);
  check_gae_out(advantages, rewards, "advantages");
  check_gae_out(returns, rewards, "returns");
  in.args.advantages = advantages.mutable_data_ptr();
  in.args.returns = returns.mutable_data_ptr();
  run(in);
}

std::tuple<Tensor, Tensor> gae_cuda(
    const Tensor& rewards, const Tensor& values, const std::optional<Tensor>& mask,
    const std::optional<Tensor>& dones, const std::optional<Tensor>& bootstrap,
    const std::optional<Tensor>& lam_rows, const std::optional<Tensor>& cu_seqlens, double gamma,
    double lam, double returns_lam, int64_t holes, bool fill_carry) {
  Tensor advantages = new_like(rewards), returns = new_like(rewards);
  gae_out_cuda(rewards, values, mask, dones, bootstrap, lam_rows, cu_seqlens, gamma, lam,
               returns_lam, holes, fill_carry, advantages, returns);
  return {advantages, returns};
}

Tensor discounted_returns_cuda(const Tensor& rewards, const std::optional<Tensor>& mask,
                               const std::optional<Tensor>& dones,
                               const std::optional<Tensor>& bootstrap,
                               const std::optional<Tensor>& cu_seqlens, double gamma, int64_t holes,
                               bool fill_carry) {
  Tensor out = new_like(rewards);
  GaeInputs in = gae_inputs(unchecked_rows_of, rewards, std::nullopt, mask, dones, bootstrap,
                            std::nullopt, cu_seqlens, gamma, 1.0, -1.0, holes, fill_carry);
  in.args.advantages = out.mutable_data_ptr();
  run(in);
  return out;
}

template <typename T>
void launch_grad(const GaeGradArgs& args, const Tensor& like) {
  const Rows& rows = args.forward.rows;
  if (args.forward.two_lambdas) {
    launch_scan<GaeGradProblem<T, true>, false>(args, rows, like);
  } else {
    launch_scan<GaeGradProblem<T, false>, false>(args, rows, like);
  }
}

// As gae_backward_cpu.
std::tuple<Tensor, Tensor, Tensor> gae_backward_cuda(
    const Tensor& grad_advantages, const std::optional<Tensor>& grad_returns,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& dones,
    const std::optional<Tensor>& lam_rows, const std::optional<Tensor>& cu_seqlens, double gamma,
    double lam, double returns_lam, int64_t holes) {
  GaeInputs in =
      gae_inputs(unchecked_rows_of, grad_advantages, grad_returns, mask, dones, std::nullopt,
                 lam_rows, cu_seqlens, gamma, lam, returns_lam, holes, false);
  GaeGradArgs args;
  args.forward = in.args;
  args.grad_advantages = in.args.rewards;
  args.grad_returns = in.args.values;
  const ScalarType type = compute_type(in.args.rewards.kind);
  Tensor grad_rewards = new_like(grad_advantages);
  Tensor grad_values = grad_returns.has_value()
                           ? new_like(grad_advantages)
                           : new_tensor(grad_rewards, std::array<int64_t, 1>{0}, type);
  Tensor grad_bootstrap =
      new_tensor(grad_rewards, std::array<int64_t, 1>{in.args.rows.count}, type);
  args.grad_rewards = grad_rewards.mutable_data_ptr();
  if (grad_returns.has_value()) args.grad_values = grad_values.mutable_data_ptr();
  args.grad_bootstrap = grad_bootstrap.mutable_data_ptr();
  if (type == ScalarType::Double) {
    launch_grad<double>(args, in.rewards);
  } else {
    launch_grad<float>(args, in.rewards);
  }
  return {grad_rewards, grad_values, grad_bootstrap};
}

}  // namespace

FASTRL_CUDA_LIBRARY_IMPL(m) {
  m.impl("gae", TORCH_BOX(&gae_cuda));
  m.impl("gae_out", TORCH_BOX(&gae_out_cuda));
  m.impl("discounted_returns", TORCH_BOX(&discounted_returns_cuda));
  m.impl("gae_backward", TORCH_BOX(&gae_backward_cuda));
}

}  // namespace fastrl::cuda
