"""Rollout correction of verl: importance weights and rejection."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.errors import ArgumentError
from fastrl.surrogates import rejection_mask, rollout_correction


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: str | float = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """TIS with one threshold, IcePop with ``"low_high"``. Metrics: mean, min, max and the shares beyond the bounds."""
    low, _, high = str(rollout_is_threshold).rpartition("_")
    out = rollout_correction(
        *(log_ratio, torch.zeros_like(log_ratio), response_mask),
        level=rollout_is,
        low=float(low) if low else None,
        high=float(high),
        beyond="zero" if low else "clamp",
        normalise=rollout_is_batch_normalize,
    )
    names = {
        "rollout_is_mean": "mean",
        "rollout_is_ratio_fraction_high": "fraction_high",
        "rollout_is_eff_sample_size": "ess",
    }
    return out.weights, {theirs: out.metrics[ours] for theirs, ours in names.items()}


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: str | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The response mask without the rejected tokens, by every option of ``rollout_rs``, and the rejected shares."""
    options = list(dict.fromkeys(part.strip() for part in rollout_rs.split(",") if part.strip()))
    limits = [part.strip() for part in str(rollout_rs_threshold).split(",")]
    if rollout_rs_threshold is None or len(limits) not in (1, len(options)):
        raise ArgumentError(
            f"verl rollout_rs: rollout_rs_threshold must be one number, or one per option ({len(options)}), "
            f"got {rollout_rs_threshold!r}"
        )
    valid = response_mask != 0
    keep, metrics = valid, {}
    for option, limit in zip(options, limits * (len(options) if len(limits) == 1 else 1)):
        reduce, _, statistic = option.removeprefix("seq_").rpartition("_")
        low, _, high = limit.rpartition("_")
        kept = rejection_mask(
            *(log_ratio, torch.zeros_like(log_ratio), response_mask),
            statistic=statistic,
            reduce=reduce,
            low=float(low) if low else None,
            high=float(high),
        )
        count = valid.sum().clamp(min=1)
        metrics[f"rollout_rs_{option}_masked_fraction"] = (valid & ~kept).sum() / count
        keep = keep & kept
    metrics["rollout_rs_masked_fraction"] = (valid & ~keep).sum() / valid.sum().clamp(min=1)
    rows = (valid & ~keep).any(-1).float()
    metrics["rollout_rs_seq_masked_fraction"] = rows.mean()
    return torch.where(keep, response_mask, torch.zeros_like(response_mask)), metrics
