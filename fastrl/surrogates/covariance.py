"""Losses that hold back the tokens whose covariance of advantage and log-probability drives entropy down."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl import _checks
from fastrl.surrogates._tokens import Tokens, clamp
from fastrl.surrogates.losses import SurrogateLoss


def _covariance(tokens: Tokens) -> Tensor:
    """(A - mean A)(logp - mean logp), means over the valid tokens."""
    count = tokens.rows.num_tokens().clamp(min=1)
    logp = tokens.logp.detach()
    mean_advantage = (tokens.total(tokens.advantages) / count).to(tokens.dtype)
    mean_logp = (tokens.total(logp) / count).to(tokens.dtype)
    return (tokens.advantages - mean_advantage) * (logp - mean_logp)


def clip_cov_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    fraction: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    generator: torch.Generator | None = None,
    is_weights: Tensor | None = None,
    agg: str = "token_mean",
    denom: float | Tensor | None = None,
) -> SurrogateLoss:
    r"""The clipped loss without a random few of the tokens whose covariance lies between two bounds.

    Of the valid tokens that the clip does not decide and with ``cov_low < cov < cov_high``, cov = (A - mean A)(logp - mean
    logp), ``max(int(fraction * tokens), 1)`` are drawn and leave the loss (they stay in its divisor).

    Args:
        logp, old_logp, advantages, mask, clip_low, clip_high, is_weights, agg, denom: as in :func:`fastrl.policy_loss`,
            padded. The log-ratio is not clamped.
        fraction, cov_low, cov_high: see above.
        generator: of the draw, on CPU; None: torch's own, so that ``torch.manual_seed`` repeats it.

    Returns:
        ``SurrogateLoss``; metrics ``tokens``, ``approx_kl``, ``dropped``. Waits for the device: the draw needs a count.

    Source: Cui et al., The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models (2025); verl
    ``clip_cov``.

    >>> logp = torch.tensor([[-1.0, -5.0, -1.0]], requires_grad=True)
    >>> out = clip_cov_loss(logp, logp.detach(), torch.tensor([[1.0, -2.0, 1.0]]))
    >>> int(out.metrics["dropped"])
    1
    """
    name = "clip_cov_loss"
    _checks.number(name, "fraction", fraction, 1e-12)
    tokens = Tokens(name, logp, old_logp, advantages, mask, is_weights)
    log_ratio = tokens.logp - tokens.old_logp
    ratio = log_ratio.exp()
    plain = -tokens.advantages * ratio
    clipped = -tokens.advantages * clamp(ratio, 1 - clip_low, 1 + clip_high)
    is_clipped = clipped > plain
    cov = _covariance(tokens)
    candidates = (tokens.valid & ~is_clipped & (cov > cov_low) & (cov < cov_high)).nonzero()
    count = max(int(fraction * int(tokens.rows.num_tokens())), 1)
    order = torch.randperm(len(candidates), generator=generator)[:count]
    drawn = candidates[order.to(candidates.device)]
    dropped = torch.zeros_like(tokens.valid)
    dropped[drawn[:, 0], drawn[:, 1]] = True
    per_token = torch.where(dropped, 0.0, torch.where(is_clipped, clipped, plain))
    return SurrogateLoss(
        tokens.loss(per_token, agg, denom), tokens.metrics(log_ratio, dropped=dropped)
    )


def kl_cov_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    fraction: float = 2e-4,
    kl_coef: float = 1.0,
    is_weights: Tensor | None = None,
    agg: str = "token_mean",
    denom: float | Tensor | None = None,
) -> SurrogateLoss:
    r"""The unclipped loss with a penalty ``kl_coef |logp - old_logp|`` at the tokens with the largest covariance.

    ``max(int(fraction * tokens), 1)`` tokens by cov = (A - mean A)(logp - mean logp).

    Args:
        logp, old_logp, advantages, mask, is_weights, agg, denom: as in :func:`fastrl.policy_loss`, padded. The log-ratio
            is not clamped.
        fraction, kl_coef: see above.

    Returns:
        ``SurrogateLoss``; metrics ``tokens``, ``approx_kl``, ``abs_kl``, ``penalised``. Waits for the device.

    Source: Cui et al. (2025), see :func:`clip_cov_loss`; verl ``kl_cov``.

    >>> logp = torch.tensor([[-1.0, -5.0]], requires_grad=True)
    >>> out = kl_cov_loss(logp, logp.detach() - 0.5, torch.tensor([[1.0, -2.0]]))
    >>> int(out.metrics["penalised"])
    1
    """
    name = "kl_cov_loss"
    _checks.number(name, "fraction", fraction, 1e-12, 1.0)
    tokens = Tokens(name, logp, old_logp, advantages, mask, is_weights)
    log_ratio = tokens.logp - tokens.old_logp
    cov = torch.where(tokens.valid, _covariance(tokens), -torch.inf).reshape(-1)
    num_tokens = int(tokens.rows.num_tokens())
    count = min(max(int(num_tokens * fraction), 1), num_tokens)
    penalised = torch.zeros_like(cov, dtype=torch.bool)
    penalised[cov.topk(count).indices] = True
    penalised = penalised.view_as(tokens.valid)
    distance = log_ratio.abs()
    per_token = -tokens.advantages * log_ratio.exp() + torch.where(
        penalised, kl_coef * distance, 0.0
    )
    metrics = tokens.metrics(log_ratio, abs_kl=distance, penalised=penalised)
    return SurrogateLoss(tokens.loss(per_token, agg, denom), metrics)
