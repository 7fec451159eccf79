// The policy loss on the device: one pass over chunks of tokens gives sums and gradients. The ratio
// of a whole sequence needs sums over its row first: a pass over the log-ratios comes before, and
// for the gradient through that ratio another one after. Second reads mostly hit the L2 cache.
#pragma once

#include "common/loss_sums.cuh"
#include "common/scalar.h"
#include "policy_loss/policy_loss_args.h"
// After scalar.h, whose functions it calls.
#include "policy_loss/policy_loss_core.h"

namespace fastrl::cuda {

template <typename T>
struct alignas(16) PolicyChunkSums {
  T policy = 0, kl_loss = 0, entropy = 0;
  T log_ratio = 0, kl3 = 0, ref_kl = 0, ratio = 0, ratio_sq = 0;
  T ratio_min = static_cast<T>(HUGE_VAL), ratio_max = -static_cast<T>(HUGE_VAL);
  uint32_t of_inputs = 0;  // counts: nonfinite, clip_high, clip_low
  uint32_t of_clips = 0;   // counts: clipped, dual_clip

  __device__ __forceinline__ void add_to(PolicySums& sums, double weight) const {
    PolicySums of_chunk;
    of_chunk.policy_term = weight * policy;
    of_chunk.kl_term = weight * kl_loss;
    of_chunk.entropy_term = weight * entropy;
    of_chunk.nonfinite = count_in(of_inputs, 0);
    of_chunk.clip_high = count_in(of_inputs, 1);
    of_chunk.clip_low = count_in(of_inputs, 2);
    of_chunk.clipped = count_in(of_clips, 0);
    of_chunk.dual_clip = count_in(of_clips, 1);
    of_chunk.log_ratio = log_ratio;
    of_chunk.kl3 = kl3;
    of_chunk.ref_kl = ref_kl;
    of_chunk.entropy = entropy;
    of_chunk.ratio = ratio;
    of_chunk.ratio_sq = ratio_sq;
    of_chunk.ratio_min = ratio_min;
    of_chunk.ratio_max = ratio_max;
    sums.add(of_chunk);
  }
  // Of all lanes.
  __device__ __forceinline__ PolicyChunkSums warp_sum() const {
    PolicyChunkSums out;
    out.policy = warp_reduce(policy, Sum{});
    out.kl_loss = warp_reduce(kl_loss, Sum{});
    out.entropy = warp_reduce(entropy, Sum{});
    out.log_ratio = warp_reduce(log_ratio, Sum{});
    out.kl3 = warp_reduce(kl3, Sum{});
    out.ref_kl = warp_reduce(ref_kl, Sum{});
    out.ratio = warp_reduce(ratio, Sum{});
    out.ratio_sq = warp_reduce(ratio_sq, Sum{});
    out.ratio_min = warp_reduce(ratio_min, Least{});
    out.ratio_max = warp_reduce(ratio_max, Greatest{});
    out.of_inputs = warp_reduce(of_inputs, Sum{});
    out.of_clips = warp_reduce(of_clips, Sum{});
    return out;
  }
};

template <typename T>
struct PolicyLossCall {
  using ChunkSums = PolicyChunkSums<T>;
  using Sums = PolicySums;

  PolicyLossViews views;
  PolicyTerms<T> terms;
  LossRows loss;
  ChunkSums* chunks = nullptr;
  // By chunk, sequence ratios only: sums of logp - old_logp, and of the derivatives of the policy
  // loss through the ratio.
  T* log_ratios = nullptr;
  T* gradients = nullptr;
  T* loss_out = nullptr;
  double* metrics_out = nullptr;

  __device__ __forceinline__ void finish(const Sums& sums) const {
    *loss_out = static_cast<T>(policy_loss_of(views.terms, sums));
    policy_metrics(loss.counts(), sums, metrics_out);
  }
};

// The mean over the valid tokens of a row of what its chunks have summed. Called by a whole warp.
template <typename T>
__device__ __forceinline__ T row_mean(const PolicyLossCall<T>& call, const LossRow& row,
                                      const T* sums) {
  const int64_t first = LossChunks::first(call.loss.rows, row.index), count = row.num_chunks();
  double total = 0;
  for (int64_t i = lane_index(); i < count; i += kWarp) total += sums[first + i];
  return static_cast<T>(warp_reduce(total, Sum{}) / static_cast<double>(row.count));
}

// What all tokens of a row share when the ratio is that of the sequence.
template <typename T>
struct RowRatio {
  T log_ratio = 0;
  ExpPair<T> ratio = {0, 0};
  bool is_clamped = false;

  __device__ __forceinline__ RowRatio(const PolicyLossCall<T>& call, const LossRow& row) {
    if (call.terms.ratio == Ratio::token) return;
    const T bound = call.terms.log_ratio_clamp, mean = row_mean(call, row, call.log_ratios);
    is_clamped = magnitude(mean) > bound;
    log_ratio = at_least(at_most(mean, bound), -bound);
    ratio = exp_pair(log_ratio);
  }
};

template <typename T>
struct PolicyInputs {
  StripInput<T> logp, old_logp, advantage, is_weight, ref_logp, entropy;

  __device__ __forceinline__ PolicyInputs(const PolicyLossViews& views, const LossChunk& chunk)
      : logp(views.logp, chunk),
        old_logp(views.old_logp, chunk),
        advantage(views.advantages.view, chunk, views.advantages.per_row),
        is_weight(views.is_weights.view, chunk, views.is_weights.per_row),
        ref_logp(views.ref_logp, chunk),
        entropy(views.entropy, chunk) {}

  __device__ __forceinline__ void load(const LossStrip& strip) {
    logp.load(strip);
    old_logp.load(strip);
    advantage.load(strip);
    is_weight.load(strip);
    ref_logp.load(strip);
    entropy.load(strip);
    logp.prepare(strip);
    old_logp.prepare(strip);
    advantage.prepare(strip);
    is_weight.prepare(strip);
    ref_logp.prepare(strip);
    entropy.prepare(strip);
  }
};

// A loss with its derivative where logp appears in it directly, and where through the log-ratio.
template <typename T>
struct Derivatives {
  T direct, through;
};

// Adds token i of a strip to the sums.
template <typename T>
__device__ __forceinline__ Derivatives<T> add_token(const PolicyTerms<T>& terms,
                                                    const RowRatio<T>& row,
                                                    const PolicyInputs<T>& in, int i, bool valid,
                                                    PolicyChunkSums<T>& sums) {
  const T zero = 0;
  const T logp = in.logp[i], old_logp = in.old_logp[i];
  T shown = logp - old_logp, log_ratio = row.log_ratio;
  ExpPair<T> ratio = row.ratio;
  bool is_clamped = row.is_clamped;
  if (terms.ratio == Ratio::token) {
    const T bound = terms.log_ratio_clamp;
    is_clamped = magnitude(shown) > bound;
    log_ratio = shown = at_least(at_most(shown, bound), -bound);
    ratio = exp_pair(log_ratio);
  }
  // Zero unless an input is not finite.
  T probe = zero * logp + zero * old_logp;
  sums.log_ratio += shown;
  sums.kl3 += valid ? ratio.expm1 - log_ratio : zero;
  sums.ratio += valid ? ratio.exp : zero;
  sums.ratio_sq += valid ? ratio.exp * ratio.exp : zero;
  // A NaN changes neither.
  sums.ratio_min = valid && ratio.exp < sums.ratio_min ? ratio.exp : sums.ratio_min;
  sums.ratio_max = valid && ratio.exp > sums.ratio_max ? ratio.exp : sums.ratio_max;

  const T advantage = in.advantage[i];
  auto policy = surrogate_loss(terms, logp, ratio.exp, advantage);
  probe += zero * advantage;
  if (in.is_weight.is_given()) {
    const T weight = in.is_weight[i];
    policy.loss *= weight;
    policy.d_logp *= weight;
    policy.d_log_ratio *= weight;
    probe += zero * weight;
  }
  // Not zero times an advantage of zero: the ratio of a row may have overflowed.
  sums.policy += valid ? policy.loss : zero;
  Derivatives<T> out = {policy.d_logp, policy.d_log_ratio};

  if (in.ref_logp.is_given()) {
    const T ref_logp = in.ref_logp[i];
    const KlToken<T> kl = kl_loss(terms, logp, ref_logp, ratio.exp);
    out.direct += terms.kl_coef * kl.d_logp;
    if (terms.kl_grad == KlGrad::ratio) out.through += terms.kl_coef * kl.loss;
    probe += zero * ref_logp;
    sums.ref_kl += valid ? kl.estimate : zero;
    sums.kl_loss += valid ? kl.loss : zero;
  }
  if (in.entropy.is_given()) {
    const T entropy = in.entropy[i];
    sums.entropy += entropy;
    probe += zero * entropy;
  }
  sums.of_inputs += counted(probe != zero, advantage > zero && ratio.exp > terms.ratio_high,
                            advantage < zero && ratio.exp < terms.ratio_low);
  sums.of_clips += counted(valid && policy.is_clipped, policy.is_dual_clipped);
  // A clamped ratio has no gradient, and neither has a token that is not valid.
  if (is_clamped || !valid) out.through = zero;
  return out;
}

enum class Pass { all, sequence_sums, sequence_grads };

// A warp per chunk.
template <typename T, Pass kPass>
__global__ void __launch_bounds__(kLossThreads)
    policy_loss_chunks(const __grid_constant__ PolicyLossCall<T> call, int64_t num_chunks) {
  const int64_t index = global_warp();
  if (index >= num_chunks) return;
  const LossChunk chunk(call.loss, index);
  if (!chunk.exists()) return;
  const PolicyLossViews& views = call.views;
  if (!chunk.has_tokens()) {
    if (kPass == Pass::sequence_sums) return;
    chunk.store_zeros<T>(views.grad_logp, views.logp.kind, views.out_stride);
    chunk.store_zeros<T>(views.grad_entropy, views.entropy.kind, views.out_stride);
    return;
  }
  const PolicyTerms<T>& terms = call.terms;
  const RowRatio<T> row(call, chunk.row);
  T row_gradient = 0;  // at each logp of the row through its ratio
  if (kPass == Pass::sequence_grads) row_gradient = row_mean(call, chunk.row, call.gradients);
  const T weight = static_cast<T>(call.loss.weight(chunk.row.count)), zero = 0;
  const T entropy_gradient = weight * -terms.entropy_coef;
  PolicyInputs<T> in(views, chunk);

  PolicyChunkSums<T> sums;
  T through = 0;
#pragma unroll 1
  for (int k = 0; k < kStrips && chunk.has_strip(k); ++k) {
    const LossStrip strip = chunk.strip(k);
    in.load(strip);
    T gradient[kStrip], of_entropy[kStrip];
#pragma unroll
    for (int i = 0; i < kStrip; ++i) {
      const Derivatives<T> d = add_token(terms, row, in, i, strip.is_valid(i), sums);
      through += d.through;
      const T total = d.direct + (kPass == Pass::sequence_grads ? row_gradient : d.through);
      gradient[i] = strip.is_valid(i) ? weight * total : zero;
      of_entropy[i] = strip.is_valid(i) ? entropy_gradient : zero;
    }
    if (kPass == Pass::sequence_sums) continue;
    if (views.grad_logp != nullptr) {
      chunk.store(views.grad_logp, views.logp.kind, views.out_stride, strip, gradient);
    }
    if (views.grad_entropy != nullptr) {
      chunk.store(views.grad_entropy, views.entropy.kind, views.out_stride, strip, of_entropy);
    }
  }
  if (kPass == Pass::sequence_grads) return;
  sums = sums.warp_sum();
  if (lane_index() == 0) call.chunks[index] = sums;
  if constexpr (kPass == Pass::sequence_sums) {
    through = warp_reduce(through, Sum{});
    if (lane_index() == 0) call.gradients[index] = through;
  }
}

// A warp per chunk.
template <typename T>
__global__ void __launch_bounds__(kLossThreads)
    log_ratio_chunks(const __grid_constant__ PolicyLossCall<T> call, int64_t num_chunks) {
  const int64_t index = global_warp();
  if (index >= num_chunks) return;
  const LossChunk chunk(call.loss, index);
  if (!chunk.exists() || !chunk.has_tokens()) return;
  StripInput<T> logp(call.views.logp, chunk), old_logp(call.views.old_logp, chunk);
  T total = 0;
#pragma unroll
  for (int k = 0; k < kStrips; ++k) {
    if (!chunk.has_strip(k)) break;
    const LossStrip strip = chunk.strip(k);
    logp.load(strip);
    old_logp.load(strip);
    logp.prepare(strip);
    old_logp.prepare(strip);
#pragma unroll
    for (int i = 0; i < kStrip; ++i) total += logp[i] - old_logp[i];
  }
  total = warp_reduce(total, Sum{});
  if (lane_index() == 0) call.log_ratios[index] = total;
}

}  // namespace fastrl::cuda
