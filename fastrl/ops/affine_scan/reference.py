"""The definition of the affine scan in plain torch, one step at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl._library import result_dtype


def affine_scan_reference(
    a: Tensor, b: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None, reverse: bool
) -> Tensor:
    """``x`` over ``[B, T]`` rows, or over packed ``[N]`` rows with ``cu_seqlens``."""
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        rows = [slice(start, stop) for start, stop in zip(bounds[:-1], bounds[1:])]
        parts = [
            affine_scan_reference(
                a[row].unsqueeze(0),
                b[row].unsqueeze(0),
                None if initial is None else initial[i : i + 1],
                None,
                reverse,
            ).squeeze(0)
            for i, row in enumerate(rows)
        ]
        return torch.cat([a.new_zeros(0, dtype=result_dtype(a.dtype)), *parts])
    dtype = result_dtype(a.dtype)
    a, b = a.to(dtype), b.to(dtype)
    carry = a.new_zeros(a.shape[0]) if initial is None else initial.to(dtype)
    length = a.shape[1]
    x = [carry] * length
    for t in reversed(range(length)) if reverse else range(length):
        carry = a[:, t] * carry + b[:, t]
        x[t] = carry
    return torch.stack(x, 1) if x else a + b  # no elements, but part of the graph
