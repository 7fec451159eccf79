"""NeMo-RL's advantage estimators. Prompts are rows of tokens; those with equal rows are a group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl.advantages import length_adaptive_lam
from fastrl.errors import ArgumentError
from fastrl.ops.gae import gae
from fastrl.ops.group_advantages import group_advantages
from fastrl.ops.whiten import whiten
from fastrl.surrogates import kl_penalty

EPS = 1e-6
# Rounding leaves this share of the squares of a group when all members but one are equal.
ROUNDING = 1e-13


def _groups(prompt_ids: Tensor) -> Tensor:
    """``[B]`` ids of equal rows."""
    ids: Tensor = torch.unique(prompt_ids, dim=0, return_inverse=True)[1]
    return ids


def _to_tokens(per_row: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask != 0, per_row.unsqueeze(-1), 0.0)


def compare_in_group(
    prompt_ids: Tensor,
    rewards: Tensor,
    valid: Tensor | None,
    leave_one_out: bool,
    normalize: bool,
) -> Tensor:
    """``[B]``: the reward less the mean, of the others if ``leave_one_out``, over the deviation of the same samples.

    Where that deviation is 0 or does not exist nothing is divided. A group of one valid sample gives 0.
    """
    ids = _groups(prompt_ids)
    baseline = "leave_one_out" if leave_one_out else "mean"
    scale = "std" if normalize and not leave_one_out else "none"
    options: dict[str, Any] = {"baseline": baseline, "scale": scale, "eps": EPS, "valid": valid}
    advantages = group_advantages(rewards, ids, **options)
    if not (normalize and leave_one_out):
        return advantages
    deviation = _deviation_of_others(rewards, ids, valid)
    return torch.where(deviation > 0, advantages / (deviation + EPS), advantages).to(
        advantages.dtype
    )


@torch.no_grad()
def _deviation_of_others(rewards: Tensor, ids: Tensor, valid: Tensor | None) -> Tensor:
    """Standard deviation, ddof 1, of the other valid members; 0 for fewer than two, exactly 0 for equal ones."""
    counted = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid != 0
    x = torch.where(counted, rewards.double(), 0.0)
    number = int(ids.max()) + 1 if ids.numel() else 0

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(number).index_add(0, ids, values)[ids]

    count = total(counted.double())
    centred = torch.where(counted, x - total(x) / count.clamp(min=1), 0.0)
    squares = total(centred.square())
    # Taking x_i away moves the mean as well: sum over j != i of (x_j - m_i)^2 = S - x_i^2 n / (n - 1).
    others = squares - centred.square() * count / (count - 1).clamp(min=1)
    others = torch.where(others > ROUNDING * squares, others, 0.0)
    return (others / (count - 2).clamp(min=1)).sqrt() * (count > 2)


class GRPOAdvantageEstimator:
    """``use_leave_one_out_baseline`` and ``normalize_rewards`` of the estimator's configuration."""

    def __init__(self, estimator_config: Any, loss_config: Any) -> None:
        self.use_leave_one_out_baseline = estimator_config.use_leave_one_out_baseline
        self.normalize_rewards = estimator_config.normalize_rewards

    def compute_advantage(
        self,
        prompt_ids: Tensor,
        rewards: Tensor,
        mask: Tensor,
        valid_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """``[B, S]``."""
        options = (valid_mask, self.use_leave_one_out_baseline, self.normalize_rewards)
        return _to_tokens(compare_in_group(prompt_ids, rewards, *options), mask)


class GDPOAdvantageEstimator:
    """Each ``reward/<name>`` of the batch compared in its group, summed by weight, normalised over the responses."""

    def __init__(self, estimator_config: Any, loss_config: Any) -> None:
        self.use_leave_one_out_baseline = estimator_config.use_leave_one_out_baseline
        self.normalize_rewards = estimator_config.normalize_rewards
        self.reward_weights = estimator_config.reward_weights

    def compute_advantage(
        self,
        prompt_ids: Tensor,
        rewards: Tensor,
        mask: Tensor,
        repeated_batch: Any,
        valid_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """``[B, S]``; weights in the alphabetical order of the names."""
        names = sorted(key for key in repeated_batch if key.startswith("reward/"))
        weights = [1.0] * len(names) if self.reward_weights is None else list(self.reward_weights)
        if len(names) < 2 or len(weights) != len(names):
            raise ArgumentError(
                f"GDPOAdvantageEstimator: the batch must have two or more reward/<name>, one per weight, got "
                f"{', '.join(names) or 'none'} and {len(weights)} weights"
            )
        options = (valid_mask, self.use_leave_one_out_baseline, self.normalize_rewards)
        parts = [compare_in_group(prompt_ids, repeated_batch[name], *options) for name in names]
        summed = torch.stack([weight * part for weight, part in zip(weights, parts)]).sum(0)
        return _to_tokens(whiten(summed, valid_mask, eps=0.0, eps_mode="std_add"), mask)


class ReinforcePlusPlusAdvantageEstimator:
    """The reward, less its group's mean if ``minus_baseline``, less the KL of each token, over the batch normalised."""

    def __init__(self, estimator_config: Any, loss_config: Any) -> None:
        self.minus_baseline = estimator_config.minus_baseline
        self.use_kl_in_reward = loss_config.use_kl_in_reward
        self.kl_coef = loss_config.reference_policy_kl_penalty
        self.kl_type = loss_config.reference_policy_kl_type

    def compute_advantage(
        self,
        prompt_ids: Tensor,
        rewards: Tensor,
        mask: Tensor,
        *,
        logprobs_policy: Tensor | None = None,
        logprobs_reference: Tensor | None = None,
        valid_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """``[B, S]``."""
        if self.minus_baseline:
            rewards = compare_in_group(prompt_ids, rewards, valid_mask, False, False)
        advantages = _to_tokens(rewards, mask)
        advantages = advantages - _kl_reward(self, logprobs_policy, logprobs_reference, mask)
        return _normalized(advantages, mask)


class RawRewardAdvantageEstimator:
    """The reward itself."""

    def __init__(self, estimator_config: Any, loss_config: Any) -> None:
        self.normalize_advantages = estimator_config.normalize_advantages

    def compute_advantage(
        self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """``(advantages, None)``."""
        advantages = _to_tokens(rewards, mask)
        return (_normalized(advantages, mask) if self.normalize_advantages else advantages), None


class GeneralizedAdvantageEstimator:
    """GAE over the response tokens, with one lambda, with two, or with one that depends on the length."""

    def __init__(self, estimator_config: Any, loss_config: Any) -> None:
        self.gae_lambda = estimator_config.gae_lambda
        self.gae_gamma = estimator_config.gae_gamma
        self.normalize_advantages = estimator_config.normalize_advantages
        self.gae_lambda_value = estimator_config.gae_lambda_value
        self.gae_lambda_policy = estimator_config.gae_lambda_policy
        self.length_adaptive_alpha = estimator_config.length_adaptive_alpha
        self.use_kl_in_reward = loss_config.use_kl_in_reward
        self.kl_coef = loss_config.reference_policy_kl_penalty
        self.kl_type = loss_config.reference_policy_kl_type

    def compute_advantage(
        self,
        prompt_ids: Tensor,
        rewards: Tensor,
        mask: Tensor,
        values: Tensor,
        *,
        logprobs_policy: Tensor | None = None,
        logprobs_reference: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """``(advantages, returns)``, ``[B, S]``; the reward lies on the last response token."""
        valid = mask != 0
        position = torch.arange(mask.shape[1], device=mask.device)
        last = torch.where(valid, position, -1).amax(1, keepdim=True)
        token_rewards = torch.where(position == last, rewards.unsqueeze(1), 0.0)
        token_rewards = token_rewards - _kl_reward(self, logprobs_policy, logprobs_reference, mask)
        lam = self.gae_lambda if self.gae_lambda_policy is None else self.gae_lambda_policy
        if self.length_adaptive_alpha > 0:
            lam = length_adaptive_lam(mask, alpha=self.length_adaptive_alpha)
        with torch.no_grad():
            advantages, returns = gae(
                *(token_rewards.to(values.dtype), values, mask),
                gamma=self.gae_gamma,
                lam=lam,
                returns_lam=self.gae_lambda
                if self.gae_lambda_value is None
                else self.gae_lambda_value,
            )
        if self.normalize_advantages:
            advantages = whiten(advantages, mask)
        return advantages, returns


def _kl_reward(
    self: Any, logp: Tensor | None, reference: Tensor | None, mask: Tensor
) -> Tensor | float:
    """KL per response token times its coefficient, 0 where it is no part of the reward."""
    if not self.use_kl_in_reward or logp is None or reference is None:
        return 0.0
    kl = kl_penalty(
        *(logp, reference, mask), estimator=self.kl_type, input_clamp=20.0, clamp_value=10.0
    )
    return self.kl_coef * kl.detach()


def _normalized(advantages: Tensor, mask: Tensor) -> Tensor:
    return whiten(advantages, mask, ddof=0, eps=1e-8, eps_mode="rsqrt_max")
