"""Advantage estimators of verl; all return (advantages, returns), ``[B, T]``, constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl.advantages import (
    gdpo_advantages,
    gpg_advantages,
    optimal_token_baseline,
    pass_at_k_advantages,
    reinforce_plus_plus,
    remax,
)
from fastrl.errors import ArgumentError
from fastrl.ops.gae import gae
from fastrl.ops.group_advantages import group_advantages
from fastrl.ops.whiten import whiten
from fastrl.presets.verl.common import Advantages, option


def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float | Tensor,
    lam: float | Tensor,
) -> Advantages:
    """GAE over the valid tokens, whitened; the returns are not."""
    with torch.no_grad():
        advantages, returns = gae(
            token_level_rewards, values, response_mask, gamma=float(gamma), lam=float(lam)
        )
        return whiten(advantages, response_mask), returns


def _outcome(rewards: Tensor, mask: Tensor, index: Any, **options: Any) -> Advantages:
    options = {"singleton": "raw"} | options
    advantages = group_advantages(rewards.sum(-1), index, mask=mask, **options)
    return advantages, advantages


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Advantages:
    """GRPO, or Dr. GRPO without the standard deviation."""
    scale = "std" if norm_adv_by_std_in_grpo else "none"
    return _outcome(token_level_rewards, response_mask, index, scale=scale, eps=epsilon)


# One implementation serves both of verl's.
compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage


def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    non_tensor_batch: dict[str, Any] | None = None,
    batch: Any = None,
    **kwargs: Any,
) -> Advantages:
    """Each reward of ``config.gdpo_reward_keys`` normalised in its group, summed by weight, whitened over tokens."""
    rewards = token_level_rewards.sum(-1, keepdim=True)
    weights: Sequence[float] | None = None
    if config is not None and non_tensor_batch is not None and batch is not None:
        keys = option(config, "gdpo_reward_keys")
        missing = [key for key in keys or () if key not in non_tensor_batch]
        if not keys or missing:
            raise ArgumentError(
                f"verl gdpo: config.gdpo_reward_keys must name rewards of the batch, got {keys!r}; "
                f"the batch has {sorted(non_tensor_batch)}"
            )
        columns = [torch.as_tensor(non_tensor_batch[key].astype("float32")) for key in keys]
        rewards = torch.stack(columns, 1).to(token_level_rewards.device)
        weights = option(config, "gdpo_reward_weights")
    advantages = gdpo_advantages(
        rewards,
        index,
        [1.0] * rewards.shape[1] if weights is None else list(weights),
        mask=response_mask,
        over="tokens",
        eps=epsilon,
        singleton="raw",
        scale="std" if norm_adv_by_std_in_grpo else "none",
    )
    return advantages, advantages


def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """The best sample's lead over the second best; the switch for the std is read from the config, as in verl."""
    advantages = pass_at_k_advantages(
        token_level_rewards.sum(-1),
        index,
        scale="std" if option(config, "norm_adv_by_std_in_grpo", True) else "none",
        eps=epsilon,
        singleton="error",
        mask=response_mask,
    )
    return advantages, advantages


def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """Scores less the mean of their group, whitened over the tokens."""
    centred, _ = _outcome(token_level_rewards, response_mask, index, scale="none")
    advantages = whiten(centred, response_mask)
    return advantages, advantages


def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """The score less the mean of the others; a group of one keeps its score."""
    return _outcome(
        token_level_rewards, response_mask, index, baseline="leave_one_out", scale="none"
    )


def compute_rloo_vectorized_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """As ``rloo``, but a group of one gets 0."""
    return _outcome(
        *(token_level_rewards, response_mask, index),
        baseline="leave_one_out",
        scale="none",
        singleton="zero",
    )


def compute_opo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """The score less the length-weighted mean of the group."""
    return _outcome(
        token_level_rewards, response_mask, index, baseline="length_weighted", scale="none"
    )


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> Advantages:
    """Discounted reward-to-go over valid tokens, whitened; gamma is ``config.gamma``."""
    return reinforce_plus_plus(
        token_level_rewards, response_mask, gamma=float(option(config, "gamma", 1.0))
    )


def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,
    reward_baselines: Tensor,
    response_mask: Tensor,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """Reward-to-go less the score of the greedy answer."""
    return remax(token_level_rewards, reward_baselines, response_mask)


def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """Centred scores times B / nonzero scores; ``alpha`` is replaced by that number, as in verl."""
    advantages = gpg_advantages(
        token_level_rewards.sum(-1), index, singleton="raw", mask=response_mask
    )
    return advantages / f_norm, advantages / f_norm


def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    **kwargs: Any,
) -> Advantages:
    """A baseline per column and group."""
    return optimal_token_baseline(
        *(token_level_rewards, index, old_log_probs, sum_pi_squared, response_mask),
        is_weights=rollout_is_weights,
        zero_tail=handle_zero_tail,
        eps=epsilon,
    )


def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    **kwargs: Any,
) -> Advantages:
    """A baseline per position among the valid tokens and group (``tir_optimal_token_baseline``)."""
    return optimal_token_baseline(
        *(token_level_rewards, index, old_log_probs, sum_pi_squared, response_mask),
        is_weights=rollout_is_weights,
        compact=True,
        zero_tail=handle_zero_tail,
        eps=epsilon,
    )
