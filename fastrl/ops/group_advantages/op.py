"""``torch.ops.fastrl.group_advantages``: schema and fake kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastrl import _library

BASELINES = {"mean": 0, "leave_one_out": 1, "length_weighted": 2, "none": 3}
SCALES = {"std": 0, "batch_std": 1, "mean": 2, "none": 3}


def _fake(
    rewards: Tensor,
    groups: Tensor,
    valid: Tensor | None,
    weights: Tensor | None,
    mask: Tensor | None,
    *_: Any,
) -> Tensor:
    shape = rewards.shape[:1] if mask is None else mask.shape
    return rewards.new_empty(shape, dtype=_library.result_dtype(rewards.dtype))


group_advantages_op = _library.define(
    "group_advantages",
    "(Tensor rewards, Tensor groups, Tensor? valid, Tensor? weights, Tensor? mask, int baseline, int scale, "
    "int ddof, float eps, bool singleton_raw) -> Tensor",
    _fake,
)

_library.implement_in_triton("group_advantages", "fastrl.ops.group_advantages.triton")
