"""``torch.ops.fastrl.masked_moments`` and ``whiten_apply``: schemas and fake kernels.

They are two ops because the merge across ranks stands between them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl import _library

EPS_MODES = {"rsqrt_add": 0, "rsqrt_max": 1, "std_add": 2}


def _fake_moments(x: Tensor, mask: Tensor | None) -> Tensor:
    return x.new_empty((3,), dtype=torch.float64)


def _fake_apply(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=_library.result_dtype(x.dtype))


masked_moments_op = _library.define(
    "masked_moments", "(Tensor x, Tensor? mask) -> Tensor", _fake_moments
)
whiten_apply_op = _library.define(
    "whiten_apply",
    "(Tensor x, Tensor? mask, Tensor moments, int ddof, float eps, int eps_mode, bool shift_mean) -> Tensor",
    _fake_apply,
)

for _name in ("masked_moments", "whiten_apply"):
    _library.implement_in_triton(_name, "fastrl.ops.whiten.triton")
