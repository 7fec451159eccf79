"""``torch.ops.fastrl.affine_scan`` and its adjoint: schemas, fake kernels and the autograd function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastrl import _library


def _new(like: Tensor) -> Tensor:
    return like.new_empty(like.shape, dtype=_library.result_dtype(like.dtype))


def _fake(a: Tensor, *_: Any) -> Tensor:
    return _new(a)


def _fake_backward(
    grad_x: Tensor,
    a: Tensor,
    x: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = a.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return _new(a), _new(a), _new(a).new_empty((rows,))


affine_scan_op = _library.define(
    "affine_scan",
    "(Tensor a, Tensor b, Tensor? initial, Tensor? cu_seqlens, bool reverse) -> Tensor",
    _fake,
)
affine_scan_backward_op = _library.define(
    "affine_scan_backward",
    "(Tensor grad_x, Tensor a, Tensor x, Tensor? initial, Tensor? cu_seqlens, bool reverse)"
    " -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)


for _name in ("affine_scan", "affine_scan_backward"):
    _library.implement_in_triton(_name, "fastrl.ops.affine_scan.triton")


class AffineScanFunction(torch.autograd.Function):
    """First-order gradients with respect to a, b and initial."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        initial: Tensor | None,
        cu_seqlens: Tensor | None,
        reverse: bool,
        impl: str,
    ) -> Tensor:
        x: Tensor = affine_scan_op[impl](a, b, initial, cu_seqlens, reverse)
        ctx.save_for_backward(a, x, initial, cu_seqlens)
        ctx.reverse, ctx.b_dtype, ctx.impl = reverse, b.dtype, impl
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Any, ...]:
        a, x, initial, cu_seqlens = ctx.saved_tensors
        grad_a, grad_b, grad_initial = affine_scan_backward_op[ctx.impl](
            grad_x, a, x, initial, cu_seqlens, ctx.reverse
        )
        return (
            grad_a.to(a.dtype),
            grad_b.to(ctx.b_dtype),
            grad_initial if ctx.needs_input_grad[2] else None,
            None,
            None,
            None,
        )
