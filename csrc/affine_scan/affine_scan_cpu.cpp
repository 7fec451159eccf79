// torch.ops.fastrl.affine_scan and its adjoint on CPU.
#include <array>
#include <tuple>

#include "affine_scan/affine_scan_kernel.h"
#include "common/tensors.h"

namespace fastrl {
namespace {

struct Inputs {
  Tensor a, b;
  AffineScanArgs args;
};

Inputs gather(const Tensor& a, const Tensor& b, const std::optional<Tensor>& initial,
              const std::optional<Tensor>& cu_seqlens, bool reverse) {
  check_same_shape(b, a, "b");
  Inputs in{unit_stride_rows(a), unit_stride_rows(b), {}};
  in.args.rows = rows_of(in.a, cu_seqlens);
  in.args.a = float_view(in.a, "a");
  in.args.b = float_view(in.b, "b");
  STD_TORCH_CHECK((in.args.a.kind == Kind::f64) == (in.args.b.kind == Kind::f64),
                  "fastrl: a and b must both be float64 or neither");
  if (initial.has_value()) {
    STD_TORCH_CHECK(initial->dim() == 1 && initial->size(0) == in.args.rows.count &&
                        initial->scalar_type() == compute_type(in.args.a.kind),
                    "fastrl: initial must be [rows] in the dtype of the results");
    in.args.initial =
        FloatView{initial->const_data_ptr(), kind_of(*initial, "initial"), initial->stride(0)};
  }
  in.args.reverse = reverse;
  in.args.out_stride = in.a.dim() == 2 ? in.a.size(1) : 0;
  return in;
}

Tensor new_result(const Tensor& like) {
  return new_output(like, like.sizes(), compute_type(kind_of(like, "a")));
}

Tensor affine_scan_cpu(const Tensor& a, const Tensor& b, const std::optional<Tensor>& initial,
                       const std::optional<Tensor>& cu_seqlens, bool reverse) {
  Inputs in = gather(a, b, initial, cu_seqlens, reverse);
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
  Inputs in = gather(a, grad_x, initial, cu_seqlens, reverse);
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
