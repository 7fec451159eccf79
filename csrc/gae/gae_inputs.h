// From the tensors of a call to the arguments of the advantage kernels, on CPU and CUDA.
#pragma once

#include "common/tensors.h"
#include "gae/gae_args.h"

namespace fastrl {

// Keeps the unit-stride copies alive for as long as the raw views are used.
struct GaeInputs {
  Tensor rewards;
  std::optional<Tensor> values, mask, dones, bootstrap, lam_rows, cu_seqlens;
  GaeArgs args;
};

inline std::optional<Tensor> prepared(const std::optional<Tensor>& t, const Tensor& like,
                                      const char* name) {
  if (!t.has_value()) return std::nullopt;
  check_same_shape(*t, like, name);
  return unit_stride_rows(*t);
}

inline std::optional<Tensor> per_row(const std::optional<Tensor>& t, int64_t rows, ScalarType type,
                                     const char* name) {
  if (!t.has_value()) return std::nullopt;
  STD_TORCH_CHECK(t->dim() == 1 && t->size(0) == rows && t->scalar_type() == type, "fastrl: ", name,
                  " must be [rows] in the dtype of the results");
  return t;
}

// rows_of gives the rows of a tensor with its offsets: the CPU checks those, a GPU cannot wait for
// them.
inline GaeInputs gae_inputs(Rows (*rows_of)(const Tensor&, const std::optional<Tensor>&),
                            const Tensor& rewards, const std::optional<Tensor>& values,
                            const std::optional<Tensor>& mask, const std::optional<Tensor>& dones,
                            const std::optional<Tensor>& bootstrap,
                            const std::optional<Tensor>& lam_rows,
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

inline void check_gae_out(const Tensor& out, const Tensor& rewards, const char* name) {
  check_same_shape(out, rewards, name);
  STD_TORCH_CHECK(
      out.is_contiguous() && out.scalar_type() == compute_type(kind_of(rewards, "rewards")),
      "fastrl: ", name, " must be contiguous and in the dtype of the results");
}

}  // namespace fastrl
