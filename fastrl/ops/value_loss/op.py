"""``torch.ops.fastrl.value_loss``: schema, fake kernel and the autograd function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastrl import _library, _losses

# Sums over valid tokens.
VALUE_METRICS = (
    *("tokens", "sequences", "nonfinite", "clipped", "error_sum", "error_sq_sum"),
    *("return_sum", "return_sq_sum", "value_sum"),
)


def _fake(
    values: Tensor,
    old_values: Tensor | None,
    returns: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    denom_tensor: Tensor | None,
    denom: float,
    clip: float,
    huber_delta: float,
    agg: int,
    grad_values: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        values.new_empty((), dtype=_library.result_dtype(values.dtype)),
        values.new_empty((len(VALUE_METRICS),), dtype=torch.float64),
        values.new_empty(values.shape if grad_values else (0,)),
    )


value_loss_op = _library.define(
    "value_loss",
    "(Tensor values, Tensor? old_values, Tensor returns, Tensor? mask, Tensor? cu_seqlens, Tensor? denom_tensor, "
    "float denom, float clip, float huber_delta, int agg, bool grad_values) -> (Tensor, Tensor, Tensor)",
    _fake,
)

_library.implement_in_triton("value_loss", "fastrl.ops.value_loss.triton")


class ValueLossFunction(torch.autograd.Function):
    """First-order gradient with respect to values, computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, others: tuple[Any, ...], impl: str
    ) -> tuple[Tensor, Tensor]:
        loss, metrics, grad_values = value_loss_op[impl](values, *others, True)
        ctx.save_for_backward(grad_values)
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Any, ...]:
        (grad_values,) = ctx.saved_tensors
        return _losses.scaled(grad_values, grad_loss), None, None
