// From the tensors of a call to the views of whitening, on CPU and CUDA.
#pragma once

#include "common/tensors.h"
#include "whiten/whiten_args.h"

namespace fastrl {

// x and its mask as one dense row each, with the copies behind the raw views.
class WhitenInputs {
 public:
  WhitenInputs(const Tensor& x, const std::optional<Tensor>& mask) : values(dense(x)) {
    view = float_view(values, "x");
    if (!mask.has_value()) return;
    check_same_shape(*mask, x, "mask");
    kept_mask_ = dense(*mask);
    mask_view = fastrl::mask_view(*kept_mask_);
  }

  Tensor values;
  FloatView view;
  MaskView mask_view;  // null data: every element is valid

 private:
  std::optional<Tensor> kept_mask_;
};

// count, mean and m2, as masked_moments returns them.
inline const double* given_moments(const Tensor& moments) {
  STD_TORCH_CHECK(moments.numel() == 3 && moments.is_contiguous() &&
                      moments.scalar_type() == ScalarType::Double,
                  "fastrl: moments must be contiguous float64 [3]: count, mean, m2");
  return static_cast<const double*>(moments.const_data_ptr());
}

inline EpsMode eps_mode_of(int64_t value) {
  STD_TORCH_CHECK(value >= 0 && value <= 2, "fastrl: eps_mode must be 0, 1 or 2");
  return static_cast<EpsMode>(value);
}

}  // namespace fastrl
