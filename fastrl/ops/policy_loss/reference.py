"""The definition of the policy loss and its metrics in plain torch; autograd derives the gradient."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl._library import result_dtype
from fastrl._losses import TokenRows, aggregate


class Terms(NamedTuple):
    """The options of ``policy_loss`` that are not tensors; infinity stands for "no bound"."""

    ratio: str
    surrogate: str
    clip_low: float
    clip_high: float
    dual_clip: float
    ratio_cap: float
    log_ratio_clamp: float
    kl: str | None
    kl_grad: str
    kl_coef: float
    kl_input_clamp: float
    kl_clamp: float
    entropy_coef: float


def policy_loss_reference(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    is_weights: Tensor | None,
    ref_logp: Tensor | None,
    entropy: Tensor | None,
    cu_seqlens: Tensor | None,
    terms: Terms,
    agg: str,
    denom: float | Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The loss and the metrics in the order of ``POLICY_METRICS``."""
    dtype = result_dtype(logp.dtype)
    rows = TokenRows(logp, mask, cu_seqlens)
    new = rows.select(logp, dtype)
    old = rows.select(old_logp.detach(), dtype)
    adv = rows.select(rows.tokens_of(advantages.detach()), dtype)
    weight = None
    if is_weights is not None:
        weight = rows.select(rows.tokens_of(is_weights.detach()), dtype)
    ref = None if ref_logp is None else rows.select(ref_logp.detach(), dtype)
    bonus = None if entropy is None else rows.select(entropy, dtype)

    token_log_ratio = new - old
    log_ratio = _log_ratio(token_log_ratio, new, rows, terms)
    ratio = log_ratio.exp()
    policy, is_clipped, is_dual = _surrogate(new, log_ratio, ratio.detach(), adv, terms)
    if weight is not None:
        policy = policy * weight
    policy_term = aggregate(policy, rows, agg, denom)
    kl = torch.zeros_like(new)
    kl_term = entropy_term = policy_term.new_zeros(())
    loss = policy_term
    if ref is not None:
        kl, weighted_kl = _kl(new, ref, ratio, terms)
        kl_term = aggregate(weighted_kl, rows, agg, denom)
        loss = loss + terms.kl_coef * kl_term
    if bonus is not None:
        entropy_term = aggregate(bonus, rows, agg, denom)
        loss = loss - terms.entropy_coef * entropy_term

    with torch.no_grad():
        finite = torch.ones_like(rows.valid)
        for x in (new, old, adv, weight, ref, bonus):
            if x is not None:
                finite = finite & x.isfinite()
        shown = token_log_ratio
        if terms.ratio == "token":
            shown = log_ratio
        # Masked tokens have a ratio of 1, which is not counted.
        at_valid = rows.valid & ~ratio.isnan()
        low = _with_default(torch.where(at_valid, ratio, math.inf), math.inf).amin()
        high = _with_default(torch.where(at_valid, ratio, -math.inf), -math.inf).amax()
        num_tokens = rows.num_tokens()
        is_high = (adv > 0) & (ratio > 1 + terms.clip_high)
        is_low = (adv < 0) & (ratio < 1 - terms.clip_low)

        def total(x: Tensor) -> Tensor:
            return torch.where(rows.valid, x, 0).sum(dtype=torch.float64)

        metrics = torch.stack(
            [
                num_tokens,
                rows.num_sequences(),
                total(~finite),
                total(is_high),
                total(is_low),
                total(is_clipped),
                total(is_dual),
                total(-shown),
                total(torch.expm1(log_ratio) - log_ratio),
                total(kl),
                total(torch.zeros_like(new) if bonus is None else bonus),
                total(ratio),
                total(ratio.square()),
                torch.where(num_tokens > 0, low.double(), 1.0),
                torch.where(num_tokens > 0, high.double(), 1.0),
                policy_term.double(),
                kl_term.double(),
                entropy_term.double(),
            ]
        )
    return loss, metrics


def _clamp(x: Tensor, low: float, high: float) -> Tensor:
    """Clamp with gradient 1 inside and at the bounds, 0 outside; ``torch.clamp`` differs between releases at the bounds."""
    return torch.where(x > high, high, torch.where(x < low, low, x))


def _log_ratio(token_log_ratio: Tensor, new: Tensor, rows: TokenRows, terms: Terms) -> Tensor:
    """The logarithm of the ratio at each token, clamped; 0 where masked, so that no ratio overflows there."""
    bound = terms.log_ratio_clamp
    if terms.ratio == "token":
        return _clamp(token_log_ratio, -bound, bound)
    mean = rows.sums(token_log_ratio) / rows.counts.clamp(min=1).to(token_log_ratio.dtype)
    if terms.ratio == "sequence":
        return _clamp(torch.where(rows.valid, rows.spread(mean), 0.0), -bound, bound)
    # The value of the mean with the gradient of the token's own log-probability.
    own = new.nan_to_num(0.0, 0.0, 0.0)
    value = torch.where(rows.valid, rows.spread(mean.detach()), 0.0)
    return _clamp(own - own.detach() + value, -bound, bound)


def _surrogate(
    new: Tensor, log_ratio: Tensor, ratio: Tensor, adv: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    """The policy loss of each token, and where the clip and the dual clip decide it. ``ratio`` has no gradient."""
    nowhere = torch.zeros_like(new, dtype=torch.bool)
    if terms.surrogate == "reinforce":
        return -adv * new, nowhere, nowhere
    clipped_ratio = _clamp(ratio, 1 - terms.clip_low, 1 + terms.clip_high)
    if terms.surrogate == "cispo":
        return -clipped_ratio * adv * new, ratio != clipped_ratio, nowhere
    plain = -adv * _clamp(ratio, -math.inf, terms.ratio_cap)
    clipped = -adv * clipped_ratio
    is_clipped = clipped > plain
    larger = torch.where(is_clipped, clipped, plain)
    is_dual = (adv < 0) & (larger > -adv * terms.dual_clip)
    in_range = ratio == clipped_ratio
    has_gradient = torch.where(is_clipped, in_range, ~(ratio > terms.ratio_cap)) & ~is_dual
    value = torch.where(is_dual, -adv * terms.dual_clip, larger)
    # The gradient enters before exp: behind it, 0 * inf of a clipped token whose ratio overflowed would be NaN.
    moving = -adv * torch.where(has_gradient, log_ratio, log_ratio.detach()).exp()
    return torch.where(has_gradient, moving, value), is_clipped, is_dual


def _kl(new: Tensor, ref: Tensor, ratio: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """The estimator, and what the loss contains of it: the same, or with another gradient, or times the ratio."""
    x = new - ref
    if terms.kl == "k1":
        kl = x
    elif terms.kl == "abs":
        kl = x.abs()
    elif terms.kl == "k2":
        kl = x.square() / 2
    else:
        y = _clamp(-x, -terms.kl_input_clamp, terms.kl_input_clamp)
        kl = _clamp(torch.expm1(y) - y, -terms.kl_clamp, terms.kl_clamp)
    if terms.kl_grad == "k2":
        constant = x.detach()
        return kl, kl.detach() + constant * (x - constant)
    return kl, kl * ratio if terms.kl_grad == "ratio" else kl


def _with_default(x: Tensor, default: float) -> Tensor:
    """``x`` flat with one more element, so that it can be reduced when it is empty."""
    return torch.cat([x.reshape(-1), x.new_full((1,), default)])
