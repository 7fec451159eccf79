// torch.ops.fastrl.masked_moments and whiten_apply on CUDA.
#include <array>

#include "common/launch.h"
#include "whiten/whiten.cuh"
#include "whiten/whiten_inputs.h"

namespace fastrl::cuda {
namespace {

Tensor masked_moments_cuda(const Tensor& x, const std::optional<Tensor>& mask) {
  const WhitenInputs in(x, mask);
  const int64_t count = in.values.numel(), chunks = num_chunks(count);
  constexpr int64_t kNumbers = sizeof(ChunkMoments) / sizeof(double);
  Tensor of_chunks = new_tensor(x, std::array<int64_t, 1>{chunks * kNumbers}, ScalarType::Double);
  Tensor out = new_tensor(x, std::array<int64_t, 1>{3}, ScalarType::Double);
  auto* const moments = static_cast<ChunkMoments*>(of_chunks.mutable_data_ptr());
  Launcher launch(x);
  const bool is_double = in.view.kind == Kind::f64;
  launch(is_double ? moments_of_chunks<double> : moments_of_chunks<float>, chunks, kWhitenThreads,
         in.view, in.mask_view, count, moments);
  launch(merge_chunks, 1, kWhitenThreads, moments, chunks,
         static_cast<double*>(out.mutable_data_ptr()));
  return out;
}

Tensor whiten_apply_cuda(const Tensor& x, const std::optional<Tensor>& mask, const Tensor& moments,
                         int64_t ddof, double eps, int64_t eps_mode, bool shift_mean) {
  const WhitenInputs in(x, mask);
  Tensor out = new_tensor(in.values, in.values.sizes(), compute_type(in.view.kind));
  WhitenCall call;
  call.x = in.view;
  call.mask = in.mask_view;
  call.count = in.values.numel();
  call.moments = given_moments(moments);
  call.ddof = ddof;
  call.eps = eps;
  call.mode = eps_mode_of(eps_mode);
  call.shift_mean = shift_mean;
  call.out = out.mutable_data_ptr();
  constexpr int64_t kBlockItems = kWhitenThreads * kItems;
  Launcher launch(x);
  const bool is_double = in.view.kind == Kind::f64;
  launch(is_double ? whiten_elements<double> : whiten_elements<float>,
         (call.count + kBlockItems - 1) / kBlockItems, kWhitenThreads, call);
  return out;
}

}  // namespace

FASTRL_CUDA_LIBRARY_IMPL(m) {
  m.impl("masked_moments", TORCH_BOX(&masked_moments_cuda));
  m.impl("whiten_apply", TORCH_BOX(&whiten_apply_cuda));
}

}  // namespace fastrl::cuda
