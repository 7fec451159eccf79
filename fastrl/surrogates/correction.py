"""Corrections for tokens that another policy, or another engine, has sampled: weights, rejection, masks."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import _checks
from fastrl._library import result_dtype

LEVELS = ("token", "sequence", "geometric")
BEYOND = ("clamp", "zero")
STATISTICS = ("k1", "k2", "k3")
REDUCTIONS = ("token", "sum", "mean", "max")


class RolloutCorrection(NamedTuple):
    """``weights`` for ``is_weights=``; ``raw`` before the bounds; ``metrics`` as 0-d tensors."""

    weights: Tensor
    raw: Tensor
    metrics: dict[str, Tensor]


def _selected(
    name: str, logp: Tensor, rollout_logp: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The log-ratio with zeros at masked positions, and which tokens are valid. A constant."""
    _checks.floating(name, "logp", logp)
    _checks.like(name, "rollout_logp", rollout_logp, logp, "logp")
    _checks.mask(name, mask, logp, "logp")
    valid = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask != 0
    dtype = result_dtype(logp.dtype)
    difference = logp.detach().to(dtype) - rollout_logp.detach().to(dtype)
    return torch.where(valid, difference, 0.0), valid


def _mean(x: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, x, 0.0).sum() / valid.sum().clamp(min=1)


def rollout_correction(
    logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor | None = None,
    *,
    level: str = "token",
    low: float | None = None,
    high: float | None = 2.0,
    beyond: str = "clamp",
    log_clamp: float | None = 20.0,
    missing_is_one: bool = False,
    normalise: bool = False,
) -> RolloutCorrection:
    r"""Importance weights pi_train / pi_rollout of a rollout engine that disagrees with the trainer.

    With l = logp - rollout_logp over the valid tokens of a row::

        "token"  w_t = exp(l_t)      "sequence"  w = exp(sum l)      "geometric"  w = exp(mean l)

    ``"clamp"`` bounds w to [low, high] (TIS); ``"zero"`` sets w to 0 outside of them (IcePop at token level, MIS at
    sequence level).

    Args:
        logp, rollout_logp: ``[B, T]``, log-probabilities of the trainer and of the engine.
        mask: ``[B, T]``, non-zero is valid.
        level, beyond: see above.
        low, high: None: no bound.
        log_clamp: bound of the exponent; None: no bound.
        missing_is_one: count a NaN difference as 0 (TRL: the engine had no log-probability).
        normalise: divide by the mean weight over valid tokens, or over rows with a valid token when the weight is one per
            row.

    Returns:
        ``RolloutCorrection``; weights ``[B, T]``, 0 where masked, constants. Metrics over valid tokens: ``mean``, ``min``,
        ``max`` of the weights, ``fraction_high`` and ``fraction_low`` beyond the bounds, ``ess`` the effective sample size
        as a share of the tokens, ``kl`` the mean of -l and ``k3_kl`` of exp(l) - 1 - l.

    Source: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (2025); IcePop (2025); verl's
    rollout correction; TRL's vLLM correction modes.

    >>> logp, rollout = torch.tensor([[0.5, 0.1]]).log(), torch.tensor([[0.1, 0.1]]).log()
    >>> rollout_correction(logp, rollout, high=2.0).weights
    tensor([[2., 1.]])
    >>> rollout_correction(logp, rollout, high=2.0, beyond="zero").weights
    tensor([[0., 1.]])
    """
    name = "rollout_correction"
    _checks.option(name, "level", level, LEVELS)
    _checks.option(name, "beyond", beyond, BEYOND)
    log_ratio, valid = _selected(name, logp, rollout_logp, mask)
    if missing_is_one:
        log_ratio = log_ratio.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    exponent = log_ratio
    if level != "token":
        exponent = log_ratio.sum(-1, keepdim=True)
        if level == "geometric":
            exponent = exponent / valid.sum(-1, keepdim=True).clamp(min=1)
        exponent = exponent.expand_as(log_ratio)
    bound = math.inf if log_clamp is None else log_clamp
    raw = torch.where(valid, exponent.clamp(-bound, bound).exp(), 0.0)
    lowest, highest = (0.0 if low is None else low), (math.inf if high is None else high)
    is_high, is_low = raw > highest, valid & (raw < lowest)
    if beyond == "clamp":
        weights = torch.where(valid, raw.clamp(lowest, highest), 0.0)
    else:
        weights = torch.where(is_high | is_low, 0.0, raw)
    mean = _mean(weights, valid)
    metrics = {
        "mean": mean,
        "min": torch.where(valid, weights, math.inf).amin(),
        "max": torch.where(valid, weights, -math.inf).amax(),
        "fraction_high": _mean(is_high.to(raw.dtype), valid),
        "fraction_low": _mean(is_low.to(raw.dtype), valid),
        "ess": mean.square() / _mean(weights.square(), valid).clamp(min=1e-30),
        "kl": _mean(-log_ratio, valid),
        "k3_kl": _mean(torch.expm1(log_ratio) - log_ratio, valid),
    }
    if normalise:
        if level != "token":
            has_token = valid.any(-1)
            mean = _mean(weights.amax(-1), has_token)
        weights = weights / torch.where(mean > 1e-8, mean, 1.0)
    return RolloutCorrection(weights, raw, metrics)


def rejection_mask(
    logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor | None = None,
    *,
    statistic: str = "k1",
    reduce: str = "token",
    low: float | None = None,
    high: float,
) -> Tensor:
    r"""Which valid tokens to keep, by how far trainer and engine disagree.

    With l = logp - rollout_logp, clamped to +-20::

        "k1"  -l (bounds are those of the ratio exp(-l): log low <= . <= log high)     "k2"  l^2 / 2     "k3"  exp(l) - 1 - l

    taken per token, or as the sum, mean or max over the valid tokens of the row, which then stands or falls as a whole.

    Args:
        logp, rollout_logp, mask: as in :func:`rollout_correction`.
        statistic, reduce: see above.
        low: k1 only; None: 1 / high.
        high: greater than 0.

    Returns:
        bool ``[B, T]``, False where masked. Count a global ``denom`` before rejecting, or rejected tokens raise the weight of
        the others.

    Source: verl's ``rollout_rs``; geometric-mean rejection is ``statistic="k1", reduce="mean"``.

    >>> logp, rollout = torch.tensor([[0.5, 0.1]]).log(), torch.tensor([[0.1, 0.1]]).log()
    >>> rejection_mask(logp, rollout, high=2.0)
    tensor([[False,  True]])
    """
    name = "rejection_mask"
    _checks.option(name, "statistic", statistic, STATISTICS)
    _checks.option(name, "reduce", reduce, REDUCTIONS)
    _checks.number(name, "high", high, 1e-12)
    log_ratio, valid = _selected(name, logp, rollout_logp, mask)
    log_ratio = log_ratio.clamp(-20.0, 20.0)
    upper, lower = high, -math.inf
    if statistic == "k1":
        x = -log_ratio
        upper, lower = math.log(high), math.log(1 / high if low is None else low)
    elif statistic == "k2":
        x = log_ratio.square() / 2
    else:
        x = torch.expm1(log_ratio) - log_ratio
    if reduce == "max":
        x = torch.where(valid, x, -math.inf).amax(-1, keepdim=True)
    elif reduce != "token":
        x = torch.where(valid, x, 0.0).sum(-1, keepdim=True)
        if reduce == "mean":
            x = x / valid.sum(-1, keepdim=True).clamp(min=1)
    return valid & (x >= lower) & (x <= upper)


def off_policy_mask(
    logp: Tensor,
    rollout_logp: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    threshold: float,
) -> Tensor:
    r"""Drop responses with a negative advantage that the policy has moved away from: keep A >= 0 or mean(-l) <= threshold.

    l = logp - rollout_logp over the valid tokens of the row, NaN counted as 0.

    Args:
        logp, rollout_logp, mask: as in :func:`rollout_correction`.
        advantages: ``[B]`` or ``[B, T]``.
        threshold: largest mean divergence of a response with A < 0.

    Returns:
        bool ``[B, T]``, False where masked.

    Source: DeepSeek-V3.2 (2025), off-policy sequence masking; TRL ``off_policy_mask_threshold``.

    >>> logp, rollout = torch.tensor([[-3.0], [-3.0]]), torch.tensor([[-1.0], [-1.0]])
    >>> off_policy_mask(logp, rollout, torch.tensor([1.0, -1.0]), threshold=0.5)
    tensor([[ True],
            [False]])
    """
    log_ratio, valid = _selected("off_policy_mask", logp, rollout_logp, mask)
    divergence = -log_ratio.nan_to_num(nan=0.0).sum(-1, keepdim=True)
    divergence = divergence / valid.sum(-1, keepdim=True).clamp(min=1)
    advantages = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
    return valid & ((advantages >= 0) | (divergence <= threshold))


def high_entropy_mask(entropy: Tensor, mask: Tensor | None = None, *, fraction: float) -> Tensor:
    r"""The valid tokens whose entropy is at or above the ``1 - fraction`` quantile of the valid tokens' entropies.

    Args:
        entropy: ``[B, T]``.
        mask: ``[B, T]``, non-zero is valid.
        fraction: share of tokens to keep, in [0, 1].

    Returns:
        bool ``[B, T]``, False where masked. The quantile is that of this process.

    Source: Wang et al., Beyond the 80/20 Rule (2025); TRL ``top_entropy_quantile``.

    >>> high_entropy_mask(torch.tensor([[0.1, 0.9, 0.5, 0.2]]), fraction=0.25)
    tensor([[False,  True, False, False]])
    """
    name = "high_entropy_mask"
    _checks.floating(name, "entropy", entropy)
    _checks.mask(name, mask, entropy, "entropy")
    fraction = _checks.number(name, "fraction", fraction, 0.0, 1.0)
    valid = torch.ones_like(entropy, dtype=torch.bool) if mask is None else mask != 0
    chosen = entropy[valid].float()
    if not chosen.numel():
        return valid
    return valid & (torch.where(valid, entropy, 0.0) >= chosen.quantile(1 - fraction))


def vespo_weights(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    is_weights: Tensor | None = None,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Tensor:
    r"""Weights of VESPO, for ``fastrl.policy_loss(surrogate="reinforce", is_weights=...)``.

    With W the sum over the valid tokens of clamp(logp - old_logp, +-20) and of log is_weights, clamped to [log 1e-8, 20], and
    k, lambda by the sign of A (A >= 0 is positive)::

        phi = exp(lambda + k W - lambda exp(W)),   0 where that is not finite

    Args:
        logp, old_logp, mask: ``[B, T]``.
        advantages: ``[B]`` or ``[B, T]``.
        is_weights: ``[B, T]`` or ``[B, 1]``, clamped to [1e-8, exp(20)], masked entries must be 1.

    Returns:
        Constants, ``[B, T]``.

    Source: VESPO (2026); TRL ``vespo``.

    >>> vespo_weights(torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([1.0]))
    tensor([[1., 1.]])
    """
    log_ratio, _ = _selected("vespo_weights", logp, old_logp, mask)
    lowest = math.log(1e-8)
    exponent = log_ratio.clamp(-20.0, 20.0).sum(-1, keepdim=True)
    if is_weights is not None:
        exponent = exponent + is_weights.detach().log().clamp(lowest, 20.0).sum(-1, keepdim=True)
    exponent = exponent.clamp(lowest, 20.0)
    advantages = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
    positive = advantages >= 0
    k = torch.where(positive, k_positive, k_negative).to(exponent.dtype)
    steepness = torch.where(positive, lambda_positive, lambda_negative).clamp(min=1e-4)
    phi = (steepness + k * exponent - steepness * exponent.exp()).exp()
    return phi.nan_to_num(0.0, 0.0, 0.0).expand(log_ratio.shape)
