// The value loss on the device: one pass over chunks of tokens gives sums and the gradient.
#pragma once

#include <cmath>

#include "common/loss_sums.cuh"
#include "common/scalar.h"
#include "value_loss/value_loss_args.h"
// After scalar.h, whose functions it calls.
#include "value_loss/value_loss_core.h"

namespace fastrl::cuda {

template <typename T>
struct alignas(16) ValueChunkSums {
  T loss = 0, error = 0, error_sq = 0, target = 0, target_sq = 0, value = 0;
  uint32_t counts = 0;  // nonfinite, clipped

  __device__ __forceinline__ void add_to(ValueSums& sums, double weight) const {
    ValueSums of_chunk;
    of_chunk.loss = weight * loss;
    of_chunk.nonfinite = count_in(counts, 0);
    of_chunk.clipped = count_in(counts, 1);
    of_chunk.error = error;
    of_chunk.error_sq = error_sq;
    of_chunk.target = target;
    of_chunk.target_sq = target_sq;
    of_chunk.value = value;
    sums.add(of_chunk);
  }
  // Of all lanes.
  __device__ __forceinline__ ValueChunkSums warp_sum() const {
    ValueChunkSums out;
    out.loss = warp_reduce(loss, Sum{});
    out.error = warp_reduce(error, Sum{});
    out.error_sq = warp_reduce(error_sq, Sum{});
    out.target = warp_reduce(target, Sum{});
    out.target_sq = warp_reduce(target_sq, Sum{});
    out.value = warp_reduce(value, Sum{});
    out.counts = warp_reduce(counts, Sum{});
    return out;
  }
};

template <typename T>
struct ValueLossCall {
  using ChunkSums = ValueChunkSums<T>;
  using Sums = ValueSums;

  ValueLossViews views;
  LossRows loss;
  ChunkSums* chunks = nullptr;
  T* loss_out = nullptr;
  double* metrics_out = nullptr;

  __device__ __forceinline__ void finish(const Sums& sums) const {
    *loss_out = static_cast<T>(sums.loss);
    value_metrics(loss.counts(), sums, metrics_out);
  }
};

template <typename T>
__global__ void __launch_bounds__(kLossThreads)
    value_loss_chunks(const __grid_constant__ ValueLossCall<T> call, int64_t num_chunks) {
  const int64_t index = global_warp();
  if (index >= num_chunks) return;
  const LossChunk chunk(call.loss, index);
  if (!chunk.exists()) return;
  const ValueLossViews& views = call.views;
  if (!chunk.has_tokens()) {
    chunk.store_zeros<T>(views.grad_values, views.values.kind, views.out_stride);
    return;
  }
  const bool has_old = views.old_values.data != nullptr;
  const T clip = has_old ? static_cast<T>(views.clip) : static_cast<T>(HUGE_VAL);
  const T delta = static_cast<T>(views.delta), zero = 0;
  const T weight = static_cast<T>(call.loss.weight(chunk.row.count));
  StripInput<T> values(views.values, chunk), old_values(views.old_values, chunk),
      returns(views.returns, chunk);

  ValueChunkSums<T> sums;
#pragma unroll 1
  for (int k = 0; k < kStrips && chunk.has_strip(k); ++k) {
    const LossStrip strip = chunk.strip(k);
    values.load(strip);
    old_values.load(strip);
    returns.load(strip);
    values.prepare(strip);
    old_values.prepare(strip);
    returns.prepare(strip);
    T gradient[kStrip];
#pragma unroll
    for (int i = 0; i < kStrip; ++i) {
      const T value = values[i], old_value = old_values[i], target = returns[i];
      const auto token = value_loss(value, old_value, target, clip, delta);
      const T error = value - target;
      sums.loss += token.loss;
      sums.error += error;
      sums.error_sq += error * error;
      sums.target += target;
      sums.target_sq += target * target;
      sums.value += value;
      // Zero unless something is not finite.
      const T probe = zero * value + (zero * target + zero * old_value);
      sums.counts += counted(probe != zero, token.is_clipped);
      gradient[i] = strip.is_valid(i) ? weight * token.d_value : zero;
    }
    if (views.grad_values != nullptr) {
      chunk.store(views.grad_values, views.values.kind, views.out_stride, strip, gradient);
    }
  }
  sums = sums.warp_sum();
  if (lane_index() == 0) call.chunks[index] = sums;
}

}  // namespace fastrl::cuda
