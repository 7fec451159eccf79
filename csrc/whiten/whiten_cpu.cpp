// torch.ops.fastrl.masked_moments and whiten_apply on CPU: tensors in, chunks over torch's thread
// pool.
#include <array>
#include <vector>

#include "whiten/whiten_inputs.h"
#include "whiten/whiten_kernel.h"

namespace fastrl {
namespace {

Tensor masked_moments_cpu(const Tensor& x, const std::optional<Tensor>& mask) {
  const WhitenInputs in(x, mask);
  const Moments total = moments_of(in.view, in.mask_view, in.values.numel());
  Tensor out = new_tensor(x, std::array<int64_t, 1>{3}, ScalarType::Double);
  double* const moments = static_cast<double*>(out.mutable_data_ptr());
  moments[0] = total.count;
  moments[1] = total.mean;
  moments[2] = total.m2;
  return out;
}

Tensor whiten_apply_cpu(const Tensor& x, const std::optional<Tensor>& mask, const Tensor& moments,
                        int64_t ddof, double eps, int64_t eps_mode, bool shift_mean) {
  const WhitenInputs in(x, mask);
  const double* const m = given_moments(moments);
  WhitenArgs args;
  args.x = in.view;
  args.mask = in.mask_view;
  args.mean = m[1];
  args.factor = whitening_factor(m[0], m[2], ddof, eps, eps_mode_of(eps_mode));
  args.added = shift_mean ? 0 : m[1];
  Tensor out = new_output(in.values, in.values.sizes(), compute_type(args.x.kind));
  args.out = out.mutable_data_ptr();
  const auto kernel = FASTRL_DISPATCH(whiten_elements);
  torch::stable::parallel_for(0, in.values.numel(), 16384,
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
