"""The definition of group advantages in plain torch and float64: index_add over dense group numbers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastrl._library import result_dtype


class Members(NamedTuple):
    """Who takes part in the statistics; one column per objective."""

    scores: Tensor  # [N, K] float64, 0 where not scored
    is_scored: Tensor  # [N, K] bool
    group: Tensor  # [N] int64 in [0, N)
    size: Tensor  # [N, K] float64, scored members of the sample's group


def members_of(
    rewards: Tensor,
    groups: Tensor,
    valid: Tensor | None,
    weights: Tensor | None,
    mask: Tensor | None,
) -> Members:
    """Scores of ``[N]``, ``[N, K]`` (with weights) or token rewards ``[N, T]``, and who is scored."""
    if weights is not None:
        scores = rewards.double()
    elif rewards.dim() == 1:
        scores = rewards.double().unsqueeze(1)
    else:
        tokens = rewards if mask is None else torch.where(mask != 0, rewards, 0.0)
        scores = tokens.double().sum(1, keepdim=True)
    is_scored = ~scores.isnan()
    if valid is not None:
        is_scored = is_scored & (valid != 0).unsqueeze(1)
    group = _dense(groups)
    size = _group_sum(is_scored.double(), group)
    return Members(torch.where(is_scored, scores, 0.0), is_scored, group, size)


def group_advantages_reference(
    rewards: Tensor,
    groups: Tensor,
    valid: Tensor | None,
    weights: Tensor | None,
    mask: Tensor | None,
    baseline: str,
    scale: str,
    ddof: int,
    eps: float,
    singleton: str,
) -> Tensor:
    """Advantages ``[N]``, or ``[N, T]`` with a mask; ``groups`` int64, ``weights`` float64 ``[K]``."""
    scores, is_scored, group, size = members_of(rewards, groups, valid, weights, mask)
    mean = _group_sum(scores, group) / size.clamp(min=1)
    if baseline == "none":
        centred = scores
    elif baseline == "length_weighted":
        centred = scores - _length_weighted_mean(scores, is_scored, group, mask)
    elif baseline == "leave_one_out":  # s - mean of the others
        centred = (scores - mean) * (size / (size - 1).clamp(min=1))
    else:
        centred = scores - mean
    if baseline != "none":
        all_equal = _all_equal(scores, is_scored, group)
        centred = torch.where(all_equal, 0.0, centred)

    if scale == "std":
        advantages = centred * _inverse_std(scores, is_scored, group, ddof, eps)
    elif scale == "batch_std":  # the batch is one big group
        batch = torch.zeros_like(group)
        advantages = centred * _inverse_std(scores, is_scored, batch, ddof, eps)
    elif scale == "mean":
        advantages = torch.where(centred == 0, 0.0, centred / (mean + eps))
    else:
        advantages = centred

    raw = scores if scale == "none" else scores / (1 + eps)
    alone = raw if singleton == "raw" else torch.zeros_like(raw)
    advantages = torch.where(size == 1, alone, advantages)
    advantages = torch.where(is_scored, advantages, 0.0)
    total = advantages.squeeze(1) if weights is None else (advantages * weights).sum(1)
    total = total.to(result_dtype(rewards.dtype))
    return total if mask is None else torch.where(mask != 0, total.unsqueeze(1), 0.0)


def _dense(groups: Tensor) -> Tensor:
    """Numbers in [0, N) that are equal where ``groups`` are; no shape depends on how many there are."""
    ordered, order = torch.sort(groups)
    is_new = torch.ones_like(ordered)
    is_new[1:] = ordered[1:] != ordered[:-1]
    return torch.empty_like(ordered).scatter_(0, order, is_new.cumsum(0) - 1)


def _group_sum(x: Tensor, group: Tensor) -> Tensor:
    """For each sample, the sum of ``x [N, K]`` over its group."""
    return torch.zeros_like(x).index_add_(0, group, x)[group]


def _all_equal(scores: Tensor, is_scored: Tensor, group: Tensor) -> Tensor:
    """Whether all scored members of the sample's group have the same, finite score."""
    index = group.unsqueeze(1).expand_as(scores)

    def extreme(reduce: str, outside: float) -> Tensor:
        x = torch.where(is_scored, scores, outside)
        return torch.full_like(x, outside).scatter_reduce_(0, index, x, reduce).gather(0, index)

    low, high = extreme("amin", float("inf")), extreme("amax", -float("inf"))
    return (low == high) & low.isfinite()


def _inverse_std(scores: Tensor, is_scored: Tensor, group: Tensor, ddof: int, eps: float) -> Tensor:
    """1 / (std + eps) over the sample's group; 0 where its scores are all equal."""
    size = _group_sum(is_scored.double(), group)
    mean = _group_sum(scores, group) / size.clamp(min=1)
    deviation = torch.where(is_scored, scores - mean, 0.0)
    variance = _group_sum(deviation.square(), group) / (size - ddof).clamp(min=1)
    return torch.where(_all_equal(scores, is_scored, group), 0.0, 1 / (variance.sqrt() + eps))


def _length_weighted_mean(
    scores: Tensor, is_scored: Tensor, group: Tensor, mask: Tensor | None
) -> Tensor:
    assert mask is not None
    length = torch.where(is_scored, (mask != 0).sum(1, keepdim=True).double(), 0.0)
    weighted = torch.where(length > 0, scores * length, 0.0)
    return _group_sum(weighted, group) / _group_sum(length, group).clamp(min=1)
