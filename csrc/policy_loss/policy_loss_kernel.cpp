// The policy loss on CPU: one pass over chunks of tokens gives the loss, its metrics and its
// gradient.
//
// A chunk is 2048 tokens counted from the first valid token of its row, summed lane by lane in the
// compute dtype and then in double, so what a row contributes depends on the row alone. The ratios
// of whole sequences need sums over the row first: they take one pass for the ratio, one for the
// sums and one for the gradient.
//
// A chunk is computed a block of vectors at a time, and a block by one short loop after the other.
// One long loop would keep too few vectors in flight to hide the latency of the exponentials, and
// would spill its sums.
#include "policy_loss/policy_loss_kernel.h"

#include <limits>

#include "common/token_block.h"

namespace fastrl::FASTRL_CAPABILITY {
namespace {

// The inputs at the tokens of a chunk.
template <typename T>
struct Inputs {
  TokenReader<T> logp, old_logp, advantage, is_weight, ref_logp, entropy;

  FASTRL_INLINE Inputs(const PolicyLossArgs& args, const TokenRange& chunk)
      : logp(args.rows, args.logp, chunk),
        old_logp(args.rows, args.old_logp, chunk),
        advantage(args.rows, args.advantages.view, chunk, args.advantages.per_row),
        is_weight(args.rows, args.is_weights.view, chunk, args.is_weights.per_row),
        ref_logp(args.rows, args.ref_logp, chunk),
        entropy(args.rows, args.entropy, chunk) {}
};

// What all tokens of a row share when the ratio is that of the sequence.
template <typename T>
struct RowValues {
  Lanes<T> log_ratio = T{0}, gradient = T{0};
  ExpPair<Lanes<T>> ratio{T{0}, T{0}};
  LaneMask<T> is_clamped;

  FASTRL_INLINE RowValues(const PolicyLossArgs& args, const PolicyTerms<T>& terms, int64_t row) {
    if (terms.ratio == Ratio::token) return;
    const Lanes<T> bound = terms.log_ratio_clamp;
    const Lanes<T> mean = static_cast<T>(args.row_ratios[row].log_ratio);
    is_clamped = magnitude(mean) > bound;
    log_ratio = at_least(at_most(mean, bound), -bound);
    ratio = exp_pair(log_ratio);
    gradient = static_cast<T>(args.row_ratios[row].gradient);
  }
};

// What the stages hand on, one vector per vector of the block.
template <typename T>
struct Stage {
  Lanes<T> logp[kBlockVectors], ratio[kBlockVectors];
  LaneMask<T> is_clamped[kBlockVectors];
  Lanes<T> direct[kBlockVectors], through[kBlockVectors];  // derivatives, see PolicyToken
  Lanes<T> probe[kBlockVectors];                           // zero unless an input is not finite
};

// Sums over the lanes of a chunk, each group filled by one stage.
template <typename T>
struct RatioSums {
  Lanes<T> log_ratio = T{0}, kl3 = T{0}, ratio = T{0}, ratio_sq = T{0};
  Lanes<T> ratio_min = std::numeric_limits<T>::infinity();
  Lanes<T> ratio_max = -std::numeric_limits<T>::infinity();
};
template <typename T>
struct SurrogateSums {
  Lanes<T> policy = T{0};
  LaneCount<T> clip_high, clip_low, clipped, dual_clip;
};
template <typename T>
struct KlSums {
  Lanes<T> estimate = T{0}, loss = T{0};
};
template <typename T>
struct OtherSums {
  Lanes<T> entropy = T{0}, through = T{0};
  LaneCount<T> nonfinite;
};

// Fills logp, ratio, is_clamped and probe.
template <typename T, bool kSums>
FASTRL_INLINE void ratio_stage(const TokenBlock<T>& block, const PolicyTerms<T>& terms,
                               const RowValues<T>& row, const Inputs<T>& in, Stage<T>& stage,
                               RatioSums<T>& total) {
  const Lanes<T> bound = terms.log_ratio_clamp, zero = T{0};
  const bool per_token = terms.ratio == Ratio::token;
  RatioSums<T> sums = total;
  for (int i = 0; i < block.num_vectors; ++i) {
    const LaneMask<T> valid = block.valid[i];
    const Lanes<T> logp = in.logp(block, i), old_logp = in.old_logp(block, i);
    Lanes<T> shown = logp - old_logp, log_ratio = row.log_ratio;
    ExpPair<Lanes<T>> ratio = row.ratio;
    LaneMask<T> is_clamped = row.is_clamped;
    if (per_token) {
      is_clamped = magnitude(shown) > bound;
      log_ratio = shown = at_least(at_most(shown, bound), -bound);
      ratio = exp_pair(log_ratio);
    }
    stage.logp[i] = logp;
    stage.ratio[i] = ratio.exp;
    stage.is_clamped[i] = is_clamped;
    if constexpr (kSums) {
      stage.probe[i] = zero * logp + zero * old_logp;
      sums.log_ratio += shown;
      sums.kl3 = add_where(valid, sums.kl3, ratio.expm1 - log_ratio);
      sums.ratio = add_where(valid, sums.ratio, ratio.exp);
      sums.ratio_sq = add_product_where(valid, sums.ratio_sq, ratio.exp, ratio.exp);
      sums.ratio_min = least_where(valid, sums.ratio_min, ratio.exp);
      sums.ratio_max = greatest_where(valid, sums.ratio_max, ratio.exp);
    }
  }
  total = sums;
}

// Fills direct and through with the derivatives of the policy loss.
template <typename T, bool kSums>
FASTRL_INLINE void surrogate_stage(const TokenBlock<T>& block, const PolicyTerms<T>& terms,
                                   const Inputs<T>& in, Stage<T>& stage, SurrogateSums<T>& total) {
  const Lanes<T> zero = T{0}, high = terms.ratio_high, low = terms.ratio_low;
  const bool has_is_weight = in.is_weight.is_given();
  SurrogateSums<T> sums = total;
  for (int i = 0; i < block.num_vectors; ++i) {
    const Lanes<T> advantage = in.advantage(block, i), ratio = stage.ratio[i];
    auto policy = surrogate_loss(terms, stage.logp[i], ratio, advantage);
    Lanes<T> probe = zero * advantage;
    if (has_is_weight) {
      const Lanes<T> weight = in.is_weight(block, i);
      policy.loss = policy.loss * weight;
      policy.d_logp = policy.d_logp * weight;
      policy.d_log_ratio = policy.d_log_ratio * weight;
      probe += zero * weight;
    }
    stage.direct[i] = policy.d_logp;
    stage.through[i] = policy.d_log_ratio;
    if constexpr (kSums) {
      stage.probe[i] += probe;
      // Not zero times an advantage of zero: the ratio of a row may have overflowed.
      sums.policy = add_where(block.valid[i], sums.policy, policy.loss);
      sums.clip_high += (advantage > zero) & (ratio > high);
      sums.clip_low += (advantage < zero) & (ratio < low);
      sums.clipped += policy.is_clipped & block.valid[i];
      sums.dual_clip += policy.is_dual_clipped;
    }
  }
  total = sums;
}

// Adds the derivatives of the KL term.
template <typename T, bool kSums>
FASTRL_INLINE void kl_stage(const TokenBlock<T>& block, const PolicyTerms<T>& terms,
                            const Inputs<T>& in, Stage<T>& stage, KlSums<T>& total) {
  const Lanes<T> coef = terms.kl_coef, zero = T{0};
  KlSums<T> sums = total;
  for (int i = 0; i < block.num_vectors; ++i) {
    const LaneMask<T> valid = block.valid[i];
    const Lanes<T> ref_logp = in.ref_logp(block, i);
    const KlToken<Lanes<T>> kl = kl_loss(terms, stage.logp[i], ref_logp, stage.ratio[i]);
    stage.direct[i] += coef * kl.d_logp;
    if (terms.kl_grad == KlGrad::ratio) stage.through[i] += coef * kl.loss;
    if constexpr (kSums) {
      stage.probe[i] += zero * ref_logp;
      sums.estimate = add_where(valid, sums.estimate, kl.estimate);
      sums.loss = add_where(valid, sums.loss, kl.loss);
    }
  }
  total = sums;
}

template <typename T>
FASTRL_INLINE void entropy_stage(const TokenBlock<T>& block, const Inputs<T>& in, Stage<T>& stage,
                                 OtherSums<T>& total) {
  const Lanes<T> zero = T{0};
  for (int i = 0; i < block.num_vectors; ++i) {
    const Lanes<T> entropy = in.entropy(block, i);
    total.entropy += entropy;
    stage.probe[i] += zero * entropy;
  }
}

enum class Pass { all, sequence_sums, sequence_grads };

template <typename T, Pass kPass>
FASTRL_INLINE void gradient_stage(const TokenBlock<T>& block, const RowValues<T>& row,
                                  const Stage<T>& stage, Lanes<T> weight, void* out, Kind kind,
                                  int64_t out_at) {
  const Lanes<T> zero = T{0};
  for (int i = 0; i < block.num_vectors; ++i) {
    Lanes<T> gradient = stage.direct[i];
    if constexpr (kPass == Pass::all) {
      gradient += select(stage.is_clamped[i], zero, stage.through[i]);
    }
    if constexpr (kPass == Pass::sequence_grads) gradient += row.gradient;
    gradient = weight * gradient;
    store_block(block, i, out, kind, out_at, gradient);
  }
}

template <typename T>
void add_sums(PolicySums& out, const RatioSums<T>& ratio, const SurrogateSums<T>& surrogate,
              const KlSums<T>& kl, const OtherSums<T>& other, double weight) {
  out.policy_term += weight * lane_total(surrogate.policy);
  out.kl_term += weight * lane_total(kl.loss);
  out.entropy_term += weight * lane_total(other.entropy);
  out.nonfinite += other.nonfinite.total();
  out.clip_high += surrogate.clip_high.total();
  out.clip_low += surrogate.clip_low.total();
  out.clipped += surrogate.clipped.total();
  out.dual_clip += surrogate.dual_clip.total();
  out.log_ratio += lane_total(ratio.log_ratio);
  out.kl3 += lane_total(ratio.kl3);
  out.ref_kl += lane_total(kl.estimate);
  out.entropy += lane_total(other.entropy);
  out.ratio += lane_total(ratio.ratio);
  out.ratio_sq += lane_total(ratio.ratio_sq);
  const double low = lane_least(ratio.ratio_min), high = -lane_least(-ratio.ratio_max);
  out.ratio_min = low < out.ratio_min ? low : out.ratio_min;
  out.ratio_max = high > out.ratio_max ? high : out.ratio_max;
}

template <typename T, Pass kPass>
void run_chunk(const PolicyLossArgs& args, const PolicyTerms<T>& shared_terms, int64_t index,
               PolicySums* sums) {
  constexpr bool kSums = kPass != Pass::sequence_grads;
  const PolicyTerms<T> terms = shared_terms;  // a copy that no store of a gradient can alias
  const TokenRange chunk = args.chunks[index];
  const Inputs<T> in(args, chunk);
  const RowValues<T> row(args, terms, chunk.row);
  const double row_weight = args.row_weights[chunk.row];
  const Lanes<T> weight = static_cast<T>(row_weight);
  const int64_t out_at = args.rows.begin(chunk.row, args.out_stride) + chunk.begin;
  const bool has_ref = in.ref_logp.is_given(), has_entropy = in.entropy.is_given();
  void* const grad_logp = args.grad_logp;
  void* const grad_entropy = args.grad_entropy;

  Stage<T> stage;
  RatioSums<T> ratio_sums;
  SurrogateSums<T> surrogate_sums;
  KlSums<T> kl_sums;
  OtherSums<T> other_sums;
  for_each_block<T>(args.rows, args.mask, chunk, [&](const TokenBlock<T>& block) {
    ratio_stage<T, kSums>(block, terms, row, in, stage, ratio_sums);
    surrogate_stage<T, kSums>(block, terms, in, stage, surrogate_sums);
    if (has_ref) kl_stage<T, kSums>(block, terms, in, stage, kl_sums);
    if constexpr (kSums) {
      if (has_entropy) entropy_stage(block, in, stage, other_sums);
      for (int i = 0; i < block.num_vectors; ++i) {
        other_sums.nonfinite += stage.probe[i] != Lanes<T>(T{0});
      }
    }
    if constexpr (kPass == Pass::sequence_sums) {
      for (int i = 0; i < block.num_vectors; ++i) {
        other_sums.through = add_where(block.valid[i], other_sums.through, stage.through[i]);
      }
    } else {
      if (grad_logp != nullptr) {
        gradient_stage<T, kPass>(block, row, stage, weight, grad_logp, args.logp.kind, out_at);
      }
      if (grad_entropy != nullptr) {
        const Lanes<T> gradient = weight * Lanes<T>(-terms.entropy_coef);
        for (int i = 0; i < block.num_vectors; ++i) {
          store_block(block, i, grad_entropy, args.entropy.kind, out_at, gradient);
        }
      }
    }
  });
  if constexpr (kSums) {
    add_sums(*sums, ratio_sums, surrogate_sums, kl_sums, other_sums, row_weight);
  }
  if constexpr (kPass == Pass::sequence_sums) {
    // Outside of the clamp the ratio of the row has no gradient.
    args.chunk_sums[index] = any(row.is_clamped) ? 0.0 : lane_total(other_sums.through);
  }
}

template <typename T, Pass kPass>
void run_chunks(const PolicyLossArgs& args, int64_t first, int64_t last, PolicySums* sums) {
  const PolicyTerms<T> terms = terms_in<T>(args.terms);
  for (int64_t i = first; i < last; ++i) run_chunk<T, kPass>(args, terms, i, sums);
}

template <typename T>
void sum_log_ratios(const PolicyLossArgs& args, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const TokenRange chunk = args.chunks[i];
    const Inputs<T> in(args, chunk);
    Lanes<T> total = T{0};
    for_each_block<T>(args.rows, args.mask, chunk, [&](const TokenBlock<T>& block) {
      for (int v = 0; v < block.num_vectors; ++v)
        total += in.logp(block, v) - in.old_logp(block, v);
    });
    args.chunk_sums[i] = lane_total(total);
  }
}

bool is_double(const PolicyLossArgs& args) { return args.logp.kind == Kind::f64; }

}  // namespace

void log_ratio_sums(const PolicyLossArgs& args, int64_t first, int64_t last) {
  const auto run = is_double(args) ? sum_log_ratios<double> : sum_log_ratios<float>;
  run(args, first, last);
}

void policy_loss_chunks(const PolicyLossArgs& args, int64_t first, int64_t last, PolicySums* sums) {
  const auto run = is_double(args) ? run_chunks<double, Pass::all> : run_chunks<float, Pass::all>;
  run(args, first, last, sums);
}

void sequence_sum_chunks(const PolicyLossArgs& args, int64_t first, int64_t last,
                         PolicySums* sums) {
  const auto run = is_double(args) ? run_chunks<double, Pass::sequence_sums>
                                   : run_chunks<float, Pass::sequence_sums>;
  run(args, first, last, sums);
}

void sequence_grad_chunks(const PolicyLossArgs& args, int64_t first, int64_t last) {
  const auto run = is_double(args) ? run_chunks<double, Pass::sequence_grads>
                                   : run_chunks<float, Pass::sequence_grads>;
  run(args, first, last, nullptr);
}

}  // namespace fastrl::FASTRL_CAPABILITY
