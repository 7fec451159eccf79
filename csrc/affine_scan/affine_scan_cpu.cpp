// torch.ops.fastrl.affine_scan and its adjoint on CPU.
#include <array>
#include <tuple>

#include "affine_scan/affine_scan_inputs.h"
#include "affine_scan/affine_scan_kernel.h"

namespace fastrl {
namespace {

Tensor new_result(const Tensor& like) {
  return new_output(like, like.sizes(), compute_type(kind_of(like, "a")));
}

Tensor affine_scan_cpu(const Tensor& a, const Tensor& b, const std::optional<Tensor>& initial,
                       const std::optional<Tensor>& cu_seqlens, bool reverse) {
  AffineScanInputs in = affine_scan_inputs(rows_of, a, b, initial, cu_seqlens, reverse);
  Tensor out = new_result(a);
  in.args.out = out.mutable_data_ptr();
  const auto kernel = FASTRL_DISPATCH(affine_scan_rows);
  const int64_t rows = in.args.rows.count;
  torch::stable::parallel_for(0, rows, row_grain(rows, a.numel()),
                              [&](int64_t first, int64_t last) { kernel(in.args, first, last); });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> affine_scan_backward_cpu(const Tensor& grad_x, const Tensor& a,
                                                            const Tensor& x,
                                                            const std::optional<Tensor>& initial,
                                                            const std::optional<Tensor>& cu_seqlens,
                                                            bool reverse) {
  AffineScanInputs in = affine_scan_inputs(rows_of, a, grad_x, initial, cu_seqlens, reverse);
  check_same_shape(x, a, "x");
  const Tensor dense_x = unit_stride_rows(x);
  in.args.x = float_view(dense_x, "x");
  Tensor grad_a = new_result(a), grad_b = new_result(a);
  Tensor grad_initial =
      torch::stable::new_empty(grad_b, std::array<int64_t, 1>{in.args.rows.count});
  in.args.out = grad_b.mutable_data_ptr();
  in.args.grad_a = grad_a.mutable_data_ptr();
  in.args.grad_initial = grad_initial.mutable_data_ptr();
  const auto kernel = FASTRL_DISPATCH(affine_scan_grad_rows);
  const int64_t rows = in.args.rows.count;
  torch::stable::parallel_for(0, rows, row_grain(rows, a.numel()),
                              [&](int64_t first, int64_t last) { kernel(in.args, first, last); });
  return {grad_a, grad_b, grad_initial};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) {
  m.impl("affine_scan", TORCH_BOX(&affine_scan_cpu));
  m.impl("affine_scan_backward", TORCH_BOX(&affine_scan_backward_cpu));
}

}  // namespace fastrl
