"""SkyRL 0.4.0: advantage estimators and policy losses of ``skyrl.backends.skyrl_train.utils.ppo_utils`` by name and argument.

The losses are sums: SkyRL multiplies the divisor into the advantages. Plain functions of the module, so they can be pickled.
REINFORCE++ is not here: SkyRL resets its return at masked tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl.ops.gae import gae
from fastrl.ops.group_advantages import group_advantages
from fastrl.ops.policy_loss import policy_loss
from fastrl.ops.whiten import whiten
from fastrl.surrogates import dppo_loss, sapo_loss

Advantages = tuple[Tensor, Tensor]
Loss = tuple[Tensor, dict[str, Tensor]]


@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lambd: float,
    **kwargs: Any,
) -> Advantages:
    """GAE over every position, whitened over the valid ones."""
    advantages, returns = gae(
        token_level_rewards, values, response_mask, gamma=gamma, lam=lambd, holes="ignore"
    )
    return whiten(advantages, response_mask), returns


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    grpo_norm_by_std: bool = True,
    **kwargs: Any,
) -> Advantages:
    """GRPO, or Dr. GRPO; a group of one keeps its score."""
    scale = "std" if grpo_norm_by_std else "none"
    return _outcome(token_level_rewards, response_mask, index, scale=scale, eps=epsilon)


def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any, **kwargs: Any
) -> Advantages:
    """The score less the mean of the others; 0 for a group of one."""
    return _outcome(
        *(token_level_rewards, response_mask, index),
        baseline="leave_one_out",
        scale="none",
        singleton="zero",
    )


def compute_maxrl_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    **kwargs: Any,
) -> Advantages:
    """Centred and divided by the mean; a group of one keeps its score."""
    advantages, _ = _outcome(
        *(token_level_rewards, response_mask, index), scale="mean", eps=epsilon, singleton="raw"
    )
    return advantages, advantages


def _outcome(rewards: Tensor, mask: Tensor, index: Any, **options: Any) -> Advantages:
    options = {"singleton": "raw"} | options
    advantages = group_advantages(rewards.sum(-1), index, mask=mask, **options)
    return advantages, advantages


def ppo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> Loss:
    """PPO, with the dual clip for ``config.policy_loss_type == "dual_clip"``."""
    out = policy_loss(
        *(log_probs, old_log_probs, advantages, loss_mask),
        clip_low=config.eps_clip_low,
        clip_high=config.eps_clip_high,
        dual_clip=config.clip_ratio_c if config.policy_loss_type == "dual_clip" else None,
        agg="token_sum",
    )
    named = out.named()
    return out.loss, {"clip_ratio": named["clipped"] / named["tokens"].clamp(min=1)}


def sapo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> Loss:
    """SAPO."""
    out = sapo_loss(
        *(log_probs, old_log_probs, advantages, loss_mask),
        tau_positive=config.sapo.tau_pos,
        tau_negative=config.sapo.tau_neg,
        agg="token_sum",
    )
    return out.loss, {"clip_ratio": torch.zeros_like(out.metrics["tokens"])}


def dppo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> Loss:
    """DPPO against the rollout's probabilities where they are given."""
    out = dppo_loss(
        log_probs,
        old_log_probs if rollout_logprobs is None else rollout_logprobs,
        *(advantages, loss_mask),
        divergence=config.dppo.dppo_type.removeprefix("binary_"),
        low=config.dppo.delta_low,
        high=config.dppo.delta_high,
        through_ratio=True,
        agg="token_sum",
    )
    return out.loss, {"clip_ratio": out.metrics["clipped"] / out.metrics["tokens"].clamp(min=1)}
