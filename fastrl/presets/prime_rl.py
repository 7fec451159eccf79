"""prime-rl 0.5.0: its default and reference-KL loss, its GRPO and MaxRL advantages, as functions for its import paths.

Written against ``src/prime_rl/trainer/rl/loss.py`` and ``src/prime_rl/orchestrator/algo/advantage.py`` (git 559b4477 of
2026-08-21 and 039b4009). A loss gets one sequence, 1-D, and returns a sum: prime-rl divides. The log-ratio is clamped at 20.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.errors import ArgumentError
from fastrl.ops.group_advantages import group_advantages
from fastrl.presets._tokens import masked_mean
from fastrl.surrogates import dppo_loss, kl_penalty


class LossOutputs(NamedTuple):
    """What prime-rl reads of the result of a loss."""

    loss: Tensor
    metrics: dict[str, Tensor]


def default_loss_fn(
    inputs: Any,
    dppo_mask_low: float = 0.2,
    dppo_mask_high: float = 0.2,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
) -> LossOutputs:
    """``-adv_tau A rho`` where the probability has not moved too far, plus ``kl_tau (log rho)^2``.

    ``inputs`` has ``trainer_logprobs``, ``inference_logprobs``, ``advantages``, ``loss_mask`` and ``loss_weights`` (or None).
    """
    return _loss(inputs, adv_tau * inputs.advantages, dppo_mask_low, dppo_mask_high, kl_tau)


def ref_kl_loss_fn(inputs: Any) -> LossOutputs:
    """The same with the log-ratio to the reference model in place of the advantage, which still picks the bound."""
    if inputs.ref_logprobs is None:
        raise ArgumentError("ref_kl_loss_fn: ref_logprobs must be given, got None")
    ref_kl = (inputs.ref_logprobs - inputs.trainer_logprobs).detach()
    out = _loss(inputs, ref_kl, 0.2, 0.2, 1e-3)
    return LossOutputs(out.loss, out.metrics | {"ref_kl": masked_mean(ref_kl, inputs.loss_mask)})


def _loss(inputs: Any, factor: Tensor, low: float, high: float, kl_tau: float) -> LossOutputs:
    mask = inputs.loss_mask != 0
    logp = inputs.trainer_logprobs
    old = inputs.inference_logprobs.detach()
    positive, negative = inputs.advantages > 0, inputs.advantages < 0
    with torch.no_grad():
        moved = torch.where(mask, logp.exp() - old.exp(), 0.0)
        too_high, too_low = moved > high, moved < -low
        dropped = torch.where(positive, too_high, too_low)
        kept = mask & ~dropped
        log_ratio = torch.where(mask, logp - old, 0.0).clamp(-20, 20)
        mismatch = torch.expm1(log_ratio) - log_ratio
    weights = None if inputs.loss_weights is None else inputs.loss_weights.unsqueeze(0)
    # Its own bounds are chosen by the sign of the factor, prime-rl's by that of the advantage: the mask says it here.
    surrogate = dppo_loss(
        *(x.unsqueeze(0) for x in (logp, old, factor, kept)),
        low=2.0,
        high=2.0,
        through_ratio=True,
        is_weights=weights,
        agg="token_sum",
    ).loss
    distance = 2 * kl_penalty(logp, old, mask, estimator="k2")
    if inputs.loss_weights is not None:
        distance = distance * torch.where(mask, inputs.loss_weights, 0.0)
    metrics = {
        "masked_mismatch_kl": masked_mean(mismatch, dropped),
        "unmasked_mismatch_kl": masked_mean(mismatch, kept),
        "is_masked": masked_mean(dropped.float(), mask),
        "is_masked_low": masked_mean((negative & too_low).float(), mask),
        "is_masked_high": masked_mean((positive & too_high).float(), mask),
        "masked_advantage_positive": masked_mean(positive.float(), dropped),
        "masked_advantage_negative": masked_mean(negative.float(), dropped),
    }
    return LossOutputs(surrogate + kl_tau * distance.sum(), metrics)


def grpo(inputs: Any, **options: Any) -> list[list[float]]:
    """``inputs.broadcast`` of the rewards less their mean; options of ``fastrl.group_advantages`` change that."""
    return _advantages(inputs, {"scale": "none"} | options)


def max_rl(inputs: Any) -> list[list[float]]:
    """The rewards less their mean, divided by it; zeros where the mean is not positive."""
    rewards = _rewards(inputs)
    if not rewards.numel() or rewards.mean() <= 0:
        return inputs.broadcast([0.0] * len(rewards))
    return _advantages(inputs, {"scale": "mean", "eps": 0.0})


def _rewards(inputs: Any) -> Tensor:
    return torch.tensor([rollout["reward"] for rollout in inputs.rollouts], dtype=torch.float32)


def _advantages(inputs: Any, options: dict[str, Any]) -> list[list[float]]:
    rewards = _rewards(inputs)
    group = torch.zeros(len(rewards), dtype=torch.int64)
    return inputs.broadcast(group_advantages(rewards, group, **options).tolist())
