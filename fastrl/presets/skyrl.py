"""SkyRL 0.4.0: estimators, policy and value losses of ``skyrl.backends.skyrl_train.utils.ppo_utils`` by name and argument.

The losses are sums: SkyRL multiplies the divisor into the advantages. Plain functions of the module, so they can be pickled.
``is_weights`` ``[B, T]`` stands for SkyRL's off-policy correction, which the integration computes from ``rollout_logprobs``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl.errors import ArgumentError
from fastrl.ops.discounted_returns import discounted_returns
from fastrl.ops.gae import gae
from fastrl.ops.group_advantages import group_advantages
from fastrl.ops.policy_loss import policy_loss
from fastrl.ops.value_loss import value_loss
from fastrl.ops.whiten import whiten
from fastrl.presets._logits import logprobs_from_logits as logprobs_from_logits
from fastrl.presets._tokens import OVERFLOW
from fastrl.surrogates import clip_cov_loss, dppo_loss, kl_cov_loss, sapo_loss

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


@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float, **kwargs: Any
) -> Advantages:
    """Whitened reward-to-go, which starts anew behind every masked token, as in SkyRL."""
    valid = response_mask != 0
    following = torch.cat([valid[:, 1:], torch.ones_like(valid[:, :1])], 1)
    # SkyRL counts the reward at the masked token itself to the tokens before it.
    rewards = token_level_rewards.clone()
    at_mask = torch.where(valid, 0.0, token_level_rewards)[:, 1:]
    rewards[:, :-1] += gamma * torch.where(valid[:, :-1], at_mask, 0.0)
    returns = discounted_returns(rewards, response_mask, gamma=gamma, dones=valid & ~following)
    return whiten(returns, response_mask), returns


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
    is_weights: Tensor | None = None,
) -> Loss:
    """PPO, with the dual clip for ``config.policy_loss_type == "dual_clip"``."""
    out = policy_loss(
        *(log_probs, old_log_probs, advantages, loss_mask),
        clip_low=config.eps_clip_low,
        clip_high=config.eps_clip_high,
        dual_clip=config.clip_ratio_c if config.policy_loss_type == "dual_clip" else None,
        is_weights=is_weights,
        agg="token_sum",
    )
    return out.loss, {"clip_ratio": _share(out.named(), "clipped")}


def gspo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    is_weights: Tensor | None = None,
) -> Loss:
    """GSPO with the gradient of GSPO-token."""
    out = policy_loss(
        *(log_probs, old_log_probs, advantages, loss_mask),
        ratio="sequence_token",
        log_ratio_clamp=10.0,
        clip_low=config.eps_clip_low,
        clip_high=config.eps_clip_high,
        is_weights=is_weights,
        agg="token_sum",
    )
    return out.loss, {"clip_ratio": _share(out.named(), "clipped")}


def compute_policy_loss_cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    is_weights: Tensor | None = None,
) -> Loss:
    """CISPO against the old policy, or the rollout with ``config.cispo.cispo_anchor == "rollout"``."""
    behavior = rollout_logprobs if config.cispo.cispo_anchor == "rollout" else old_log_probs
    if behavior is None:
        raise ArgumentError(
            'skyrl cispo: rollout_logprobs must be given for cispo_anchor="rollout", got None'
        )
    low, high = config.cispo.cispo_eps_clip_low, config.cispo.cispo_eps_clip_high
    out = policy_loss(
        *(log_probs, behavior, advantages, loss_mask),
        surrogate="cispo",
        clip_low=low,
        clip_high=high,
        is_weights=is_weights,
        agg="token_sum",
    )
    named = out.named()
    ratio, valid = _ratio(log_probs, behavior, loss_mask)
    clamped = torch.where(valid, ratio.clamp(1 - low, 1 + high), 0.0)
    count = named["tokens"].clamp(min=1)
    return out.loss, {
        "clip_ratio": _share(named, "clipped"),
        "cispo/ratio_mean": ratio.sum() / count,
        "cispo/ratio_clamped_mean": clamped.sum() / count,
        "cispo/ratio_max": named["ratio_max"],
        "cispo/ratio_min": named["ratio_min"],
    }


def rollout_is_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    is_weights: Tensor | None = None,
) -> Loss:
    """REINFORCE with the ratio to the rollout as a constant weight, 0 outside of the clip range."""
    if rollout_logprobs is None:
        raise ArgumentError("skyrl rollout_is: rollout_logprobs must be given, got None")
    ratio, valid = _ratio(log_probs, rollout_logprobs, loss_mask)
    inside = (ratio > 1 - config.eps_clip_low) & (ratio < 1 + config.eps_clip_high)
    weights = torch.where(inside, ratio, 0.0)
    out = policy_loss(
        *(log_probs, old_log_probs, advantages, loss_mask),
        surrogate="reinforce",
        is_weights=weights if is_weights is None else weights * is_weights,
        agg="token_sum",
    )
    return out.loss, {"clip_ratio": (valid & ~inside).sum() / valid.sum().clamp(min=1)}


def compute_policy_loss_clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    is_weights: Tensor | None = None,
) -> Loss:
    """Clip-Cov; draws its tokens with torch's generator, as SkyRL does."""
    options = config.clip_cov
    out = clip_cov_loss(
        *(log_probs, old_log_probs, advantages, loss_mask),
        clip_low=config.eps_clip_low,
        clip_high=config.eps_clip_high,
        fraction=options.clip_ratio,
        cov_low=options.clip_cov_lb,
        cov_high=options.clip_cov_ub,
        is_weights=is_weights,
        agg="token_sum",
    )
    return out.loss, {"clip_ratio": _share(out.metrics, "dropped")}


def compute_policy_loss_kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    is_weights: Tensor | None = None,
) -> Loss:
    """KL-Cov."""
    out = kl_cov_loss(
        *(log_probs, old_log_probs, advantages, loss_mask),
        fraction=config.kl_cov.kl_cov_frac,
        kl_coef=config.kl_cov.ppo_kl_coef,
        is_weights=is_weights,
        agg="token_sum",
    )
    return out.loss, {"clip_ratio": torch.zeros_like(out.metrics["tokens"])}


def importance_sampling_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    is_weights: Tensor | None = None,
) -> Loss:
    """The unclipped ratio times the advantage."""
    out = policy_loss(
        *(log_probs, old_log_probs, advantages, loss_mask),
        log_ratio_clamp=OVERFLOW,
        clip_low=1.0,
        clip_high=1e38,
        is_weights=is_weights,
        agg="token_sum",
    )
    ratio, valid = _ratio(log_probs, old_log_probs, loss_mask, clamp=OVERFLOW)
    return out.loss, {"importance_ratio": ratio.sum() / valid.sum().clamp(min=1)}


def cross_entropy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    is_weights: Tensor | None = None,
) -> Loss:
    """The negative log-likelihood of the valid tokens."""
    out = policy_loss(
        *(log_probs, log_probs.detach(), torch.ones_like(log_probs), loss_mask),
        surrogate="reinforce",
        is_weights=is_weights,
        agg="token_sum",
    )
    return out.loss, {"clip_ratio": torch.zeros_like(out.named()["tokens"])}


def sapo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    is_weights: Tensor | None = None,
) -> Loss:
    """SAPO."""
    out = sapo_loss(
        *(log_probs, old_log_probs, advantages, loss_mask),
        tau_positive=config.sapo.tau_pos,
        tau_negative=config.sapo.tau_neg,
        is_weights=is_weights,
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
    is_weights: Tensor | None = None,
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
        is_weights=is_weights,
        agg="token_sum",
    )
    return out.loss, {"clip_ratio": _share(out.metrics, "clipped")}


def ppo_critic_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
) -> tuple[Tensor, float | None]:
    """The clipped value loss, in the mean of each row, then of all rows; the share of clipped tokens with a clip."""
    out = value_loss(
        *(values, old_values, returns, loss_mask),
        clip=config.value_clip,
        agg="seq_mean_token_mean",
        denom=values.shape[0],
    )
    clipped = None if config.value_clip is None else float(_share(out.named(), "clipped"))
    return out.loss, clipped


def _share(metrics: dict[str, Tensor], name: str) -> Tensor:
    return metrics[name] / metrics["tokens"].clamp(min=1)


@torch.no_grad()
def _ratio(
    log_probs: Tensor, behavior: Tensor, mask: Tensor | None, clamp: float = 20.0
) -> tuple[Tensor, Tensor]:
    """The ratio, 0 at masked tokens, and which are valid."""
    valid = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask != 0
    ratio = (log_probs - behavior).float().clamp(-clamp, clamp).exp()
    return torch.where(valid, ratio, 0.0), valid
