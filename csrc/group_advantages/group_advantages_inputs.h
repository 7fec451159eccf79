// The tensors of group advantages as raw views, on CPU and CUDA.
#pragma once

#include <optional>

#include "common/tensors.h"
#include "group_advantages/group_advantages_args.h"
#include "group_advantages/group_core.h"

namespace fastrl {

inline void check_group_arguments(const Tensor& rewards, const Tensor& groups,
                                  const std::optional<Tensor>& valid,
                                  const std::optional<Tensor>& weights,
                                  const std::optional<Tensor>& mask, int64_t baseline,
                                  int64_t scale, int64_t ddof) {
  STD_TORCH_CHECK(rewards.dim() == 2 || (rewards.dim() == 1 && !weights),
                  "fastrl: rewards must be [N], [N, K] with weights, or [N, T]");
  STD_TORCH_CHECK(groups.dim() == 1 && groups.size(0) == rewards.size(0) &&
                      groups.scalar_type() == ScalarType::Long,
                  "fastrl: groups must be int64 [N]");
  if (valid) check_same_shape(*valid, groups, "valid");
  if (weights) {
    STD_TORCH_CHECK(weights->dim() == 1 && weights->size(0) == rewards.size(1) &&
                        weights->scalar_type() == ScalarType::Double,
                    "fastrl: weights must be float64 [K]");
  }
  if (mask) {
    STD_TORCH_CHECK(mask->dim() == 2 && mask->size(0) == rewards.size(0),
                    "fastrl: mask must be [N, T]");
    if (rewards.dim() == 2 && !weights) check_same_shape(*mask, rewards, "mask");
  }
  STD_TORCH_CHECK(
      baseline >= 0 && baseline <= 3 && scale >= 0 && scale <= 3 && (ddof == 0 || ddof == 1),
      "fastrl: baseline and scale must be 0 to 3, ddof 0 or 1");
  STD_TORCH_CHECK(mask || baseline != static_cast<int64_t>(Baseline::length_weighted),
                  "fastrl: the length-weighted baseline needs a mask");
}

// Keeps the copies that were needed alive for as long as the raw views are used.
struct GroupInputs {
  Tensor rewards, groups;
  std::optional<Tensor> valid, weights, mask;
  GroupOptions options;
  int64_t count = 0;
  int64_t num_objectives = 1;
  bool sums_tokens = false;  // the score of a sample is the sum of its token rewards
  TokenRows tokens;

  GroupInputs(const Tensor& rewards_in, const Tensor& groups_in,
              const std::optional<Tensor>& valid_in, const std::optional<Tensor>& weights_in,
              const std::optional<Tensor>& mask_in, int64_t baseline, int64_t scale, int64_t ddof,
              double eps, bool singleton_raw)
      : rewards(rewards_in), groups(groups_in) {
    check_group_arguments(rewards_in, groups_in, valid_in, weights_in, mask_in, baseline, scale,
                          ddof);
    rewards = rewards_in.dim() == 2 ? unit_stride_rows(rewards_in) : dense(rewards_in);
    groups = dense(groups_in);
    if (valid_in) valid = dense(*valid_in);
    if (weights_in) weights = dense(*weights_in);
    if (mask_in) mask = unit_stride_rows(*mask_in);
    options = GroupOptions{static_cast<Baseline>(baseline), static_cast<Scale>(scale),
                           static_cast<int32_t>(ddof), eps, singleton_raw};
    count = rewards.size(0);
    sums_tokens = rewards.dim() == 2 && !weights;
    if (weights) num_objectives = rewards.size(1);
    if (sums_tokens) tokens.rewards = float_view(rewards, "rewards");
    if (mask) tokens.mask = mask_view(*mask);
    tokens.length = mask ? mask->size(1) : sums_tokens ? rewards.size(1) : 0;
  }

  // One element per sample of each objective, at i * row_stride + k.
  FloatView objectives() const {
    FloatView view = float_view(rewards, "rewards");
    if (rewards.dim() == 1) view.row_stride = 1;
    return view;
  }
};

}  // namespace fastrl
