"""The value loss in Triton: one pass over slots of tokens gives sums and the gradient."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastrl import _triton
from fastrl._library import result_dtype
from fastrl._triton_rows import (
    LossRows,
    add_lines,
    at_least,
    at_most,
    dense_row_stride,
    is_finite,
    row_weight,
    slot_tokens,
    store_sum,
)

# Columns of a line of sums: the metrics behind the two counts of a call, in their order, then the loss.
_COLUMNS, _LOSS = tl.constexpr(8), tl.constexpr(7)


@triton.jit
def _error_loss(error, delta):
    """e^2 / 2, beyond an error of delta linear; an infinite delta makes it the squared error."""
    inside = at_least(at_most(error, delta), -delta)
    return inside * (error - 0.5 * inside), inside


@_triton.jit
def value_loss_kernel(
    values, old_values, returns, mask, cu_seqlens, row_spans, totals, slot_sums, grad_values,
    num_rows: tl.int64, length: tl.int64, mask_stride: tl.int64, value_stride: tl.int64, old_stride: tl.int64,
    return_stride: tl.int64, out_stride: tl.int64, clip: tl.float64, huber_delta: tl.float64, AGG: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    row, start, count, column, exists, valid = slot_tokens(
        mask, cu_seqlens, row_spans, slot, num_rows, length, mask_stride
    )
    at = start + column
    value = tl.load(values + row * value_stride + at, mask=valid, other=0).to(T)
    target = tl.load(returns + row * return_stride + at, mask=valid, other=0).to(T)
    finite = is_finite(value) & is_finite(target)
    error = value - target
    delta = tl.full([], huber_delta, T)
    loss, d_value = _error_loss(error, delta)
    is_clipped = valid & False
    if old_values is not None:
        old = tl.load(old_values + row * old_stride + at, mask=valid, other=0).to(T)
        finite = finite & is_finite(old)
        reach = tl.full([], clip, T)
        near = at_least(at_most(value, old + reach), old - reach)
        clipped, _ = _error_loss(near - target, delta)
        is_clipped = clipped > loss
        loss = tl.where(is_clipped, clipped, loss)
        # The value lies outside of the clip, and nothing depends on it.
        d_value = tl.where(is_clipped, 0, d_value)
    store_sum(slot_sums, slot, 0, tl.where(finite, 0, 1), _COLUMNS)
    store_sum(slot_sums, slot, 1, is_clipped.to(tl.int32), _COLUMNS)
    store_sum(slot_sums, slot, 2, error, _COLUMNS)
    store_sum(slot_sums, slot, 3, error * error, _COLUMNS)
    store_sum(slot_sums, slot, 4, target, _COLUMNS)
    store_sum(slot_sums, slot, 5, target * target, _COLUMNS)
    store_sum(slot_sums, slot, 6, value, _COLUMNS)
    store_sum(slot_sums, slot, _LOSS, loss, _COLUMNS)
    if grad_values is not None:
        gradient = row_weight(totals, count, AGG).to(T) * d_value
        tl.store(grad_values + row * out_stride + at, tl.where(valid, gradient, 0), mask=exists)


@_triton.jit
def value_total_kernel(row_sums, totals, loss, metrics, num_rows: tl.int64, BLOCK: tl.constexpr):
    line = add_lines(row_sums, 0, num_rows, _COLUMNS, 0, 0, BLOCK)
    column = tl.arange(0, _COLUMNS)
    tl.store(loss, tl.sum(tl.where(column == _LOSS, line, 0), 0))
    tl.store(metrics, tl.load(totals))
    tl.store(metrics + 1, tl.load(totals + 1))
    tl.store(metrics + 2 + column, line, mask=column < _LOSS)


def value_loss(
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
    inputs = [_triton.unit_stride(x) for x in (values, old_values, returns)]
    rows = LossRows(values, mask, cu_seqlens, denom_tensor, denom, agg)
    slot_sums = rows.new_sums(_COLUMNS.value)
    gradient = values.new_empty(values.shape if grad_values else (0,))
    _triton.launch(
        value_loss_kernel,
        (rows.num_slots,),
        *(*inputs, *rows.tensors, slot_sums, gradient if grad_values else None),
        *(*rows.numbers, *map(_triton.row_stride, inputs), dense_row_stride(values)),
        *(clip, huber_delta),
        num_warps=4,
        AGG=agg,
        T=_triton.compute_type(values.dtype),
    )
    row_sums = rows.fold(slot_sums, FIRST_WEIGHTED=_LOSS.value, FIRST_PEAK=0, NUM_PEAKS=0)
    loss = values.new_empty((), dtype=result_dtype(values.dtype))
    metrics = slot_sums.new_empty((_LOSS.value + 2,))
    _triton.launch(
        value_total_kernel,
        (1,),
        *(row_sums, rows.totals, loss, metrics, rows.count),
        num_warps=8,
        BLOCK=256,
    )
    return loss, metrics, gradient
