"""Log-probabilities over a vocabulary that is spread over the ranks of a process group."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


def group_of(name: str) -> Any:
    """The process group that an operator was given by name, because schemas have no type for one."""
    return torch._C._distributed_c10d._resolve_process_group(cast(Any, name))


def merged(
    logp: Tensor, statistics: Tensor, is_here: Tensor, by: Tensor | float, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """logp, entropy and statistics over all classes from those over the classes of each rank.

    Every rank merges the same numbers in the order of the ranks, in float64, so all get the same bits. ``by`` is the
    temperature, ``is_here`` says which targets are classes of this rank. A target that is nowhere gives NaN.
    """
    largest, total, mean = statistics.unbind(1)
    target = logp + total.log()  # relative to the largest logit here
    local = torch.stack([largest, total, mean, target, is_here.to(logp.dtype)])
    ranks = [torch.empty_like(local) for _ in range(dist.get_world_size(group_of(group)))]
    dist.all_gather(ranks, local, group=group_of(group))
    largest, total, mean, target, here = torch.stack(ranks).double().unbind(1)  # [ranks, N] each

    top = largest.amax(0)
    # A rank with nothing but impossible classes adds nothing; NaN in a sum must stay.
    is_empty = (largest == -torch.inf) & ~total.isnan()
    shift = torch.where(is_empty, 0.0, (largest - top) / by)
    factor = torch.where(is_empty, 0.0, shift.exp())
    weighted = torch.where(is_empty, 0.0, factor * (mean + shift) * total).sum(0)
    exps = torch.where(is_empty, 0.0, factor * total).sum(0)
    chosen = torch.where(is_empty, -torch.inf, target + shift)
    chosen = torch.where(here > 0, chosen, 0.0).sum(0).where(here.sum(0) > 0, torch.nan)

    all_logp = (chosen - exps.log()).clamp(max=0.0)
    all_mean = weighted / exps
    entropy = exps.log() - all_mean
    all_statistics = torch.stack([top, exps, all_mean], 1)
    return all_logp.to(logp.dtype), entropy.to(logp.dtype), all_statistics.to(logp.dtype)


def sum_over_ranks(x: Tensor, group: str) -> Tensor:
    """``x`` added up over the ranks, in float32 or better."""
    total = x.to(torch.promote_types(x.dtype, torch.float32))
    total = total.clone() if total is x else total
    dist.all_reduce(total, group=group_of(group))
    return total.to(x.dtype)
