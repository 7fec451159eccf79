// torch.ops.fastrl.masked_moments and whiten_apply on CPU: tensors in, chunks over torch's thread
// pool.
#include <array>
#include <cmath>
#include <vector>

#include "common/tensors.h"
#include "whiten/whiten_kernel.h"

namespace fastrl {
namespace {

enum class EpsMode : int64_t { rsqrt_add, rsqrt_max, std_add };

std::optional<Tensor> dense_mask(const std::optional<Tensor>& mask, const Tensor& x) {
  if (!mask.has_value()) return std::nullopt;
  check_same_shape(*mask, x, "mask");
  return dense(*mask);
}

Tensor masked_moments_cpu(const Tensor& x, const std::optional<Tensor>& mask) {
  const Tensor values = dense(x);
  const std::optional<Tensor> valid = dense_mask(mask, x);
  const MaskView valid_view = valid ? mask_view(*valid) : MaskView{};
  const Moments total = moments_of(float_view(values, "x"), valid_view, values.numel());
  Tensor out = new_tensor(x, std::array<int64_t, 1>{3}, ScalarType::Double);
  double* const moments = static_cast<double*>(out.mutable_data_ptr());
  moments[0] = total.count;
  moments[1] = total.mean;
  moments[2] = total.m2;
  return out;
}

// Without a variance (count <= ddof), or with none to speak of, there is nothing to divide by.
double whitening_factor(double count, double m2, int64_t ddof, double eps, EpsMode mode) {
  const double degrees = count - static_cast<double>(ddof);
  if (degrees <= 0 || m2 == 0) return 1;
  const double variance = m2 / degrees;
  switch (mode) {
    case EpsMode::rsqrt_add:
      return 1 / std::sqrt(variance + eps);
    case EpsMode::rsqrt_max:
      return 1 / std::sqrt(variance < eps ? eps : variance);
    default:
      return 1 / (std::sqrt(variance) + eps);
  }
}

Tensor whiten_apply_cpu(const Tensor& x, const std::optional<Tensor>& mask, const Tensor& moments,
                        int64_t ddof, double eps, int64_t eps_mode, bool shift_mean) {
  STD_TORCH_CHECK(moments.numel() == 3 && moments.is_contiguous() &&
                      moments.scalar_type() == ScalarType::Double,
                  "fastrl: moments must be contiguous float64 [3]: count, mean, m2");
  STD_TORCH_CHECK(eps_mode >= 0 && eps_mode <= 2, "fastrl: eps_mode must be 0, 1 or 2");
  const Tensor values = dense(x);
  const std::optional<Tensor> valid = dense_mask(mask, x);
  const auto* const m = static_cast<const double*>(moments.const_data_ptr());
  WhitenArgs args;
  args.x = float_view(values, "x");
  if (valid) args.mask = mask_view(*valid);
  args.mean = m[1];
  args.factor = whitening_factor(m[0], m[2], ddof, eps, static_cast<EpsMode>(eps_mode));
  args.added = shift_mean ? 0 : m[1];
  Tensor out = new_output(values, values.sizes(), compute_type(args.x.kind));
  args.out = out.mutable_data_ptr();
  const auto kernel = FASTRL_DISPATCH(whiten_elements);
  torch::stable::parallel_for(0, values.numel(), 16384,
                              [&](int64_t first, int64_t last) { kernel(args, first, last); });
  return out;
}

}  // namespace

Moments moments_of(const FloatView& x, const MaskView& mask, int64_t count) {
  MomentsArgs args{x, mask, count, 0};
  args.origin = FASTRL_DISPATCH(first_valid)(args);
  std::vector<Moments> chunks(static_cast<size_t>(num_chunks(count)));
  const auto kernel = FASTRL_DISPATCH(moments_of_chunks);
  torch::stable::parallel_for(
      0, static_cast<int64_t>(chunks.size()), 4,
      [&](int64_t first, int64_t last) { kernel(args, first, last, chunks.data()); });
  Moments total;
  for (const Moments& chunk : chunks) total = merged(total, chunk);
  total.mean += args.origin;
  return total;
}

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) {
  m.impl("masked_moments", TORCH_BOX(&masked_moments_cpu));
  m.impl("whiten_apply", TORCH_BOX(&whiten_apply_cpu));
}

}  // namespace fastrl
