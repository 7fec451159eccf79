// The tensors that the losses share, from torch to raw views, on CPU and CUDA.
#pragma once

#include "common/aggregation.h"
#include "common/tensors.h"

namespace fastrl {

// Gives the rows of a tensor with its offsets: the CPU checks those, a GPU cannot wait for them.
using RowsOf = Rows (*)(const Tensor&, const std::optional<Tensor>&);

// An input of a loss shaped like its first tensor, with the unit-stride copy behind the raw view.
class LossInput {
 public:
  LossInput(const std::optional<Tensor>& t, const Tensor& first, const char* name,
            FloatView& view) {
    if (!t.has_value()) return;
    check_same_shape(*t, first, name);
    STD_TORCH_CHECK((kind_of(*t, name) == Kind::f64) == (kind_of(first, name) == Kind::f64),
                    "fastrl: ", name, " and the first tensor must both be float64 or neither");
    kept_ = unit_stride_rows(*t);
    view = float_view(*kept_, name);
  }

 private:
  std::optional<Tensor> kept_;
};

class LossMask {
 public:
  LossMask(const std::optional<Tensor>& t, const Tensor& first, MaskView& view) {
    if (!t.has_value()) return;
    check_same_shape(*t, first, "mask");
    kept_ = unit_stride_rows(*t);
    view = mask_view(*kept_);
  }

 private:
  std::optional<Tensor> kept_;
};

inline Aggregation aggregation_of(int64_t value) {
  STD_TORCH_CHECK(value >= 0 && value <= static_cast<int64_t>(Aggregation::seq_mean_token_sum_norm),
                  "fastrl: there is no such aggregation");
  return static_cast<Aggregation>(value);
}

// The divisor that the caller gives as a tensor, null if not.
inline const double* denominator(const std::optional<Tensor>& denom_tensor) {
  if (!denom_tensor.has_value()) return nullptr;
  STD_TORCH_CHECK(denom_tensor->numel() == 1 && denom_tensor->scalar_type() == ScalarType::Double,
                  "fastrl: denom must have one float64 element");
  return static_cast<const double*>(denom_tensor->const_data_ptr());
}

// Stride between the rows of a dense result shaped like `t`.
inline int64_t dense_row_stride(const Tensor& t) { return t.dim() == 2 ? t.size(1) : 0; }

}  // namespace fastrl
