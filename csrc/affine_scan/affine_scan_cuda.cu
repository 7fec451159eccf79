// torch.ops.fastrl.affine_scan and its adjoint on CUDA.
#include <array>
#include <tuple>

#include "affine_scan/affine_scan.cuh"
#include "affine_scan/affine_scan_inputs.h"
#include "common/scan_launch.h"

namespace fastrl::cuda {
namespace {

Tensor new_result(const Tensor& like) {
  return new_tensor(like, like.sizes(), compute_type(kind_of(like, "a")));
}

Tensor affine_scan_cuda(const Tensor& a, const Tensor& b, const std::optional<Tensor>& initial,
                        const std::optional<Tensor>& cu_seqlens, bool reverse) {
  AffineScanInputs in = affine_scan_inputs(unchecked_rows_of, a, b, initial, cu_seqlens, reverse);
  Tensor out = new_result(a);
  in.args.out = out.mutable_data_ptr();
  if (in.args.a.kind == Kind::f64) {
    launch_scan<AffineScanProblem<double>, false>(in.args, in.args.rows, a);
  } else {
    launch_scan<AffineScanProblem<float>, true>(in.args, in.args.rows, a);
  }
  return out;
}

std::tuple<Tensor, Tensor, Tensor> affine_scan_backward_cuda(
    const Tensor& grad_x, const Tensor& a, const Tensor& x, const std::optional<Tensor>& initial,
    const std::optional<Tensor>& cu_seqlens, bool reverse) {
  AffineScanInputs in =
      affine_scan_inputs(unchecked_rows_of, a, grad_x, initial, cu_seqlens, reverse);
  check_same_shape(x, a, "x");
  const Tensor dense_x = unit_stride_rows(x);
  in.args.x = float_view(dense_x, "x");
  Tensor grad_a = new_result(a), grad_b = new_result(a);
  Tensor grad_initial =
      new_tensor(grad_b, std::array<int64_t, 1>{in.args.rows.count}, compute_type(in.args.a.kind));
  in.args.out = grad_b.mutable_data_ptr();
  in.args.grad_a = grad_a.mutable_data_ptr();
  in.args.grad_initial = grad_initial.mutable_data_ptr();
  if (in.args.a.kind == Kind::f64) {
    launch_scan<AffineScanGradProblem<double>, false>(in.args, in.args.rows, a);
  } else {
    launch_scan<AffineScanGradProblem<float>, false>(in.args, in.args.rows, a);
  }
  return {grad_a, grad_b, grad_initial};
}

}  // namespace

FASTRL_CUDA_LIBRARY_IMPL(m) {
  m.impl("affine_scan", TORCH_BOX(&affine_scan_cuda));
  m.impl("affine_scan_backward", TORCH_BOX(&affine_scan_backward_cuda));
}

}  // namespace fastrl::cuda
