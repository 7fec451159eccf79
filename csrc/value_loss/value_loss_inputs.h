// From the tensors of a call to the arguments of the value loss, on CPU and CUDA.
#pragma once

#include "common/loss_inputs.h"
#include "value_loss/value_loss_args.h"

namespace fastrl {

// Fills the views of a call, without its gradient, and keeps the unit-stride copies behind them.
class ValueLossInputs {
 public:
  ValueLossInputs(RowsOf rows_of, const Tensor& values, const std::optional<Tensor>& old_values,
                  const Tensor& returns, const std::optional<Tensor>& mask,
                  const std::optional<Tensor>& cu_seqlens, double clip, double huber_delta,
                  ValueLossViews& views)
      : values_(values, values, "values", views.values),
        old_(old_values, values, "old_values", views.old_values),
        returns_(returns, values, "returns", views.returns),
        mask_(mask, values, views.mask) {
    views.rows = rows_of(values, cu_seqlens);
    views.clip = clip;
    views.delta = huber_delta;
    views.out_stride = dense_row_stride(values);
  }

 private:
  LossInput values_, old_, returns_;
  LossMask mask_;
};

}  // namespace fastrl
