"""What the presets of several trainers share: rows in lists end to end, means over valid tokens, an exponent that cannot overflow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Where a trainer does not clamp the log-ratio: beyond it float32 overflows, and the gradient with it.
OVERFLOW = 80.0


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the valid elements, 0 without one."""
    valid = mask != 0
    return torch.where(valid, x, 0.0).sum() / valid.sum().clamp(min=1)


def offsets_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """``cu_seqlens`` int32 of rows with these lengths."""
    ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return ends.to(device, torch.int32)


def end_to_end(rows: Sequence[Tensor]) -> Tensor:
    """Rows of a list as one packed tensor."""
    return torch.cat([row.reshape(-1) for row in rows])
