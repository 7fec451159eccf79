"""The scan x_t = a_t x_{t+1} + b_t (or x_{t-1}, left to right) and its adjoint in Triton, a tile of a row at a time."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastrl import _triton
from fastrl._library import result_dtype
from fastrl._triton import edge, scan, spans


@_triton.jit
def affine_scan_kernel(
    a, b, initial, cu_seqlens, out,
    num_rows: tl.int64, length: tl.int64, a_stride: tl.int64, b_stride: tl.int64, out_stride: tl.int64,
    REVERSE: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start, size = spans(cu_seqlens, row, num_rows, length)
    lane = tl.arange(0, BLOCK)[None, :]
    a_row = a + (start + row * a_stride)[:, None]
    b_row = b + (start + row * b_stride)[:, None]
    out_row = out + (start + row * out_stride)[:, None]
    carry = tl.zeros([ROWS, 1], T)
    if initial is not None:
        carry = tl.load(initial + row, mask=row < num_rows, other=0)[:, None]
    for tile in range(tl.cdiv(tl.max(size, 0), BLOCK)):
        if REVERSE:
            column = (size - (tile + 1) * BLOCK)[:, None] + lane
        else:
            column = tl.zeros_like(size)[:, None] + tile * BLOCK + lane
        inside = (column >= 0) & (column < size[:, None])
        factor = tl.load(a_row + column, mask=inside, other=1).to(T)
        term = tl.load(b_row + column, mask=inside, other=0).to(T)
        x = scan(factor, term, carry, REVERSE)
        carry = edge(x, REVERSE)
        tl.store(out_row + column, x, mask=inside)


# With g the gradient of x, for the reverse scan: u_t = g_t + a_{t-1} u_{t-1} runs the other way, grad b_t = u_t,
# grad a_t = u_t x_{t+1}, and grad initial = a_T u_T.
@_triton.jit
def affine_scan_backward_kernel(
    grad_x, a, x, initial, cu_seqlens, grad_a, grad_b, grad_initial,
    num_rows: tl.int64, length: tl.int64, grad_stride: tl.int64, a_stride: tl.int64, x_stride: tl.int64,
    out_stride: tl.int64, REVERSE: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
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
    carry = tl.zeros([ROWS, 1], T)
    for tile in range(tl.cdiv(tl.max(size, 0), BLOCK)):
        if REVERSE:
            column = tl.zeros_like(size)[:, None] + tile * BLOCK + lane
        else:
            column = (size - (tile + 1) * BLOCK)[:, None] + lane
        inside = (column >= 0) & (column < size[:, None])
        is_first = inside & ((column == 0) if REVERSE else (column == size[:, None] - 1))
        is_last = inside & ((column == size[:, None] - 1) if REVERSE else (column == 0))
        factor = tl.load(a_row + column - NEXT, mask=inside & ~is_first, other=0).to(T)
        grad = tl.load(grad_row + column, mask=inside, other=0).to(T)
        u = scan(tl.where(inside, factor, 1), grad, carry, not REVERSE)
        carry = edge(u, not REVERSE)
        next_x = tl.load(x_row + column + NEXT, mask=inside & ~is_last, other=0).to(T)
        next_x = tl.where(is_last, first, next_x)
        tl.store(grad_b + out_row + column, u, mask=inside)
        tl.store(grad_a + out_row + column, u * next_x, mask=inside)
    at_end = (size - 1)[:, None] if REVERSE else tl.zeros_like(size)[:, None]
    factor = tl.load(a_row + at_end, mask=(size > 0)[:, None], other=0).to(T)
    tl.store(grad_initial + row[:, None], factor * carry, mask=(row < num_rows)[:, None])


def _result(like: Tensor) -> Tensor:
    return like.new_empty(like.shape, dtype=result_dtype(like.dtype))


def affine_scan(
    a: Tensor, b: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None, reverse: bool
) -> Tensor:
    out = _result(a)
    inputs = [_triton.unit_stride(a), _triton.unit_stride(b)]
    per_row = [None if x is None else x.contiguous() for x in (initial, cu_seqlens)]
    rows, block = _triton.tile_shape(a, cu_seqlens)
    num_rows = _triton.num_rows(a, cu_seqlens)
    _triton.launch(
        affine_scan_kernel,
        (triton.cdiv(num_rows, rows),),
        *(*inputs, *per_row, out, num_rows, a.shape[-1]),
        *map(_triton.row_stride, (*inputs, out)),
        REVERSE=reverse,
        T=_triton.compute_type(a.dtype),
        ROWS=rows,
        BLOCK=block,
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
    per_row = [None if t is None else t.contiguous() for t in (initial, cu_seqlens)]
    rows, block = _triton.tile_shape(a, cu_seqlens)
    num_rows = _triton.num_rows(a, cu_seqlens)
    grad_initial = grad_a.new_empty((num_rows,))
    _triton.launch(
        affine_scan_backward_kernel,
        (triton.cdiv(num_rows, rows),),
        *(*inputs, *per_row, grad_a, grad_b, grad_initial, num_rows, a.shape[-1]),
        *map(_triton.row_stride, (*inputs, grad_a)),
        REVERSE=reverse,
        T=_triton.compute_type(a.dtype),
        ROWS=rows,
        BLOCK=block,
    )
    return grad_a, grad_b, grad_initial
