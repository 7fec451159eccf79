// torch.ops.fastrl.gae, discounted_returns and their adjoint on CPU: tensors in, rows over torch's
// thread pool.
#include <array>
#include <tuple>

#include "common/tensors.h"
#include "gae/gae_kernel.h"

namespace fastrl {
namespace {

// Keeps the unit-stride copies alive for as long as the raw views are used.
struct GaeInputs {
  Tensor rewards;
  std::optional<Tensor> values, mask, dones, bootstrap, lam_rows, cu_seqlens;
  GaeArgs args;
};

std::optional<Tensor> prepared(const std::optional<Tensor>& t, const Tensor& like,
                               const char* name) {
  if (!t.has_value()) return std::nullopt;
  check_same_shape(*t, like, name);
  return unit_stride_rows(*t);
}

std::optional<Tensor> per_row(const std::optional<Tensor>& t, int64_t rows, ScalarType type,
                              const char* name) {
  if (!t.has_value()) return std::nullopt;
  STD_TORCH_CHECK(t->dim() == 1 && t->size(0) == rows && t->scalar_type() == type, "fastrl: ", name,
                  " must be [rows] in the dtype of the results");
  return t;
}

GaeInputs gather(const Tensor& rewards, const std::optional<Tensor>& values,
                 const std::optional<Tensor>& mask, const std::optional<Tensor>& dones,
                 const std::optional<Tensor>& bootstrap, const std::optional<Tensor>& lam_rows,
                 const std::optional<Tensor>& cu_seqlens, double gamma, double lam,
                 double returns_lam, int64_t holes, bool fill_carry) {
  GaeInputs in;
  in.rewards = unit_stride_rows(rewards);
  in.values = prepared(values, rewards, "values");
  in.mask = prepared(mask, rewards, "mask");
  in.dones = prepared(dones, rewards, "dones");
  in.cu_seqlens = cu_seqlens;
  GaeArgs& args = in.args;
  args.rows = rows_of(in.rewards, in.cu_seqlens);
  args.rewards = float_view(in.rewards, "rewards");
  const ScalarType type = compute_type(args.rewards.kind);
  in.bootstrap = per_row(bootstrap, args.rows.count, type, "bootstrap");
  in.lam_rows = per_row(lam_rows, args.rows.count, type, "lam");
  if (in.values) {
    args.values = float_view(*in.values, "values");
    STD_TORCH_CHECK((args.values.kind == Kind::f64) == (args.rewards.kind == Kind::f64),
                    "fastrl: rewards and values must both be float64 or neither");
  }
  if (in.mask) args.mask = mask_view(*in.mask);
  if (in.dones) args.dones = mask_view(*in.dones);
  const auto rowwise = [](const Tensor& t, const char* name) {
    return FloatView{t.const_data_ptr(), kind_of(t, name), t.stride(0)};
  };
  if (in.bootstrap) args.bootstrap = rowwise(*in.bootstrap, "bootstrap");
  if (in.lam_rows) args.lam_rows = rowwise(*in.lam_rows, "lam");
  STD_TORCH_CHECK(holes >= 0 && holes <= 2, "fastrl: holes must be 0, 1 or 2");
  args.gamma = gamma;
  args.lam = lam;
  args.returns_lam = returns_lam;
  args.two_lambdas =
      in.lam_rows.has_value() ? returns_lam >= 0 : returns_lam >= 0 && returns_lam != lam;
  args.holes = static_cast<Holes>(holes);
  args.fill_carry = fill_carry;
  args.out_stride = in.rewards.dim() == 2 ? in.rewards.size(1) : 0;
  return in;
}

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

void check_out(const Tensor& out, const Tensor& rewards, const char* name) {
  check_same_shape(out, rewards, name);
  STD_TORCH_CHECK(
      out.is_contiguous() && out.scalar_type() == compute_type(kind_of(rewards, "rewards")),
      "fastrl: ", name, " must be contiguous and in the dtype of the results");
}

// returns_lam < 0 means: the same as lam.
void gae_out_cpu(const Tensor& rewards, const Tensor& values, const std::optional<Tensor>& mask,
                 const std::optional<Tensor>& dones, const std::optional<Tensor>& bootstrap,
                 const std::optional<Tensor>& lam_rows, const std::optional<Tensor>& cu_seqlens,
                 double gamma, double lam, double returns_lam, int64_t holes, bool fill_carry,
                 const Tensor& advantages, const Tensor& returns) {
  GaeInputs in = gather(rewards, values, mask, dones, bootstrap, lam_rows, cu_seqlens, gamma, lam,
                        returns_lam, holes, fill_carry);
  check_out(advantages, rewards, "advantages");
  check_out(returns, rewards, "returns");
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
  GaeInputs in = gather(rewards, std::nullopt, mask, dones, bootstrap, std::nullopt, cu_seqlens,
                        gamma, 1.0, -1.0, holes, fill_carry);
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
  GaeInputs in = gather(grad_advantages, grad_returns, mask, dones, std::nullopt, lam_rows,
                        cu_seqlens, gamma, lam, returns_lam, holes, false);
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
