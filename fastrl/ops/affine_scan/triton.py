"""The scan x_t = a_t x_{t+1} + b_t (or x_{t-1}, left to right) and its adjoint in Triton, a tile of a row at a time."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from fastrl import _triton
from fastrl._library import result_dtype
from fastrl._triton import edge, scan, spans, steps_to
from fastrl._triton_scan import (
    REDUCE,
    ScanRows,
    carry_into,
    completes,
    leave_steps,
    program_tile,
    tiles_end,
)


@_triton.jit
def affine_scan_kernel(
    a, b, initial, cu_seqlens, out, states,
    num_rows: tl.int64, length: tl.int64, num_slots: tl.int64, a_stride: tl.int64, b_stride: tl.int64,
    out_stride: tl.int64, PASS: tl.constexpr, REVERSE: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, first_tile = program_tile(cu_seqlens, num_rows, length, PASS, ROWS, BLOCK)
    start, size = spans(cu_seqlens, row, num_rows, length)
    lane = tl.arange(0, BLOCK)[None, :]
    a_row = a + (start + row * a_stride)[:, None]
    b_row = b + (start + row * b_stride)[:, None]
    out_row = out + (start + row * out_stride)[:, None]
    carry = tl.zeros([ROWS, 1], T)
    if initial is not None:
        carry = tl.load(initial + row, mask=row < num_rows, other=0)[:, None]
    carry = carry_into(carry, states, num_slots, 0, PASS)
    for tile in range(first_tile, tiles_end(first_tile, size, PASS, BLOCK)):
        if REVERSE:
            column = (size - (tile + 1) * BLOCK)[:, None] + lane
        else:
            column = tl.zeros_like(size)[:, None] + tile * BLOCK + lane
        inside = (column >= 0) & (column < size[:, None])
        factor = tl.load(a_row + column, mask=inside, other=1).to(T)
        term = tl.load(b_row + column, mask=inside, other=0).to(T)
        if PASS == REDUCE:
            factor, term = steps_to(factor, term, REVERSE)
            leave_steps(states, num_slots, factor, term, 0, REVERSE)
        else:
            x = scan(factor, term, carry, REVERSE)
            carry = edge(x, REVERSE)
            tl.store(out_row + column, x, mask=inside)


# With g the gradient of x, for the reverse scan: u_t = g_t + a_{t-1} u_{t-1} runs the other way, grad b_t = u_t,
# grad a_t = u_t x_{t+1}, and grad initial = a_T u_T.
@_triton.jit
def affine_scan_backward_kernel(
    grad_x, a, x, initial, cu_seqlens, grad_a, grad_b, grad_initial, states,
    num_rows: tl.int64, length: tl.int64, num_slots: tl.int64, grad_stride: tl.int64, a_stride: tl.int64,
    x_stride: tl.int64, out_stride: tl.int64, PASS: tl.constexpr, REVERSE: tl.constexpr, T: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, first_tile = program_tile(cu_seqlens, num_rows, length, PASS, ROWS, BLOCK)
    start, size = spans(cu_seqlens, row, num_rows, length)
    lane = tl.arange(0, BLOCK)[None, :]
    grad_row = grad_x + (start + row * grad_stride)[:, None]
    a_row = a + (start + row * a_stride)[:, None]
    x_row = x + (start + row * x_stride)[:, None]
    out_row = (start + row * out_stride)[:, None]
    first = tl.zeros([ROWS, 1], T)
    if initial is not None:
        first = tl.load(initial + row, mask=row < num_rows, other=0)[:, None].to(T)
    NEXT: tl.constexpr = 1 if REVERSE else -1  # where the forward scan came from
    carry = carry_into(tl.zeros([ROWS, 1], T), states, num_slots, 0, PASS)
    for tile in range(first_tile, tiles_end(first_tile, size, PASS, BLOCK)):
        if REVERSE:
            column = tl.zeros_like(size)[:, None] + tile * BLOCK + lane
        else:
            column = (size - (tile + 1) * BLOCK)[:, None] + lane
        inside = (column >= 0) & (column < size[:, None])
        is_first = inside & ((column == 0) if REVERSE else (column == size[:, None] - 1))
        is_last = inside & ((column == size[:, None] - 1) if REVERSE else (column == 0))
        factor = tl.load(a_row + column - NEXT, mask=inside & ~is_first, other=0).to(T)
        grad = tl.load(grad_row + column, mask=inside, other=0).to(T)
        factor = tl.where(inside, factor, 1)
        if PASS == REDUCE:
            factor, grad = steps_to(factor, grad, not REVERSE)
            leave_steps(states, num_slots, factor, grad, 0, not REVERSE)
        else:
            u = scan(factor, grad, carry, not REVERSE)
            carry = edge(u, not REVERSE)
            next_x = tl.load(x_row + column + NEXT, mask=inside & ~is_last, other=0).to(T)
            next_x = tl.where(is_last, first, next_x)
            tl.store(grad_b + out_row + column, u, mask=inside)
            tl.store(grad_a + out_row + column, u * next_x, mask=inside)
    if PASS != REDUCE:
        at_end = (size - 1)[:, None] if REVERSE else tl.zeros_like(size)[:, None]
        factor = tl.load(a_row + at_end, mask=(size > 0)[:, None], other=0).to(T)
        is_known = completes(row, first_tile, size, num_rows, PASS, BLOCK)
        tl.store(grad_initial + row[:, None], factor * carry, mask=is_known)


def _result(like: Tensor) -> Tensor:
    return like.new_empty(like.shape, dtype=result_dtype(like.dtype))


def affine_scan(
    a: Tensor, b: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None, reverse: bool
) -> Tensor:
    out = _result(a)
    inputs = [_triton.unit_stride(a), _triton.unit_stride(b)]
    initial, cu_seqlens = _triton.dense(initial), _triton.dense(cu_seqlens)
    rows = ScanRows(a, cu_seqlens)
    rows.run(
        affine_scan_kernel,
        *(*inputs, initial, cu_seqlens, out, *rows.arguments),
        *map(_triton.row_stride, (*inputs, out)),
        initial=initial,
        REVERSE=reverse,
        T=_triton.compute_type(a.dtype),
    )
    return out


def affine_scan_backward(
    grad_x: Tensor,
    a: Tensor,
    x: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_a, grad_b = _result(a), _result(a)
    inputs = [_triton.unit_stride(grad_x), _triton.unit_stride(a), _triton.unit_stride(x)]
    initial, cu_seqlens = _triton.dense(initial), _triton.dense(cu_seqlens)
    rows = ScanRows(a, cu_seqlens)
    grad_initial = grad_a.new_empty((rows.count,))
    rows.run(
        affine_scan_backward_kernel,
        *(*inputs, initial, cu_seqlens, grad_a, grad_b, grad_initial, *rows.arguments),
        *map(_triton.row_stride, (*inputs, grad_a)),
        REVERSE=reverse,
        T=_triton.compute_type(a.dtype),
    )
    return grad_a, grad_b, grad_initial
