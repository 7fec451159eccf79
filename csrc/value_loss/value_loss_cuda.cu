// torch.ops.fastrl.value_loss on CUDA.
#include <tuple>

#include "common/loss_launch.h"
#include "value_loss/value_loss.cuh"
#include "value_loss/value_loss_inputs.h"

namespace fastrl::cuda {
namespace {

template <typename T>
void run(LossLaunch& launch, const ValueLossViews& views, LossResults<kValueMetrics>& out) {
  ValueLossCall<T> call;
  call.views = views;
  call.loss = launch.loss;
  call.chunks = launch.memory<ValueChunkSums<T>>(launch.num_chunks());
  call.loss_out = static_cast<T*>(out.loss.mutable_data_ptr());
  call.metrics_out = static_cast<double*>(out.metrics.mutable_data_ptr());
  launch.over_chunks(value_loss_chunks<T>, call);
  launch.fold(call);
}

std::tuple<Tensor, Tensor, Tensor> value_loss_cuda(
    const Tensor& values, const std::optional<Tensor>& old_values, const Tensor& returns,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& cu_seqlens,
    const std::optional<Tensor>& denom_tensor, double denom, double clip, double huber_delta,
    int64_t agg, bool grad_values) {
  ValueLossViews views;
  const ValueLossInputs inputs(unchecked_rows_of, values, old_values, returns, mask, cu_seqlens,
                               clip, huber_delta, views);
  LossLaunch launch(values, views.rows, views.mask, aggregation_of(agg), denom, denom_tensor);
  LossResults<kValueMetrics> out(values);
  Tensor gradient = new_gradient(grad_values, values, values, views.grad_values);
  const auto run_in = views.values.kind == Kind::f64 ? run<double> : run<float>;
  run_in(launch, views, out);
  return {out.loss, out.metrics, gradient};
}

}  // namespace

FASTRL_CUDA_LIBRARY_IMPL(m) { m.impl("value_loss", TORCH_BOX(&value_loss_cuda)); }

}  // namespace fastrl::cuda
