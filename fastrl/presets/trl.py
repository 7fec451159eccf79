"""TRL 1.16.0: advantages and losses of ``GRPOTrainer`` and ``RLOOTrainer``, with the names of their configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.ops.group_advantages import group_advantages
from fastrl.ops.policy_loss import policy_loss
from fastrl.ops.whiten import whiten
from fastrl.presets._tokens import OVERFLOW, masked_row_mean, neighbours
from fastrl.surrogates import sapo_loss, vespo_weights

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")


def grpo_advantages(
    rewards_per_func: Tensor,
    reward_weights: Tensor,
    num_generations: int,
    scale_rewards: str = "group",
    multi_objective_aggregation: str = "sum_then_normalize",
) -> Tensor:
    """``[N]`` advantages of rewards ``[N, K]`` in groups of ``num_generations`` neighbours; NaN: not scored, 0 if no reward is."""
    rewards = rewards_per_func
    groups = neighbours(len(rewards), num_generations, rewards.device)
    if multi_objective_aggregation == "normalize_then_sum":
        summed = group_advantages(rewards, groups, weights=reward_weights, eps=1e-4)
        return whiten(summed, ~rewards.isnan().all(1), eps=1e-4, eps_mode="std_add")
    scores = (rewards * reward_weights).nansum(1)
    scores = scores.masked_fill(rewards.isnan().all(1), torch.nan)
    scale = {"group": "std", "batch": "batch_std", "none": "none"}[scale_rewards]
    return group_advantages(scores, groups, scale=scale, eps=1e-4)


def rloo_advantages(
    rewards: Tensor, num_generations: int, normalize_advantages: bool = False
) -> Tensor:
    """``[N]``: the reward less the mean of the others; over the batch normalised if asked."""
    groups = neighbours(len(rewards), num_generations, rewards.device)
    advantages = group_advantages(rewards, groups, baseline="leave_one_out", scale="none")
    if normalize_advantages:
        advantages = whiten(advantages, ~rewards.isnan(), eps=1e-4, eps_mode="std_add")
    return advantages


def rloo_rewards(
    rewards_per_func: Tensor,
    reward_weights: Tensor,
    *,
    reward_clip_range: Sequence[float] | None = None,
    beta: float = 0.0,
    kl: Tensor | None = None,
) -> Tensor:
    """``[N]`` scores of rewards ``[N, K]``: weighted sum, clipped, less ``beta`` times the sequence's KL ``[N]``; NaN: not scored."""
    scores = (rewards_per_func * reward_weights).nansum(1)
    scores = scores.masked_fill(rewards_per_func.isnan().all(1), torch.nan)
    if reward_clip_range:
        scores = scores.clamp(min=reward_clip_range[0], max=reward_clip_range[1])
    return scores if kl is None else scores - beta * kl


class SequenceLoss(NamedTuple):
    """The loss, and the log-ratio of every sequence ``[B]``, a constant."""

    loss: Tensor
    log_ratio: Tensor


def rloo_loss(
    per_token_logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
) -> SequenceLoss:
    """The loss of ``RLOOTrainer``: the clipped ratio of whole sequences; ``old_logps`` and ``advantages`` are ``[B]``."""
    logps = sequence_sum(per_token_logps, mask).unsqueeze(1)
    old = old_logps.unsqueeze(1)
    loss = policy_loss(
        *(logps, old, advantages),
        log_ratio_clamp=OVERFLOW,
        clip_low=epsilon_low,
        clip_high=epsilon_high,
        denom=len(mask),
    ).loss
    return SequenceLoss(loss, (logps.detach() - old).squeeze(1))


def sequence_sum(x: Tensor, mask: Tensor) -> Tensor:
    """``[B]`` sums over the valid tokens."""
    return torch.where(mask != 0, x, 0.0).sum(1)


def grpo_loss(
    per_token_logps: Tensor,
    old_per_token_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    normalizer: float | Tensor,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    beta: float = 0.0,
    ref_per_token_logps: Tensor | None = None,
    use_bias_correction_kl: bool = True,
    weights: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> Tensor:
    """The loss of ``GRPOTrainer._compute_loss`` without entropy bonus and router loss.

    ``advantages`` are ``[B]``, ``[B, 1]`` or ``[B, T]``. ``weights`` ``[B, T]`` multiply the policy term: off-policy mask,
    entropy mask and, except for vespo, the importance ratio. ``normalizer`` is the whole divisor, see :func:`normalizer_of`.
    """
    if advantages.dim() == 2:
        advantages = advantages.expand(mask.shape)
    # TRL clamps nothing; a ratio beyond exp(80) would overflow float32 and its gradient with it.
    kl: dict[str, Any] = {}
    if beta:
        kl = {
            "ref_logp": ref_per_token_logps,
            "kl": "k3",
            "kl_coef": beta,
            "kl_input_clamp": OVERFLOW,
            "kl_clamp": None,
            "kl_grad": "ratio" if use_bias_correction_kl else "pathwise",
        }
    common: dict[str, Any] = {
        "ratio": importance_sampling_level,
        "log_ratio_clamp": OVERFLOW,
        "agg": _AGGREGATION.get(loss_type, "token_mean"),
        "denom": normalizer,
    }
    tokens = (per_token_logps, old_per_token_logps, advantages, mask)
    if loss_type in CLIPPED:
        return policy_loss(
            *tokens,
            clip_low=epsilon_low,
            clip_high=epsilon_high,
            ratio_cap=delta,
            is_weights=weights,
            **(common | kl),
        ).loss
    if loss_type == "sapo":
        loss = sapo_loss(
            *tokens,
            tau_positive=sapo_temperature_pos,
            tau_negative=sapo_temperature_neg,
            is_weights=weights,
            **common,
        ).loss
        if not beta:
            return loss
        nothing = torch.zeros_like(mask, dtype=per_token_logps.dtype)
        return loss + policy_loss(*tokens[:2], nothing, mask, **(common | kl)).loss
    if loss_type == "cispo":
        factor = importance_ratio(*tokens[:2], mask, importance_sampling_level)
        factor = factor.clamp(max=epsilon_high).expand(mask.shape)
    else:
        factor = vespo_weights(
            *tokens,
            is_weights=importance_sampling_ratio,
            k_positive=vespo_k_pos,
            lambda_positive=vespo_lambda_pos,
            k_negative=vespo_k_neg,
            lambda_negative=vespo_lambda_neg,
        )
    factor = factor if weights is None else factor * weights
    return policy_loss(*tokens, surrogate="reinforce", is_weights=factor, **(common | kl)).loss


_AGGREGATION = {
    "grpo": "seq_mean_token_mean",
    "sapo": "seq_mean_token_mean",
    "luspo": "seq_mean_token_sum",
}


def normalizer_of(
    loss_type: str,
    mask: Tensor,
    *,
    accumulation_steps: float = 1,
    max_completion_length: int = 0,
    num_items: Tensor | float = 1.0,
) -> Tensor | float:
    """The divisor of a loss type; ``num_items`` is TRL's ``num_items_in_batch`` times steps / processes."""
    if loss_type == "bnpo":
        return (mask != 0).sum().clamp(min=1) * accumulation_steps
    if loss_type == "dr_grpo":
        return mask.shape[0] * max_completion_length * accumulation_steps
    if loss_type in ("dapo", "cispo", "vespo"):
        return num_items
    return mask.shape[0] * accumulation_steps


@torch.no_grad()
def importance_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor, level: str) -> Tensor:
    """exp of the log-ratio, ``[B, T]``, or of its mean over the valid tokens, ``[B, 1]``; 1 at masked tokens."""
    valid = mask != 0
    log_ratio = torch.where(valid, logp - old_logp, 0.0)
    if level == "sequence":
        log_ratio = masked_row_mean(log_ratio, valid)
    return log_ratio.exp()
