"""Masked moments and whitening by them in Triton: a program per chunk, one that merges the chunks, float64 throughout.

A chunk is measured from its first valid element, all chunks from that of the first one that has any: so equal elements
have a mean and deviations without rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl import _triton
from fastrl._library import result_dtype
from fastrl._triton import is_valid

# Elements whose statistics are taken in one piece.
_CHUNK = 4096
_BLOCK = 1024
_RSQRT_ADD, _RSQRT_MAX = tl.constexpr(0), tl.constexpr(1)


@_triton.jit
def moments_of_chunks_kernel(
    x, mask, counts, origins, means, squares, count: tl.int64, CHUNK: tl.constexpr
):
    """Of each chunk: valid elements, the first of them, mean and squared deviations of the differences to it."""
    chunk = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNK)
    at = chunk * CHUNK + lane
    valid = is_valid(mask, at, at < count)
    first = tl.min(tl.where(valid, lane, CHUNK), 0)
    origin = tl.load(x + chunk * CHUNK + first, mask=first < CHUNK, other=0).to(tl.float64)
    offset = tl.load(x + at, mask=valid, other=0).to(tl.float64) - origin
    num_valid = tl.sum(valid.to(tl.int32), 0)
    mean = tl.sum(tl.where(valid, offset, 0), 0) / tl.maximum(num_valid, 1)
    deviation = tl.where(valid, offset - mean, 0)
    tl.store(counts + chunk, num_valid)
    tl.store(origins + chunk, origin)
    tl.store(means + chunk, mean)
    tl.store(squares + chunk, tl.sum(deviation * deviation, 0))


# The squared deviations of a union are those inside its parts and those of the parts' means, each as often as it counts.
@_triton.jit
def merge_chunks_kernel(
    counts, origins, means, squares, moments, num_chunks: tl.int64, BLOCK: tl.constexpr
):
    lane = tl.arange(0, BLOCK).to(tl.int64)
    num_tiles = tl.cdiv(num_chunks, BLOCK)
    first = num_chunks
    sums = tl.zeros([BLOCK], tl.float64)
    for tile in range(num_tiles):
        chunk = tile * BLOCK + lane
        n = tl.load(counts + chunk, mask=chunk < num_chunks, other=0)
        first = tl.minimum(first, tl.min(tl.where(n > 0, chunk, num_chunks), 0))
        sums += n
    total = tl.sum(sums, 0)
    origin = tl.load(origins + first, mask=first < num_chunks, other=0)

    sums = tl.zeros([BLOCK], tl.float64)
    for tile in range(num_tiles):
        n, mean = _chunk_means(counts, origins, means, origin, tile * BLOCK + lane, num_chunks)
        sums += n * mean
    overall = tl.sum(sums, 0) / tl.maximum(total, 1)

    sums = tl.zeros([BLOCK], tl.float64)
    for tile in range(num_tiles):
        chunk = tile * BLOCK + lane
        n, mean = _chunk_means(counts, origins, means, origin, chunk, num_chunks)
        inside = tl.load(squares + chunk, mask=n > 0, other=0)
        deviation = tl.where(n > 0, mean - overall, 0)
        sums += inside + n * (deviation * deviation)
    tl.store(moments, total)
    tl.store(moments + 1, origin + overall)
    tl.store(moments + 2, tl.sum(sums, 0))


@triton.jit
def _chunk_means(counts, origins, means, origin, chunk, num_chunks):
    """Valid elements of chunks and their means, measured from ``origin``; 0 and 0 for a chunk without any."""
    n = tl.load(counts + chunk, mask=chunk < num_chunks, other=0)
    mean = tl.load(origins + chunk, mask=n > 0, other=0) - origin
    mean += tl.load(means + chunk, mask=n > 0, other=0)
    return n, tl.where(n > 0, mean, 0)


@triton.jit
def _factor(count, m2, ddof, eps, EPS_MODE: tl.constexpr):
    """What deviations are multiplied by: 1 without a variance, or with none to speak of."""
    eps = tl.full([], eps, tl.float64)  # the interpreter rounds a number that meets a tensor
    degrees = count - ddof
    variance = m2 / tl.maximum(degrees, 1)
    if EPS_MODE == _RSQRT_ADD:
        divisor = tl.sqrt(variance + eps)
    elif EPS_MODE == _RSQRT_MAX:
        divisor = tl.sqrt(tl.where(variance < eps, eps, variance))
    else:
        divisor = tl.sqrt(variance) + eps
    return 1 / tl.where((degrees <= 0) | (m2 == 0), 1, divisor)


@_triton.jit
def whiten_apply_kernel(
    x, mask, moments, out, count: tl.int64, ddof: tl.int64, eps: tl.float64,
    EPS_MODE: tl.constexpr, SHIFT_MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    mean = tl.load(moments + 1)
    factor = _factor(tl.load(moments), tl.load(moments + 2), ddof, eps, EPS_MODE)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = is_valid(mask, at, at < count)
    whitened = (tl.load(x + at, mask=valid, other=0).to(tl.float64) - mean) * factor
    if not SHIFT_MEAN:
        whitened += mean
    tl.store(out + at, tl.where(valid, whitened, 0), mask=at < count)


def masked_moments(x: Tensor, mask: Tensor | None) -> Tensor:
    moments = x.new_empty((3,), dtype=torch.float64)
    masked_moments_out(x, mask, moments)
    return moments


def masked_moments_out(x: Tensor, mask: Tensor | None, moments: Tensor) -> None:
    num_chunks = triton.cdiv(x.numel(), _CHUNK)
    of_chunks = x.new_empty((4, num_chunks), dtype=torch.float64)
    _triton.launch(
        moments_of_chunks_kernel,
        (num_chunks,),
        *(x.contiguous(), _triton.dense_mask(mask), *of_chunks, x.numel()),
        CHUNK=_CHUNK,
    )
    _triton.launch(
        merge_chunks_kernel, (1,), *of_chunks, moments, num_chunks, BLOCK=_BLOCK, num_warps=4
    )


def whiten_apply(
    x: Tensor,
    mask: Tensor | None,
    moments: Tensor,
    ddof: int,
    eps: float,
    eps_mode: int,
    shift_mean: bool,
) -> Tensor:
    out = x.new_empty(x.shape, dtype=result_dtype(x.dtype))
    _triton.launch(
        whiten_apply_kernel,
        (triton.cdiv(x.numel(), _BLOCK),),
        *(x.contiguous(), _triton.dense_mask(mask), moments.contiguous(), out),
        *(x.numel(), ddof, eps),
        EPS_MODE=eps_mode,
        SHIFT_MEAN=shift_mean,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out
