"""Surrogates of the policy gradient: SAPO, DPPO, DRO, GMPO."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import _checks
from fastrl.ops.policy_loss import policy_loss
from fastrl.surrogates._tokens import Tokens, clamp


class SurrogateLoss(NamedTuple):
    """``loss`` is 0-d and differentiable; ``metrics`` are detached float64 sums over valid tokens, by name."""

    loss: Tensor
    metrics: dict[str, Tensor]


def _bound(value: float | None) -> float:
    return math.inf if value is None else value


def sapo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    ratio: str = "token",
    log_ratio_clamp: float | None = 20.0,
    is_weights: Tensor | None = None,
    agg: str = "seq_mean_token_mean",
    denom: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> SurrogateLoss:
    r"""Soft adaptive policy optimisation: a sigmoid gate in place of the clip.

    With tau = ``tau_positive`` where A > 0, else ``tau_negative``::

        L = -A (4 / tau) sigmoid(tau (rho - 1))

    Args:
        logp, old_logp, advantages, mask, log_ratio_clamp, is_weights, agg, denom, cu_seqlens: as in
            :func:`fastrl.policy_loss`.
        tau_positive, tau_negative: greater than 0.
        ratio: ``"token"``, or ``"sequence"``: rho of the mean log-ratio of the row, with its gradient (TRL).

    Returns:
        ``SurrogateLoss``; metrics ``tokens``, ``approx_kl``.

    Source: Soft Adaptive Policy Optimization (2025); verl ``sapo``, TRL ``sapo``.

    >>> logp = torch.zeros(1, 2, requires_grad=True)
    >>> float(sapo_loss(logp, torch.zeros(1, 2), torch.tensor([1.0])).loss.detach())
    -2.0
    """
    name = "sapo_loss"
    _checks.option(name, "ratio", ratio, ("token", "sequence"))
    _checks.number(name, "tau_positive", tau_positive, 1e-6)
    _checks.number(name, "tau_negative", tau_negative, 1e-6)
    tokens = Tokens(name, logp, old_logp, advantages, mask, is_weights, cu_seqlens)
    log_ratio = tokens.logp - tokens.old_logp
    if ratio == "sequence":
        mean = tokens.rows.sums(log_ratio) / tokens.rows.counts.clamp(min=1).to(tokens.dtype)
        log_ratio = tokens.rows.spread(mean).expand_as(tokens.logp)
    bound = _bound(log_ratio_clamp)
    log_ratio = clamp(log_ratio, -bound, bound)
    tau = torch.where(tokens.advantages > 0, tau_positive, tau_negative)
    gate = torch.sigmoid(tau * torch.expm1(log_ratio)) * (4 / tau)
    return SurrogateLoss(
        tokens.loss(-tokens.advantages * gate, agg, denom), tokens.metrics(log_ratio)
    )


def dppo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    divergence: str = "tv",
    low: float = 0.2,
    high: float = 0.2,
    ratio_cap: float | None = 20.0,
    through_ratio: bool = False,
    is_weights: Tensor | None = None,
    agg: str = "token_mean",
    denom: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> SurrogateLoss:
    r"""A trust region on the divergence of the two-way choice "this token or another", in place of the ratio's clip.

    With p, q the probability of the token now and before, and D the divergence of (q, 1-q) from (p, 1-p)::

        keep = D <= high or p <= q   where A > 0;     D <= low or p >= q   elsewhere
        D    = |p - q|  ("tv")       or  KL((q, 1-q) || (p, 1-p))  ("kl")
        L    = -A sg(min(rho, ratio_cap)) logp keep          (through_ratio: -A rho keep, as SkyRL and prime-rl)

    Args:
        logp, old_logp, advantages, mask, is_weights, agg, denom, cu_seqlens: as in :func:`fastrl.policy_loss`; the
            log-ratio is clamped at 20.
        divergence, low, high, ratio_cap, through_ratio: see above; ``ratio_cap=None`` is no cap.

    Returns:
        ``SurrogateLoss``; metrics ``tokens``, ``approx_kl``, ``clipped`` (not kept), ``capped`` (kept, rho beyond the cap).

    Source: DPPO (2026), binary TV and binary KL; verl ``dppo_tv``, ``dppo_kl``.

    >>> old_logp = torch.tensor([[0.5, 0.5]]).log()
    >>> logp = torch.tensor([[0.6, 0.9]]).log().requires_grad_()
    >>> int(dppo_loss(logp, old_logp, torch.tensor([1.0])).metrics["clipped"])
    1
    """
    name = "dppo_loss"
    _checks.option(name, "divergence", divergence, ("tv", "kl"))
    tokens = Tokens(name, logp, old_logp, advantages, mask, is_weights, cu_seqlens)
    log_ratio = clamp(tokens.logp - tokens.old_logp, -20.0, 20.0)
    with torch.no_grad():
        p, q = tokens.logp.exp(), tokens.old_logp.exp()
        positive = tokens.advantages > 0
        if divergence == "tv":
            keep = torch.where(positive, p - q <= high, p - q >= -low)
        else:
            change = q * (tokens.old_logp - tokens.logp)
            change = change + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
            keep = torch.where(positive, (change <= high) | (p <= q), (change <= low) | (p >= q))
        ratio = log_ratio.exp()
        cap = _bound(ratio_cap)
        weight = ratio.clamp(max=cap) * keep
    if through_ratio:
        per_token = -tokens.advantages * torch.where(keep, log_ratio.exp(), 0.0)
    else:
        per_token = -tokens.advantages * weight * tokens.logp
    metrics = tokens.metrics(log_ratio, clipped=~keep, capped=(ratio > cap) & keep)
    return SurrogateLoss(tokens.loss(per_token, agg, denom), metrics)


def dro_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    beta: float,
    is_weights: Tensor | None = None,
    agg: str = "token_mean",
    denom: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> SurrogateLoss:
    r"""Direct reward optimisation: ``L = -A logp + beta / 2 (logp - old_logp)^2``.

    It is ``fastrl.policy_loss`` with ``surrogate="reinforce"`` and the KL ``"k2"`` to the old policy.

    Args:
        logp, old_logp, advantages, mask, is_weights, agg, denom, cu_seqlens: as in ``policy_loss``. The weights apply to
            both terms.
        beta: greater than 0.

    Returns:
        ``SurrogateLoss``; metrics ``tokens``, ``approx_kl``.

    Source: Richemond et al., Offline Regularised RL for LLMs Alignment (2024); verl ``dro``.

    >>> logp = torch.tensor([[-1.0]], requires_grad=True)
    >>> float(dro_loss(logp, torch.tensor([[-2.0]]), torch.tensor([1.0]), beta=0.5).loss.detach())
    1.25
    """
    name = "dro_loss"
    _checks.number(name, "beta", beta, 1e-12)
    if is_weights is None:
        # The clamp only shapes a metric here.
        out = policy_loss(
            *(logp, old_logp, advantages, mask),
            surrogate="reinforce",
            log_ratio_clamp=None,
            ref_logp=old_logp,
            kl="k2",
            kl_coef=beta,
            agg=agg,
            denom=denom,
            cu_seqlens=cu_seqlens,
        )
        named = out.named()
        return SurrogateLoss(out.loss, {key: named[key] for key in ("tokens", "approx_kl")})
    tokens = Tokens(name, logp, old_logp, advantages, mask, is_weights, cu_seqlens)
    log_ratio = tokens.logp - tokens.old_logp
    per_token = -tokens.advantages * tokens.logp + 0.5 * beta * log_ratio.square()
    return SurrogateLoss(tokens.loss(per_token, agg, denom), tokens.metrics(log_ratio))


def gmpo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    log_clip_low: float = 0.2,
    log_clip_high: float = 0.2,
    is_weights: Tensor | None = None,
    denom: float | Tensor | None = None,
) -> SurrogateLoss:
    r"""Geometric-mean policy optimisation: one ratio per response, of log-ratios clipped where that is pessimistic.

    With d = logp - old_logp, s = sign(A), means over the valid tokens of a row::

        d'  = s min(s d, s clip(d, -log_clip_low, log_clip_high))
        L_i = -mean(A) exp(mean(d')) w_i        w_i = exp(mean(log is_weights))
        loss = sum_i L_i / rows

    Args:
        logp, old_logp, advantages, mask: as in :func:`fastrl.policy_loss`, ``[B, T]``.
        log_clip_low, log_clip_high: bounds of the log-ratio.
        is_weights: as in ``policy_loss``; their geometric mean multiplies the row.
        denom: replaces the number of rows B, rows without a valid token included (their L is 0).

    Returns:
        ``SurrogateLoss``; metrics ``tokens``, ``approx_kl``, ``clip_high`` (clipped at A > 0), ``clip_low`` (at A < 0).

    Source: Zhao et al., Geometric-Mean Policy Optimization (2025); verl ``geo_mean``.

    >>> logp = torch.tensor([[0.1, 0.5]], requires_grad=True)
    >>> round(float(gmpo_loss(logp, torch.zeros(1, 2), torch.tensor([1.0])).loss.detach()), 4)  # -exp((0.1 + 0.2) / 2)
    -1.1618
    """
    tokens = Tokens("gmpo_loss", logp, old_logp, advantages, mask, is_weights)
    log_ratio = tokens.logp - tokens.old_logp
    clipped = clamp(log_ratio, -log_clip_low, log_clip_high)
    sign = tokens.advantages.sign()
    # At A = 0 the row's own advantage may still be other than 0, so the token enters with 0, as the minimum says.
    pessimistic = torch.where(sign * clipped < sign * log_ratio, clipped, log_ratio) * sign.square()
    count = tokens.rows.counts.clamp(min=1).to(tokens.dtype)
    per_row = -(tokens.advantages.sum(-1) / count) * (pessimistic.sum(-1) / count).exp()
    if tokens.is_weights is not None:
        log_weight = torch.where(tokens.valid, (tokens.is_weights + 1e-10).log(), 0.0)
        per_row = per_row * (log_weight.sum(-1) / count).exp()
    loss = per_row.sum() / (max(logp.shape[0], 1) if denom is None else denom)
    is_clipped = log_ratio != clipped
    metrics = tokens.metrics(
        log_ratio,
        clip_high=is_clipped & (tokens.advantages > 0),
        clip_low=is_clipped & (tokens.advantages < 0),
    )
    return SurrogateLoss(loss, metrics)
