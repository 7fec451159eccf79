"""AReaL's rejection of tokens or sequences that the proximal policy sees differently from the behaviour policy."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl._losses import TokenRows
from fastrl.errors import ArgumentError
from fastrl.presets._tokens import masked_mean, offsets_of
from fastrl.surrogates import kl_penalty


class RejectionSamplingResult(NamedTuple):
    """The mask of what is kept, the weight of each token (0 where masked), and the share that was rejected or clamped."""

    loss_mask: Tensor
    behave_imp_weight: Tensor
    filtered_fraction: Tensor


@torch.no_grad()
def apply_rejection_sampling(
    proximal_logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor | None,
    config: Any,
) -> RejectionSamplingResult:
    """``config`` has ``level``, ``action``, ``metric``, ``agg``, ``upper`` and ``lower``, as AReaL's.

    A log-ratio that is not finite counts as 0 in the weights. Ratios of a sequence are geometric, KL estimates arithmetic.
    """
    offsets = packed_offsets(proximal_logprobs, config.level, cu_seqlens)
    rows = TokenRows(proximal_logprobs, loss_mask, offsets)
    proximal, old = (rows.select(x, torch.float32) for x in (proximal_logprobs, old_logprobs))
    log_ratio = (proximal - old).nan_to_num(0.0, 0.0, 0.0)
    is_ratio = config.metric == "ratio"
    statistic = log_ratio
    if not is_ratio:
        statistic = kl_penalty(proximal, old, estimator=config.metric.removeprefix("kl_"))
    raw = log_ratio.exp()
    if config.level == "sequence":
        count = rows.counts.clamp(min=1).float()
        if is_ratio:
            raw = rows.spread(rows.sums(log_ratio) / count).exp().expand_as(log_ratio)
        statistic = rows.spread(_aggregate(statistic, rows, config.agg, count))
    if is_ratio:
        statistic = statistic.exp()
    lower = -math.inf if config.lower is None else config.lower
    within = ((statistic >= lower) & (statistic <= config.upper)).expand_as(rows.valid)
    if config.action == "mask":
        kept, weight, filtered = rows.valid & within, raw, ~within
    else:
        bounded = raw.clamp(0.0 if config.lower is None else config.lower, config.upper)
        # A token is clamped by its own weight, a sequence as a whole by the statistic it is judged by.
        kept, weight = (
            rows.valid,
            bounded if config.level == "token" else torch.where(within, raw, bounded),
        )
        filtered = weight != raw
    return RejectionSamplingResult(
        kept.to(loss_mask.dtype),
        torch.where(kept, weight, 0.0),
        masked_mean(filtered.float(), rows.valid),
    )


def _aggregate(x: Tensor, rows: TokenRows, how: str, count: Tensor) -> Tensor:
    """``[B]``: sum, mean or largest of the valid tokens of each row, 0 for a row without one."""
    if how == "max":
        lowest = torch.where(rows.valid, x, -math.inf)
        if rows.cu_seqlens is None:
            largest = lowest.amax(-1)
        else:
            lengths = rows.cu_seqlens.diff().long()
            largest = torch.segment_reduce(lowest, "max", lengths=lengths, initial=-math.inf)
        return torch.where(rows.counts > 0, largest, 0.0)
    total = rows.sums(x)
    return total / count if how == "mean" else total


def packed_offsets(logprobs: Tensor, level: str, cu_seqlens: Tensor | None) -> Tensor | None:
    """Where packed sequences ``[N]`` start, None for ``[B, S]``; to the token level all may be one sequence."""
    if logprobs.dim() != 1:
        return None
    if cu_seqlens is None and level == "sequence":
        raise ArgumentError(
            "fastrl.presets.areal: cu_seqlens must be given for packed tensors at level 'sequence', got None; "
            "pass where each sequence starts, and the end"
        )
    return offsets_of([logprobs.shape[0]], logprobs.device) if cu_seqlens is None else cu_seqlens
