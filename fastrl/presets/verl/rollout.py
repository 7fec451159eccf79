"""Rollout correction of verl: importance weights and rejection."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from fastrl.errors import ArgumentError
from fastrl.presets._tokens import masked_mean, masked_row_mean
from fastrl.surrogates import RolloutCorrection, rejection_mask, rollout_correction


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: str | float = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """TIS with one threshold, IcePop with ``"low_high"``, and verl's statistics of the weights."""
    lowest, _, highest = str(rollout_is_threshold).rpartition("_")
    low, high = float(lowest) if lowest else None, float(highest)
    out = rollout_correction(
        *(log_ratio, torch.zeros_like(log_ratio), response_mask),
        level=rollout_is,
        low=low,
        high=high,
        beyond="zero" if lowest else "clamp",
    )
    weights, valid = out.weights, response_mask != 0
    bounds = (1 / high if low is None else low, high)
    metrics = _weight_metrics(out, valid, *bounds)
    if rollout_is == "sequence":
        metrics |= _sequence_weight_metrics(log_ratio, valid, *bounds)
    if low is not None:
        metrics["rollout_is_oob_ratio"] = masked_mean(
            ((out.raw < low) | (out.raw > high)).float(), valid
        )
    if rollout_is_batch_normalize:
        if rollout_is == "sequence":
            mean = _mean_of_all(masked_row_mean(weights, valid).squeeze(-1), valid.any(-1))
        else:
            mean = _mean_of_all(weights, valid)
        mean = torch.where(mean > 1e-8, mean, 1.0)
        weights, metrics["rollout_is_batch_norm_factor"] = weights / mean, mean
    return weights, metrics


def _weight_metrics(
    out: RolloutCorrection, valid: Tensor, low: float, high: float
) -> dict[str, Tensor]:
    weights, raw = out.weights, out.raw
    bounded = weights.clamp(0.0, high)
    mean, square = masked_mean(bounded, valid), masked_mean(bounded.square(), valid)
    rows, raw_rows = (
        masked_row_mean(weights, valid).squeeze(-1),
        masked_row_mean(raw, valid).squeeze(-1),
    )
    several = len(rows) > 1
    return {
        "rollout_is_mean": out.metrics["mean"],
        "rollout_is_max": out.metrics["max"],
        "rollout_is_min": out.metrics["min"],
        "rollout_is_ratio_fraction_high": masked_mean((raw > high).float(), valid),
        "rollout_is_ratio_fraction_low": masked_mean((raw < low).float(), valid),
        "rollout_is_std": (square - mean.square()).clamp(min=0.0).sqrt(),
        "rollout_is_eff_sample_size": (mean + 1e-8).square() / square,
        "rollout_is_seq_mean": rows.mean(),
        "rollout_is_seq_std": rows.std() if several else torch.zeros_like(mean),
        "rollout_is_seq_max": rows.max(),
        "rollout_is_seq_min": rows.min(),
        "rollout_is_seq_max_deviation": (rows - 1.0).abs().max(),
        "rollout_is_seq_fraction_high": (raw_rows > high).float().mean(),
        "rollout_is_seq_fraction_low": (raw_rows < low).float().mean(),
    }


def _sequence_weight_metrics(
    log_ratio: Tensor, valid: Tensor, low: float, high: float
) -> dict[str, Tensor]:
    """Extremes and shares of whole rows, before the bounds."""
    total = torch.where(valid, log_ratio, 0.0).sum(-1)
    return {
        "rollout_is_max": total.max().clamp(max=20.0).exp(),
        "rollout_is_min": total.min().exp(),
        "rollout_is_ratio_fraction_high": (total > math.log(high)).float().mean(),
        "rollout_is_ratio_fraction_low": (total < math.log(low)).float().mean(),
    }


@torch.no_grad()
def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, Tensor]:
    """Perplexities of trainer and engine, KL and chi-square between them."""
    valid = response_mask != 0
    training = masked_row_mean(old_log_prob, valid).squeeze(-1)
    metrics = {
        "training_ppl": (-training).exp().mean(),
        "training_log_ppl": (-training).mean(),
    }
    if rollout_log_prob is None:
        return metrics
    rollout = masked_row_mean(rollout_log_prob, valid).squeeze(-1)
    log_ratio = torch.where(valid, old_log_prob - rollout_log_prob, 0.0)
    difference = rollout - training
    return metrics | {
        "kl": masked_mean(-log_ratio, valid),
        "k3_kl": masked_mean(torch.expm1(log_ratio) - log_ratio, valid),
        "rollout_ppl": (-rollout).exp().mean(),
        "rollout_log_ppl": (-rollout).mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
        "chi2_token": masked_mean((2 * log_ratio.clamp(-20.0, 20.0)).exp(), valid) - 1.0,
        "chi2_seq": (2 * log_ratio.sum(-1).clamp(-20.0, 20.0)).exp().mean() - 1.0,
    }


def _mean_of_all(x: Tensor, valid: Tensor) -> Tensor:
    """The mean over the batches of all processes."""
    total = torch.stack([torch.where(valid, x, 0.0).sum(), valid.sum().to(x.dtype)])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    return total[0] / total[1].clamp(min=1)


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
