"""Statistics of several ranks as one: count, mean and sum of squared deviations, merged in the order of the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def merge_moments(parts: Tensor) -> Tensor:
    """``[3]`` for the union of the samples behind each row of ``parts [R, 3]``; empty rows count for nothing."""
    count, mean, m2 = parts.unbind(1)
    is_filled = count > 0
    # Measured from the mean of a rank, equal means merge without rounding, so equal values everywhere whiten to 0.
    origin = mean.gather(0, is_filled.int().argmax(0, keepdim=True))
    offsets = torch.where(is_filled, mean - origin, 0.0)
    total = count.sum(0, keepdim=True)
    shift = (count * offsets).sum(0, keepdim=True) / total.clamp(min=1)
    between = (count * (offsets - shift).square()).sum(0, keepdim=True)
    return torch.cat([total, origin + shift, m2.sum(0, keepdim=True) + between])


def gathered_moments(moments: Tensor, process_group: dist.ProcessGroup) -> Tensor:
    """The same bits on every rank: each merges the same rows in the same order."""
    parts = [torch.empty_like(moments) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(parts, moments, group=process_group)
    return merge_moments(torch.stack(parts))
