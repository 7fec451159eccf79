// From the tensors of a call to the arguments of the affine scan, on CPU and CUDA.
#pragma once

#include "affine_scan/affine_scan_args.h"
#include "common/tensors.h"

namespace fastrl {

// Keeps the unit-stride copies alive for as long as the raw views are used.
struct AffineScanInputs {
  Tensor a, b;
  AffineScanArgs args;
};

// rows_of as for gae_inputs.
inline AffineScanInputs affine_scan_inputs(
    Rows (*rows_of)(const Tensor&, const std::optional<Tensor>&), const Tensor& a, const Tensor& b,
    const std::optional<Tensor>& initial, const std::optional<Tensor>& cu_seqlens, bool reverse) {
  check_same_shape(b, a, "b");
  AffineScanInputs in{unit_stride_rows(a), unit_stride_rows(b), {}};
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

}  // namespace fastrl
