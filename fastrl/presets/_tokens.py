"""What presets share: rows end to end, groups side by side, means over valid tokens, the clipped loss of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.errors import ArgumentError
from fastrl.surrogates import kl_penalty

# Where a trainer does not clamp the log-ratio: beyond it float32 overflows, and the gradient with it.
OVERFLOW = 80.0


class NotCovered(ArgumentError):
    """An option that only the trainer's own function has; integrations call that instead."""


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the valid elements, 0 without one."""
    valid = mask != 0
    return torch.where(valid, x, 0.0).sum() / valid.sum().clamp(min=1)


def masked_row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """``[B, 1]`` means over the valid tokens of each row ``[B, T]``, 0 without one."""
    valid = mask != 0
    total = torch.where(valid, x, 0.0).sum(-1, keepdim=True)
    return total / valid.sum(-1, keepdim=True).clamp(min=1)


def kl_by_name(logp: Tensor, ref_logp: Tensor, name: str, gradient: str = "pathwise") -> Tensor:
    """KL per token, "kl", "abs", "mse" or "low_var_kl", or k1 to k3, which is clamped: its log-ratio at 20, itself at 10."""
    estimator = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(name, name)
    return kl_penalty(
        *(logp, ref_logp),
        estimator=estimator,
        gradient=gradient,
        input_clamp=20.0,
        clamp_value=10.0 if estimator == "k3" else None,
    )


def neighbours(number: int, group_size: int, device: torch.device) -> Tensor:
    """``[number]`` ids of groups whose members lie side by side."""
    return torch.arange(number, device=device) // group_size


def offsets_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """``cu_seqlens`` int32 of rows with these lengths."""
    ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return ends.to(device, torch.int32)


def end_to_end(rows: Sequence[Tensor]) -> Tensor:
    """Rows of a list as one packed tensor."""
    return torch.cat([row.reshape(-1) for row in rows])


class ClipTerms(NamedTuple):
    """Per token, 0 or False where masked: the loss, whether the clipped term is it, whether the dual clip bounds it."""

    loss: Tensor
    is_clipped: Tensor
    is_dual_clipped: Tensor


@torch.no_grad()
def clip_terms(
    ratio: Tensor, advantages: Tensor, valid: Tensor, low: float, high: float, dual: float | None
) -> ClipTerms:
    """What trainers log of each token; the loss itself comes from ``fastrl.policy_loss`` in one pass."""
    plain = torch.where(valid, -advantages * ratio, 0.0)
    clipped = torch.where(valid, -advantages * ratio.clamp(1 - low, 1 + high), 0.0)
    loss = torch.maximum(plain, clipped)
    is_dual_clipped = torch.zeros_like(valid)
    if dual is not None:
        bound = torch.where(valid, dual * advantages.abs(), 0.0)
        is_dual_clipped = bound < loss
        loss = torch.minimum(loss, bound)
    return ClipTerms(loss, plain < clipped, is_dual_clipped)
