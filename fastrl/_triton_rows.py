"""Rows of tokens as the Triton losses walk them: which tokens are valid, slots of them, and sums over slots and rows.

A slot is 1024 tokens counted from the first valid token of its row; the tokens in front of that one follow behind the
last, so that the slots of a row cover it once. Slots are summed by a fixed tree in the compute dtype, the slots of a row
and rows by fixed trees in double, so what a row contributes depends on the row alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl import _triton
from fastrl._losses import AGGREGATIONS
from fastrl._triton import first_slot, is_valid, row_of_slot, spans

SLOT = tl.constexpr(1024)
_NOWHERE = tl.constexpr(2**62)  # behind every column
_TOKEN_MEAN, _TOKEN_SUM, _TOKEN_MEANS, _NORM = (
    tl.constexpr(AGGREGATIONS[name])
    for name in ("token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")
)


# ---- numbers


@triton.jit
def at_most(x, bound):
    """The smaller one; a NaN of ``x`` stays."""
    return tl.where(x > bound, bound, x)


@triton.jit
def at_least(x, bound):
    return tl.where(x < bound, bound, x)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


# ---- slots


@triton.jit
def slots_of_row(row_spans, cu_seqlens, row, num_rows, length):
    """The first slot of a row, and how many hold its valid tokens."""
    first = tl.load(row_spans + row)
    end = tl.load(row_spans + num_rows + row)
    return first_slot(cu_seqlens, row, num_rows, length, SLOT), tl.cdiv(end - first, SLOT)


@triton.jit
def slot_tokens(mask, cu_seqlens, row_spans, slot, num_rows, length, mask_stride):
    """The row of a slot, where that starts among packed tokens, its number of valid tokens; then of each token of the
    slot the column, whether there is one, and whether it is valid."""
    row = row_of_slot(cu_seqlens, slot, num_rows, length, SLOT)
    start, size = spans(cu_seqlens, row, num_rows, length)
    first = tl.load(row_spans + row)
    end = tl.load(row_spans + num_rows + row)
    count = tl.load(row_spans + 2 * num_rows + row)
    begin = (slot - first_slot(cu_seqlens, row, num_rows, length, SLOT)) * SLOT
    offset = begin + tl.arange(0, SLOT)
    exists = (offset >= 0) & (offset < size)
    column = first + offset
    valid = exists & (column < end)
    column = tl.where(column < size, column, column - size)
    if mask is not None:
        at = mask + start + row * mask_stride + column
        valid = valid & (tl.load(at, mask=valid, other=0) != 0)
    return row, start, count, column, exists, valid


@triton.jit
def store_sum(sums, slot, column, x, COLUMNS: tl.constexpr):
    """The sum of ``x`` over a slot to its line of ``sums``."""
    tl.store(sums + slot * COLUMNS + column, tl.sum(x, 0).to(tl.float64))


@triton.jit
def row_weight(totals, count, AGG: tl.constexpr):
    """The factor of each token's loss in a row with ``count`` valid tokens, in double."""
    weight = tl.load(totals + 2)
    if AGG == _TOKEN_MEANS:
        weight = weight / tl.maximum(count, 1).to(tl.float64)
    return weight


@triton.jit
def add_lines(
    lines, begin, count, COLUMNS: tl.constexpr, FIRST_PEAK: tl.constexpr, NUM_PEAKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The sums of ``count`` lines from ``begin`` on; of the columns that are peaks the largest elements."""
    column = tl.arange(0, COLUMNS)
    is_peak = (column >= FIRST_PEAK) & (column < FIRST_PEAK + NUM_PEAKS)
    neutral = tl.where(is_peak, -float("inf"), tl.zeros([COLUMNS], tl.float64))[None, :]
    of_peaks = is_peak[None, :]
    total = tl.zeros([BLOCK, COLUMNS], tl.float64) + neutral
    for tile in range(tl.cdiv(count, BLOCK)):
        index = tile * BLOCK + tl.arange(0, BLOCK)[:, None]
        inside = index < count
        line = tl.load(lines + (begin + index) * COLUMNS + column[None, :], mask=inside, other=0)
        line = tl.where(inside, line, neutral)
        total = tl.where(of_peaks, tl.maximum(total, line), total + tl.where(of_peaks, 0, line))
    return tl.where(is_peak, tl.max(total, 0), tl.sum(tl.where(of_peaks, 0, total), 0))


# ---- kernels around the one of a loss


@triton.jit
def _span(valid, column):
    """Of each token: its column where that can be the first of a row, one past it where it can be the last, and 1."""
    column = column.to(tl.int64)
    return tl.where(valid, column, _NOWHERE), tl.where(valid, column + 1, 0), valid.to(tl.int64)


@_triton.jit
def slot_spans_kernel(
    mask, cu_seqlens, slot_spans, num_rows: tl.int64, length: tl.int64, num_slots: tl.int64, mask_stride: tl.int64
):  # fmt: skip
    """`row_spans_kernel` for a slot of tokens counted from the start of their row."""
    slot = tl.program_id(0).to(tl.int64)
    row = row_of_slot(cu_seqlens, slot, num_rows, length, SLOT)
    start, size = spans(cu_seqlens, row, num_rows, length)
    begin = (slot - first_slot(cu_seqlens, row, num_rows, length, SLOT)) * SLOT
    column = begin + tl.arange(0, SLOT)
    exists = (column >= 0) & (column < size)
    valid = is_valid(mask, start + row * mask_stride + column, exists)
    firsts, ends, counts = _span(valid, column)
    tl.store(slot_spans + slot, tl.min(firsts, 0))
    tl.store(slot_spans + num_slots + slot, tl.max(ends, 0))
    tl.store(slot_spans + 2 * num_slots + slot, tl.sum(counts, 0))


@_triton.jit
def row_spans_kernel(
    mask, cu_seqlens, slot_spans, row_spans, num_rows: tl.int64, length: tl.int64, num_slots: tl.int64,
    mask_stride: tl.int64, BLOCK: tl.constexpr,
):  # fmt: skip
    """First valid token, one past the last one, and their number: 0, 0 and 0 without one."""
    row = tl.program_id(0).to(tl.int64)
    start, size = spans(cu_seqlens, row, num_rows, length)
    first, end, count = tl.zeros_like(size), size, size
    if mask is not None:
        lowest = tl.zeros([BLOCK], tl.int64) + _NOWHERE
        highest, total = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
        # One long row must not wait for a program that reads all of its mask.
        pieces = size if slot_spans is None else tl.cdiv(size, SLOT)
        for tile in range(tl.cdiv(pieces, BLOCK)):
            piece = tile * BLOCK + tl.arange(0, BLOCK)
            exists = piece < pieces
            if slot_spans is None:
                valid = is_valid(mask, start + row * mask_stride + piece, exists)
                firsts, ends, counts = _span(valid, piece)
            else:
                slot = slot_spans + first_slot(cu_seqlens, row, num_rows, length, SLOT) + piece
                firsts = tl.load(slot, mask=exists, other=_NOWHERE)
                ends = tl.load(slot + num_slots, mask=exists, other=0)
                counts = tl.load(slot + 2 * num_slots, mask=exists, other=0)
            lowest = tl.minimum(lowest, firsts)
            highest = tl.maximum(highest, ends)
            total += counts
        end, count = tl.max(highest, 0), tl.sum(total, 0)
        first = tl.where(count > 0, tl.min(lowest, 0), 0)
    tl.store(row_spans + row, first)
    tl.store(row_spans + num_rows + row, end)
    tl.store(row_spans + 2 * num_rows + row, count)


@_triton.jit
def totals_kernel(
    row_spans, denom_tensor, totals, num_rows: tl.int64, width: tl.int64, denom: tl.float64, AGG: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Valid tokens, rows with at least one, and what the sum of the loss is multiplied by."""
    counts, rows_with = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for tile in range(tl.cdiv(num_rows, BLOCK)):
        row = tile * BLOCK + tl.arange(0, BLOCK)
        count = tl.load(row_spans + 2 * num_rows + row, mask=row < num_rows, other=0)
        counts += count
        rows_with += (count > 0).to(tl.int64)
    tokens = tl.sum(counts, 0).to(tl.float64)
    sequences = tl.sum(rows_with, 0).to(tl.float64)
    divisor = tl.full([], 1, tl.float64)
    if AGG != _TOKEN_SUM:
        default = sequences
        if AGG == _TOKEN_MEAN:
            default = tokens
        elif AGG == _NORM:
            default = sequences * width
        given = tl.full([], denom, tl.float64)
        if denom_tensor is not None:
            given = tl.load(denom_tensor)
        divisor = tl.where(given != 0, given, tl.maximum(default, 1))
    tl.store(totals, tokens)
    tl.store(totals + 1, sequences)
    tl.store(totals + 2, 1 / divisor)


@_triton.jit
def fold_rows_kernel(
    slot_sums, row_sums, cu_seqlens, row_spans, totals, num_rows: tl.int64, length: tl.int64, AGG: tl.constexpr,
    FIRST_WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr, FIRST_PEAK: tl.constexpr, NUM_PEAKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A line per row from those of its slots; columns from ``FIRST_WEIGHTED`` on get the weight of the row."""
    row = tl.program_id(0).to(tl.int64)
    begin, count = slots_of_row(row_spans, cu_seqlens, row, num_rows, length)
    line = add_lines(slot_sums, begin, count, COLUMNS, FIRST_PEAK, NUM_PEAKS, BLOCK)
    weight = row_weight(totals, tl.load(row_spans + 2 * num_rows + row), AGG)
    column = tl.arange(0, COLUMNS)
    line = tl.where(column < FIRST_WEIGHTED, line, weight * line)
    tl.store(row_sums + row * COLUMNS + column, line)


class LossRows:
    """The rows of a call and, on its device, where their valid tokens are and what weighs them."""

    def __init__(
        self,
        like: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        denom_tensor: Tensor | None,
        denom: float,
        agg: int,
    ) -> None:
        mask = _triton.mask_rows(mask)
        cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
        self.agg = agg
        self.count = _triton.num_rows(like, cu_seqlens)
        self.length = like.shape[-1]
        self.num_slots = _triton.num_slots(like, cu_seqlens, SLOT.value)
        self.spans = like.new_empty((3, self.count), dtype=torch.int64)
        self.totals = like.new_empty((3,), dtype=torch.float64)
        self.cu_seqlens = cu_seqlens
        # What every kernel over slots begins with, in the order of `slot_tokens`.
        self.tensors = (mask, cu_seqlens, self.spans, self.totals)
        self.numbers = (self.count, self.length, _triton.row_stride(mask))
        of_slots = None
        sizes = (self.count, self.length, self.num_slots, _triton.row_stride(mask))
        if mask is not None and _triton.has_few_long_rows(like, cu_seqlens):
            of_slots = self.spans.new_empty((3, self.num_slots))
            _triton.launch(
                slot_spans_kernel,
                (self.num_slots,),
                *(mask, cu_seqlens, of_slots, *sizes),
                num_warps=4,
            )
        _triton.launch(
            row_spans_kernel,
            (self.count,),
            *(mask, cu_seqlens, of_slots, self.spans, *sizes),
            num_warps=4,
            BLOCK=1024,
        )
        _triton.launch(
            totals_kernel,
            (1,),
            *(self.spans, denom_tensor, self.totals, self.count, self.length, denom),
            num_warps=4,
            AGG=agg,
            BLOCK=1024,
        )

    def new_sums(self, columns: int) -> Tensor:
        """A line per slot, for the kernel of a loss to fill."""
        return self.totals.new_empty((self.num_slots, columns))

    def fold(self, slot_sums: Tensor, **meta: Any) -> Tensor:
        """A line per row."""
        columns = slot_sums.shape[1]
        row_sums = slot_sums.new_empty((self.count, columns))
        _triton.launch(
            fold_rows_kernel,
            (self.count,),
            *(slot_sums, row_sums, *self.tensors[1:], self.count, self.length),
            num_warps=1,
            AGG=self.agg,
            COLUMNS=columns,
            BLOCK=32,
            **meta,
        )
        return row_sums


def dense_row_stride(t: Tensor) -> int:
    """Between the rows of a contiguous tensor of this shape, 0 for packed tokens."""
    return t.shape[1] if t.dim() == 2 else 0
