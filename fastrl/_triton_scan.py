"""How the Triton scans go through a batch: a program per row, or tile by tile for few long rows and for many packed tokens.

Tiles of a row are chained by x = b + a * carry alone. A program that walks its row keeps the carry. Otherwise a first
launch leaves what each tile does to a carry, a second one chains the tiles of each row, and a third writes the results:
the same arithmetic, so the way changes no bit. Work is balanced whatever the lengths, and inputs are read twice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl import _triton
from fastrl._library import result_dtype
from fastrl._triton import edge, first_slot, first_valid, last_valid_end, row_of_slot, spans

# What a launch of a scan is for.
BY_ROW, REDUCE, FINISH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_FACTOR, _TERM, _CARRY, _PLANES = (tl.constexpr(i) for i in range(4))  # of each scan, by slot
# Tiles that a chain reads at once, and mask elements that a search for a row's end does.
_CHAINED, _SEARCHED = 32, 4096


@triton.jit
def program_tile(
    cu_seqlens, num_rows, length, PASS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """The rows of a program, and the first of the tiles that it walks there."""
    program = tl.program_id(0).to(tl.int64)
    if PASS == BY_ROW:
        return program * ROWS + tl.arange(0, ROWS), tl.zeros_like(program)
    else:
        row = row_of_slot(cu_seqlens, program, num_rows, length, BLOCK)
        tile = program - first_slot(cu_seqlens, row, num_rows, length, BLOCK)
        return row + tl.arange(0, ROWS), tile


@triton.jit
def tiles_end(tile, positions, PASS: tl.constexpr, BLOCK: tl.constexpr):
    """One past the last tile that a program walks of rows with so many ``positions [R]``."""
    end = tl.cdiv(tl.max(positions, 0), BLOCK)
    if PASS != BY_ROW:  # wrong offsets can lead to a tile in front of its row
        end = tl.where(tile < 0, tile, tl.minimum(end, tile + 1))
    return end


@triton.jit
def completes(row, tile, positions, num_rows, PASS: tl.constexpr, BLOCK: tl.constexpr):
    """Of which rows ``[R, 1]`` a program has the last tile, after which it knows what comes out of the scan."""
    is_last = row < num_rows
    if PASS != BY_ROW:
        is_last &= tile == tl.maximum(tl.cdiv(positions, BLOCK), 1) - 1
    return is_last[:, None]


@triton.jit
def _at_slot(states, plane, num_slots):
    return states + plane * num_slots + tl.program_id(0).to(tl.int64) + tl.zeros([1, 1], tl.int64)


@triton.jit
def leave_steps(states, num_slots, a, b, WHICH: tl.constexpr, REVERSE: tl.constexpr):
    """For the chain of scan WHICH: what the steps of this tile do together, from `steps_to`."""
    first = WHICH * _PLANES
    tl.store(_at_slot(states, first + _FACTOR, num_slots), edge(a, REVERSE))
    tl.store(_at_slot(states, first + _TERM, num_slots), edge(b, REVERSE))


@triton.jit
def carry_into(initial, states, num_slots, WHICH: tl.constexpr, PASS: tl.constexpr):
    """What enters the first tile of a program: ``initial [R, 1]`` or what the chain of scan WHICH has left."""
    if PASS == FINISH:
        return tl.load(_at_slot(states, WHICH * _PLANES + _CARRY, num_slots))
    else:
        return initial


@triton.jit
def link_into(link, states, num_slots, SCANS: tl.constexpr, PASS: tl.constexpr):
    """A value ``[R, 1]`` from the tile before: what REDUCE has found is left for FINISH."""
    if PASS == REDUCE:
        tl.store(_at_slot(states, SCANS * _PLANES, num_slots), link)
    elif PASS == FINISH:
        link = tl.load(_at_slot(states, SCANS * _PLANES, num_slots))
    return link


@_triton.jit
def positions_kernel(
    mask, cu_seqlens, positions, num_rows: tl.int64, length: tl.int64, mask_stride: tl.int64, REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """How many tokens of each row are scanned: up to the last valid one, from the first one on."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    start, size = spans(cu_seqlens, row, num_rows, length)
    mask_row = mask + (start + row * mask_stride)[:, None]
    if REVERSE:
        found = last_valid_end(mask_row, size, BLOCK)
    else:
        found = size - first_valid(mask_row, size, BLOCK)
    tl.store(positions + row, found)


@_triton.jit
def chain_kernel(
    initial, cu_seqlens, positions, states, num_rows: tl.int64, length: tl.int64, num_slots: tl.int64, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """The carries into the tiles of a row, for one of its scans."""
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    _, size = spans(cu_seqlens, row, num_rows, length)
    if positions is not None:
        size = tl.load(positions + row)
    num_tiles = tl.cdiv(size, BLOCK)
    slot = first_slot(cu_seqlens, row, num_rows, length, BLOCK)
    planes = states + which * _PLANES * num_slots + slot
    carry = tl.zeros([], states.dtype.element_ty)
    if initial is not None:
        carry = tl.load(initial + row).to(states.dtype.element_ty)
    lane = tl.arange(0, CHAINED)
    for begin in range(0, tl.maximum(num_tiles, 1), CHAINED):  # a carry leaves an empty row, too
        tile = begin + lane
        factors = tl.load(planes + _FACTOR * num_slots + tile, mask=tile < num_tiles, other=1)
        terms = tl.load(planes + _TERM * num_slots + tile, mask=tile < num_tiles, other=0)
        carries = tl.zeros_like(terms)
        for i in tl.static_range(CHAINED):
            carries = tl.where(lane == i, carry, carries)
            factor = tl.sum(tl.where(lane == i, factors, 0), 0)
            carry = tl.sum(tl.where(lane == i, terms, 0), 0) + factor * carry
        tl.store(planes + _CARRY * num_slots + tile, carries, mask=(tile < num_tiles) | (tile == 0))


class ScanRows:
    """The way of one call through its rows, with ``num_scans`` scans at once and ``num_links`` values beside them.

    With ``mask``, rows are scanned up to their last valid token, or from their first one on where not ``reverse``.
    """

    def __init__(
        self,
        like: Tensor,
        cu_seqlens: Tensor | None,
        num_scans: int = 1,
        num_links: int = 0,
        mask: Tensor | None = None,
        reverse: bool = True,
    ) -> None:
        self.cu_seqlens = cu_seqlens
        self.num_scans = num_scans
        self.count, self.length = _triton.num_rows(like, cu_seqlens), like.shape[-1]
        self.is_split = _triton.has_few_long_rows(like, cu_seqlens)
        self.positions: Tensor | None = None
        self.states: Tensor | None = None
        rows, block = (1, _triton.TILE) if self.is_split else _triton.tile_shape(like, cu_seqlens)
        self.tile: dict[str, Any] = {"ROWS": rows, "BLOCK": block}
        if not self.is_split:
            self.num_programs = triton.cdiv(self.count, rows)
            return
        self.num_programs = _triton.num_slots(like, cu_seqlens, block)
        shape = (num_scans * _PLANES.value + num_links, self.num_programs)
        self.states = like.new_empty(shape, dtype=result_dtype(like.dtype))
        if mask is not None:
            self.positions = mask.new_empty((self.count,), dtype=torch.int64)
            _triton.launch(
                positions_kernel,
                (self.count,),
                *(mask, cu_seqlens, self.positions, self.count, self.length),
                _triton.row_stride(mask),
                REVERSE=reverse,
                BLOCK=_SEARCHED,
            )

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the kernel of a scan needs of this, in its order."""
        return self.states, self.count, self.length, self.num_programs

    def run(self, kernel: Any, *args: Any, initial: Tensor | None = None, **meta: Any) -> None:
        """Launch ``kernel`` for each pass; ``initial`` is what enters its first scan."""

        def launch(which: tl.constexpr) -> None:
            grid = (self.num_programs,)
            _triton.launch(kernel, grid, *args, PASS=which.value, **self.tile, **meta)

        if not self.is_split:
            launch(BY_ROW)
            return
        launch(REDUCE)
        _triton.launch(
            chain_kernel,
            (self.count, self.num_scans),
            *(initial, self.cu_seqlens, self.positions, *self.arguments),
            num_warps=1,
            BLOCK=self.tile["BLOCK"],
            CHAINED=_CHAINED,
        )
        launch(FINISH)
