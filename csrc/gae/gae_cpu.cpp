// torch.ops.fastrl.gae, discounted_returns and their adjoint on CPU: tensors in, rows over torch's
// thread pool.
#include <array>
#include <tuple>

#include "gae/gae_inputs.h"
#include "gae/gae_kernel.h"

namespace fastrl {
namespace {

Tensor new_like(const Tensor& rewards) {
  return new_output(rewards, rewards.sizes(), compute_type(kind_of(rewards, "rewards")));
}

void run(GaeInputs& in) {
  const int64_t outputs = in.args.returns == nullptr ? 1 : 2;
  in.args.stream = outputs * in.rewards.numel() * int64_t{sizeof(float)} >= kStreamBytes;
  const auto kernel = FASTRL_DISPATCH(gae_rows);
  const Rows& rows = in.args.rows;
  torch::stable::parallel_for(0, rows.count, row_grain(rows.count, in.rewards.numel()),
                              [&](int64_t first, int64_t last) { kernel(in.args, first, last); });
}

// returns_lam < 0 means: the same as lam.
void gae_out_cpu(const Tensor& rewards, const Tensor& values, const std::optional<Tensor>& mask,
                 const std::optional<Tensor>& dones, const std::optional<Tensor>& bootstrap,
                 const std::optional<Tensor>& lam_rows, const std::optional<Tensor>& cu_seqlens,
                 double gamma, double lam, double returns_lam, int64_t holes, bool fill_carry,
                 const Tensor& advantages, const Tensor& returns) {
  GaeInputs in = gae_inputs(rows_of, rewards, values, mask, dones, bootstrap, lam_rows, cu_seqlens,
                            gamma, lam, returns_lam, holes, fill_carry);
  check_gae_out(advantages, rewards, "advantages");
  check_gae_out(returns, rewards, "returns");
  in.args.advantages = advantages.mutable_data_ptr();
  in.args.returns = returns.mutable_data_ptr();
  run(in);
}

std::tuple<Tensor, Tensor> gae_cpu(const Tensor& rewards, const Tensor& values,
                                   const std::optional<Tensor>& mask,
                                   const std::optional<Tensor>& dones,
                                   const std::optional<Tensor>& bootstrap,
                                   const std::optional<Tensor>& lam_rows,
                                   const std::optional<Tensor>& cu_seqlens, double gamma,
                                   double lam, double returns_lam, int64_t holes, bool fill_carry) {
  Tensor advantages = new_like(rewards), returns = new_like(rewards);
  gae_out_cpu(rewards, values, mask, dones, bootstrap, lam_rows, cu_seqlens, gamma, lam,
              returns_lam, holes, fill_carry, advantages, returns);
  return {advantages, returns};
}

Tensor discounted_returns_cpu(const Tensor& rewards, const std::optional<Tensor>& mask,
                              const std::optional<Tensor>& dones,
                              const std::optional<Tensor>& bootstrap,
                              const std::optional<Tensor>& cu_seqlens, double gamma, int64_t holes,
                              bool fill_carry) {
  Tensor out = new_like(rewards);
  GaeInputs in = gae_inputs(rows_of, rewards, std::nullopt, mask, dones, bootstrap, std::nullopt,
                            cu_seqlens, gamma, 1.0, -1.0, holes, fill_carry);
  in.args.advantages = out.mutable_data_ptr();
  run(in);
  return out;
}

// Gradients in the dtype of the results. `shape` is any tensor with the shape of the rewards: their
// values are not needed. grad_values is empty for discounted returns, grad_bootstrap has one
// element per row.
std::tuple<Tensor, Tensor, Tensor> gae_backward_cpu(
    const Tensor& grad_advantages, const std::optional<Tensor>& grad_returns,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& dones,
    const std::optional<Tensor>& lam_rows, const std::optional<Tensor>& cu_seqlens, double gamma,
    double lam, double returns_lam, int64_t holes) {
  const bool has_values = grad_returns.has_value();
  GaeInputs in = gae_inputs(rows_of, grad_advantages, grad_returns, mask, dones, std::nullopt,
                            lam_rows, cu_seqlens, gamma, lam, returns_lam, holes, false);
  GaeGradArgs args;
  args.forward = in.args;
  args.grad_advantages = in.args.rewards;
  args.grad_returns = in.args.values;
  Tensor grad_rewards = new_like(grad_advantages);
  Tensor grad_values = has_values
                           ? new_like(grad_advantages)
                           : torch::stable::new_empty(grad_rewards, std::array<int64_t, 1>{0});
  Tensor grad_bootstrap =
      torch::stable::new_empty(grad_rewards, std::array<int64_t, 1>{in.args.rows.count});
  args.grad_rewards = grad_rewards.mutable_data_ptr();
  if (has_values) args.grad_values = grad_values.mutable_data_ptr();
  args.grad_bootstrap = grad_bootstrap.mutable_data_ptr();
  const auto kernel = FASTRL_DISPATCH(gae_grad_rows);
  const Rows& rows = in.args.rows;
  torch::stable::parallel_for(0, rows.count, row_grain(rows.count, grad_advantages.numel()),
                              [&](int64_t first, int64_t last) { kernel(args, first, last); });
  return {grad_rewards, grad_values, grad_bootstrap};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) {
  m.impl("gae", TORCH_BOX(&gae_cpu));
  m.impl("gae_out", TORCH_BOX(&gae_out_cpu));
  m.impl("discounted_returns", TORCH_BOX(&discounted_returns_cpu));
  m.impl("gae_backward", TORCH_BOX(&gae_backward_cpu));
}

}  // namespace fastrl
