"""What the Triton kernels share: how they are launched, how rows and masks are read, and scans and sums in a fixed order.

The compiler gives a thread several neighbours, and their scan or sum another rounding, as soon as it may assume an
alignment. Kernels whose rows start anywhere (at their first or last valid token) assume none: a warp reads 32 neighbours
at once, a scan combines blocks of 32 from one end, and its rounding depends on positions alone.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a tile, whatever the number of rows they come from.
TILE = 512
# A row up to this length is over before more launches would be; from so many rows on each has a program of its own.
LONG_ROW, MANY_ROWS = 4096, 256
# Off: a first call must not measure, and the number of warps may change how a sum is rounded.
_AUTOTUNE = os.environ.get("FASTRL_TRITON_AUTOTUNE") == "1"


def jit_aligned(*aligned: str) -> Callable[[Callable[..., Any]], Any]:
    """``triton.jit`` for kernels that compile once: numbers and the alignment of pointers but ``aligned`` are no key."""

    def decorate(kernel: Callable[..., Any]) -> Any:
        parameters = inspect.signature(kernel).parameters.values()
        run_time = [p for p in parameters if "constexpr" not in str(p.annotation)]
        pointers = [p.name for p in run_time if p.annotation is p.empty]
        return triton.jit(
            do_not_specialize=[p.name for p in run_time if p.annotation is not p.empty],
            do_not_specialize_on_alignment=[name for name in pointers if name not in aligned],
        )(kernel)

    return decorate


jit = jit_aligned()


def launch(
    kernel: Any,
    grid: Sequence[int],
    *args: Any,
    num_warps: int = 8,
    fusion: bool = False,
    **meta: Any,
) -> None:
    """Run ``kernel`` on the device of its first tensor. Without ``fusion`` a product and a sum round one by one."""
    if min(grid) == 0:
        return
    if _AUTOTUNE:
        kernel, options = _tuned(kernel), {}
    else:
        options = {"num_warps": num_warps}
    device = next(a for a in args if isinstance(a, Tensor)).device
    if device.type == "cpu":  # interpreted
        kernel[tuple(grid)](*args, **options, **meta)
        return
    with torch.cuda.device(device):
        kernel[tuple(grid)](*args, enable_fp_fusion=fusion, **options, **meta)


_tuned_kernels: dict[Any, Any] = {}


def _tuned(kernel: Any) -> Any:
    if kernel not in _tuned_kernels:
        configs = [
            triton.Config({}, num_warps=warps, num_stages=stages)
            for warps in (2, 4, 8)
            for stages in (2, 3)
        ]
        _tuned_kernels[kernel] = triton.autotune(configs, key=[])(kernel)
    return _tuned_kernels[kernel]


def compute_type(dtype: torch.dtype) -> tl.dtype:
    """What a kernel computes in: float64 for float64, float32 for the rest."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def dense(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def unit_stride(t: Tensor | None) -> Tensor | None:
    """Rows that a kernel can walk; other layouts (time first, expanded) are copied once."""
    if t is None or t.dim() == 0 or t.stride(-1) == 1 or t.shape[-1] <= 1:
        return t
    return t.contiguous()


def mask_rows(mask: Tensor | None) -> Tensor | None:
    """A mask as a kernel reads it, at its own width: non-zero is valid. Triton has no pointer to bool."""
    mask = unit_stride(mask)
    return mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask


def dense_mask(mask: Tensor | None) -> Tensor | None:
    """A mask as a kernel reads it, element by element in row-major order."""
    return mask_rows(dense(mask))


def row_stride(t: Tensor | None) -> int:
    """Between rows; packed rows start where ``cu_seqlens`` says."""
    return t.stride(0) if t is not None and t.dim() == 2 else 0


def num_rows(t: Tensor, cu_seqlens: Tensor | None) -> int:
    return t.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def tile_shape(t: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int]:
    """Rows and columns of a tile over ``[B, T]`` or packed ``[N]``: long rows have it alone, short ones share it.

    Three widths, so that few lengths compile anew; the longest packed row is not known without waiting for the device.
    """
    if cu_seqlens is not None or t.shape[1] > 128:
        return 1, TILE
    columns = 32 if t.shape[1] <= 32 else 128
    return TILE // columns, columns


def num_slots(t: Tensor, cu_seqlens: Tensor | None, slot: int) -> int:
    """How many pieces of ``slot`` tokens the rows of ``t`` have room for; see `first_slot`."""
    count = num_rows(t, cu_seqlens)
    if cu_seqlens is None:
        return count * triton.cdiv(t.shape[-1], slot)
    return t.shape[-1] // slot + count if count > 0 else 0


def has_few_long_rows(t: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether a program per row could leave a GPU mostly idle; of packed rows one may hold nearly all tokens."""
    return t.shape[-1] > LONG_ROW and (cu_seqlens is not None or t.shape[0] < MANY_ROWS)


@triton.jit
def is_valid(mask, at, inside):
    """Whether the elements ``at`` are ``inside`` and valid; without a mask all of them are."""
    if mask is not None:
        inside &= tl.load(mask + at, mask=inside, other=0) != 0
    return inside


@triton.jit
def spans(cu_seqlens, rows, num_rows, length):
    """Start and length of each row: of packed tokens, which ``length`` counts, or 0 and the padded width.

    Offsets are clamped to the tokens: on a GPU nobody has looked at them, and no read may leave the tensor.
    """
    is_row = rows < num_rows
    if cu_seqlens is None:
        start = tl.zeros_like(rows)
        size = tl.where(is_row, length, 0).to(tl.int64)
    else:
        start = tl.load(cu_seqlens + rows, mask=is_row, other=0).to(tl.int64)
        stop = tl.load(cu_seqlens + rows + 1, mask=is_row, other=0).to(tl.int64)
        start = tl.minimum(tl.maximum(start, 0), length)
        size = tl.minimum(tl.maximum(stop, start), length) - start
    return start, size


@triton.jit
def first_slot(cu_seqlens, row, num_rows, length, SLOT: tl.constexpr):
    """Slots number pieces of SLOT tokens without a look at other rows: a packed row has room for its length, at least one
    slot, and never overlaps the next."""
    if cu_seqlens is None:
        return row * tl.cdiv(length, SLOT)
    else:
        start, _ = spans(cu_seqlens, row, num_rows, length)
        return start // SLOT + row


@triton.jit
def row_of_slot(cu_seqlens, slot, num_rows, length, SLOT: tl.constexpr):
    """Whatever the offsets hold, the answer is a row."""
    if cu_seqlens is None:
        return slot // tl.cdiv(length, SLOT)
    else:
        low = tl.zeros_like(slot)
        high = low + num_rows
        while high - low > 1:
            middle = (low + high) // 2
            is_reached = first_slot(cu_seqlens, middle, num_rows, length, SLOT) <= slot
            low = tl.where(is_reached, middle, low)
            high = tl.where(is_reached, high, middle)
        return low


@triton.jit
def last_valid_end(mask_row, size, BLOCK: tl.constexpr):
    """One past the last valid token of each row, 0 without one; ``mask_row [R, 1]`` is where its mask starts."""
    lane = tl.arange(0, BLOCK)[None, :]
    end, stop = tl.zeros_like(size), size
    while tl.max(stop, 0) > 0:
        column = stop[:, None] - BLOCK + lane
        valid = tl.load(mask_row + column, mask=column >= 0, other=0) != 0
        end = tl.maximum(end, tl.max(tl.where(valid, column + 1, 0), 1))
        stop = tl.where(end > 0, 0, tl.maximum(stop - BLOCK, 0))
    return end


@triton.jit
def first_valid(mask_row, size, BLOCK: tl.constexpr):
    """Index of the first valid token of each row, ``size`` without one."""
    lane = tl.arange(0, BLOCK)[None, :]
    first, start = size, tl.zeros_like(size)
    while tl.max(size - start, 0) > 0:
        column = start[:, None] + lane
        inside = column < size[:, None]
        valid = tl.load(mask_row + column, mask=inside, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(valid, column, size[:, None]), 1))
        start = tl.where(first < size, size, tl.minimum(start + BLOCK, size))
    return first


@triton.jit
def _compose(a, b, a_next, b_next):
    return a_next * a, b_next + a_next * b


@triton.jit
def steps_to(a, b, REVERSE: tl.constexpr):
    """What the steps up to each one do to a carry that enters the tile ``[R, N]``: (a, b) of x = a carry + b."""
    return tl.associative_scan((a, b), 1, _compose, reverse=REVERSE)


@triton.jit
def scan(a, b, carry, REVERSE: tl.constexpr):
    """x = a x_before + b along each row of a tile ``[R, N]``; ``carry [R, 1]`` enters it, at the right end for REVERSE."""
    a, b = steps_to(a, b, REVERSE)
    return b + a * carry


@triton.jit
def _last_two(x, x_before, n, y, y_before, m):
    """The last and the last but one of those that count, and how many there are, at most two."""
    before = tl.where(m > 1, y_before, tl.where(n > 0, x, x_before))
    return tl.where(m > 0, y, x), tl.where(m > 0, before, x_before), tl.minimum(n + m, 2)


@triton.jit
def before(counts, x, carry, REVERSE: tl.constexpr):
    """``x`` of the nearest element before each one that ``counts``, and of the last in the tile; ``carry`` without one.

    Values are only moved, so that nothing rounds and NaN spreads nowhere.
    """
    n = counts.to(tl.int32)
    last, second, n = tl.associative_scan((x, x, n), 1, _last_two, reverse=REVERSE)
    here = tl.where(n > 0, last, carry)
    return tl.where(n > counts.to(tl.int32), tl.where(counts, second, last), carry), edge(
        here, REVERSE
    )


@triton.jit
def edge(x, REVERSE: tl.constexpr):
    """The column ``[R, 1]`` where a scan of the tile ends."""
    lane = tl.arange(0, x.shape[1])[None, :]
    is_edge = lane == (0 if REVERSE else x.shape[1] - 1)
    return tl.sum(tl.where(is_edge, x, 0), 1, keep_dims=True)
