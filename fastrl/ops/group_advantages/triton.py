"""Group advantages in Triton: a stable sort brings the members of a group together, in the order of the samples.

The scored ones are then moved up to the start of their group and added in chunks counted from there, chunks by a fixed
tree: so a group has the same bits alone and among others, and whatever members are not scored, and one that holds the
whole batch keeps as many programs busy as a thousand small ones. All arithmetic is in float64.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl import _triton
from fastrl._library import result_dtype
from fastrl._triton import first_valid, is_valid
from fastrl.ops.group_advantages.op import BASELINES, SCALES
from fastrl.ops.whiten.triton import masked_moments_out

_LEAVE_ONE_OUT = tl.constexpr(BASELINES["leave_one_out"])
_LENGTH_WEIGHTED = tl.constexpr(BASELINES["length_weighted"])
_NO_BASELINE = tl.constexpr(BASELINES["none"])
_STD, _BATCH_STD = tl.constexpr(SCALES["std"]), tl.constexpr(SCALES["batch_std"])
_MEAN, _NO_SCALE = tl.constexpr(SCALES["mean"]), tl.constexpr(SCALES["none"])

# Positions in the sorted batch that a program looks at, and members or chunks of a group that it adds at once.
_GROUPS: dict[str, Any] = {"ROWS": 8, "BLOCK": 128}


# ---- scores [K, N] in float64, NaN where a sample is not scored ------------------------------------------------------


@_triton.jit
def read_scores_kernel(
    rewards, valid, scores, is_scored, num_samples: tl.int64, num_objectives: tl.int64,
    reward_stride: tl.int64, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_samples * num_objectives
    sample, objective = at % num_samples, at // num_samples
    score = tl.load(rewards + sample * reward_stride + objective, mask=inside, other=0)
    _store_scores(scores, is_scored, valid, at, sample, score.to(tl.float64), inside)


@triton.jit
def _store_scores(scores, is_scored, valid, at, sample, score, inside):
    score = tl.where(is_valid(valid, sample, inside), score, float("nan"))
    tl.store(scores + at, score, mask=inside)
    if is_scored is not None:
        tl.store(is_scored + at, (score == score).to(tl.uint8), mask=inside)


# Tiles start at the first valid token, so that a row has the same sum whatever its padding.
@_triton.jit
def sum_tokens_kernel(
    rewards, mask, valid, scores, is_scored, lengths, num_samples: tl.int64, num_tokens: tl.int64,
    reward_stride: tl.int64, mask_stride: tl.int64, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_samples
    lane = tl.arange(0, BLOCK)[None, :]
    size = tl.where(is_row, num_tokens, 0)
    first = tl.zeros_like(size)
    mask_row = mask
    if mask is not None:
        mask_row = mask + (row * mask_stride)[:, None]
        first = first_valid(mask_row, size, BLOCK)
    sums = tl.zeros([ROWS, BLOCK], tl.float64)
    counts = tl.zeros([ROWS, BLOCK], tl.int32)
    for tile in range(tl.cdiv(tl.max(size - first, 0), BLOCK)):
        column = (first + tile * BLOCK)[:, None] + lane
        counted = is_valid(mask_row, column, column < size[:, None])
        counts += counted.to(tl.int32)
        if rewards is not None:
            reward_row = rewards + (row * reward_stride)[:, None]
            sums += tl.load(reward_row + column, mask=counted, other=0).to(tl.float64)
    if rewards is not None:
        _store_scores(scores, is_scored, valid, row, row, tl.sum(sums, 1), is_row)
    if lengths is not None:
        tl.store(lengths + row, tl.sum(counts, 1), mask=is_row)


# ---- groups: each is known by its head, the position of its first member among the sorted samples -------------------


@_triton.jit
def place_members_kernel(
    order, head_of, end_of, num_scored, scores, lengths, heads, counts, member_scores, member_lengths,
    num_samples: tl.int64, num_objectives: tl.int64, BLOCK: tl.constexpr,
):  # fmt: skip
    """The scored members of each group side by side from its head on, and at each position how many the group has.

    ``num_scored [K, N]`` counts the scored samples up to each position, so that nothing walks along a group.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_samples * num_objectives
    position = at % num_samples
    row = at - position
    sample = tl.load(order + position, mask=inside, other=0)
    head = tl.load(head_of + position, mask=inside, other=0)
    end = tl.load(end_of + position, mask=inside, other=1)
    before = tl.load(num_scored + row + head - 1, mask=inside & (head > 0), other=0)
    count = tl.load(num_scored + row + end - 1, mask=inside, other=0) - before
    rank = tl.load(num_scored + at, mask=inside, other=0) - before - 1
    score = tl.load(scores + row + sample, mask=inside, other=float("nan"))
    is_scored = score == score
    tl.store(heads + sample, head, mask=inside)
    tl.store(counts + at, count, mask=inside)
    tl.store(member_scores + row + head + rank, score, mask=is_scored)
    if lengths is not None:
        length = tl.load(lengths + sample, mask=is_scored, other=0)
        tl.store(member_lengths + row + head + rank, length, mask=is_scored)


@triton.jit
def _position(head_of, num_samples, num_objectives, ROWS: tl.constexpr):
    """The objective of a program, its positions ``[ROWS]`` and their heads; those that are none have themselves."""
    program = tl.program_id(0).to(tl.int64)
    position = program // num_objectives * ROWS + tl.arange(0, ROWS)
    head = tl.load(head_of + position, mask=position < num_samples, other=0)
    return program % num_objectives, position, head


# A chunk is BLOCK scored members counted from the head of their group; what it sums is kept at its first position.
@_triton.jit
def sums_of_chunks_kernel(
    head_of, counts, member_scores, member_lengths, sums, num_samples: tl.int64, num_objectives: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In ``sums [3 or 5, K, N]``: the offsets of scores from the group's first one, their squared deviations, whether any
    is not 0, and the lengths and their products with offsets."""
    objective, position, head = _position(head_of, num_samples, num_objectives, ROWS)
    at = objective * num_samples + position
    begin = position - head
    is_chunk = (position < num_samples) & (begin % BLOCK == 0)
    n = tl.load(counts + at, mask=is_chunk, other=0) - begin
    n = tl.where(is_chunk, tl.minimum(n, BLOCK), 0)
    origin = tl.load(member_scores + objective * num_samples + head, mask=n > 0, other=0)
    lane = tl.arange(0, BLOCK)[None, :]
    inside = lane < n[:, None]
    score = tl.load(member_scores + at[:, None] + lane, mask=inside, other=0)
    offset = tl.where(inside, score - origin[:, None], 0)
    total = tl.sum(offset, 1)
    deviation = tl.where(inside, offset - (total / tl.maximum(n, 1))[:, None], 0)
    # Infinite scores are never equal: inf - inf is not 0.
    differs = tl.max((offset != 0).to(tl.int32), 1)
    plane = num_objectives * num_samples
    tl.store(sums + at, total, mask=n > 0)
    tl.store(sums + plane + at, tl.sum(deviation * deviation, 1), mask=n > 0)
    tl.store(sums + 2 * plane + at, differs.to(tl.float64), mask=n > 0)
    if member_lengths is not None:
        length = tl.load(member_lengths + at[:, None] + lane, mask=inside, other=0)
        of_offsets = tl.where(length > 0, length * offset, 0)
        tl.store(sums + 3 * plane + at, tl.sum(length, 1), mask=n > 0)
        tl.store(sums + 4 * plane + at, tl.sum(of_offsets, 1), mask=n > 0)


@triton.jit
def _inverse_std(count, m2, all_equal, ddof, eps):
    """1 / (std + eps); 0 when all scores that determine it are equal."""
    std = tl.sqrt(m2 / tl.maximum(count - ddof, 1))
    return tl.where(all_equal, 0, 1 / tl.where(all_equal, 1, std + eps))


# A = ((score - origin) - offset) * factor, and 0 where the bracket is 0 whatever the factor. Scores are measured from the
# first member's, which is also how equal ones come out as exactly 0. The squared deviations of a group are those inside
# its chunks and those of the chunks' means.
@_triton.jit
def group_maps_kernel(
    head_of, counts, member_scores, sums, batch_moments, maps, num_samples: tl.int64,
    num_objectives: tl.int64, ddof: tl.int64, eps: tl.float64, BASELINE: tl.constexpr,
    SCALE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(origin, offset, factor) of each group of one scored member or more, at its head in ``maps [3, K, N]``."""
    objective, position, head = _position(head_of, num_samples, num_objectives, ROWS)
    at = objective * num_samples + position
    plane = num_objectives * num_samples
    eps = tl.full([], eps, tl.float64)  # the interpreter rounds a number that meets a tensor
    is_head = (position < num_samples) & (position == head)
    n = tl.load(counts + at, mask=is_head, other=0)
    origin = tl.load(member_scores + at, mask=n > 0, other=0)
    num_chunks = tl.cdiv(n, BLOCK)
    num_tiles = tl.cdiv(tl.max(num_chunks, 0), BLOCK)
    lane = tl.arange(0, BLOCK)[None, :]

    offsets = tl.zeros([ROWS, BLOCK], tl.float64)
    differs, lengths, length_offsets = offsets, offsets, offsets
    for tile in range(num_tiles):
        chunk = tile * BLOCK + lane
        inside = chunk < num_chunks[:, None]
        of_chunk = sums + at[:, None] + chunk * BLOCK
        offsets += tl.load(of_chunk, mask=inside, other=0)
        differs += tl.load(of_chunk + 2 * plane, mask=inside, other=0)
        if BASELINE == _LENGTH_WEIGHTED:
            lengths += tl.load(of_chunk + 3 * plane, mask=inside, other=0)
            length_offsets += tl.load(of_chunk + 4 * plane, mask=inside, other=0)
    mean = tl.sum(offsets, 1) / tl.maximum(n, 1)
    all_equal = tl.sum(differs, 1) == 0

    squares = tl.zeros([ROWS, BLOCK], tl.float64)
    if SCALE == _STD:
        for tile in range(num_tiles):
            chunk = tile * BLOCK + lane
            inside = chunk < num_chunks[:, None]
            of_chunk = sums + at[:, None] + chunk * BLOCK
            size = tl.minimum(n[:, None] - chunk * BLOCK, BLOCK)
            of_mean = tl.load(of_chunk, mask=inside, other=0) / tl.where(inside, size, 1)
            of_mean = tl.where(inside, of_mean - mean[:, None], 0)
            squares += tl.load(of_chunk + plane, mask=inside, other=0) + size * of_mean * of_mean

    shown_origin, shown_offset = origin, mean
    factor = tl.full([ROWS], 1, tl.float64)
    if BASELINE == _LENGTH_WEIGHTED:
        length = tl.sum(lengths, 1)
        weighted = tl.sum(length_offsets, 1) / tl.where(length > 0, length, 1)
        shown_offset = tl.where(length > 0, weighted, -origin)
    if BASELINE == _LEAVE_ONE_OUT:  # s - mean of the others = (s - mean) n / (n - 1)
        factor = n.to(tl.float64) / tl.maximum(n - 1, 1)
    if BASELINE == _NO_BASELINE:
        shown_origin, shown_offset = tl.zeros_like(origin), tl.zeros_like(origin)
    if SCALE == _STD:
        factor *= _inverse_std(n, tl.sum(squares, 1), all_equal, ddof, eps)
    if SCALE == _BATCH_STD:
        batch = batch_moments + objective * 3
        m2 = tl.load(batch + 2)
        factor *= _inverse_std(tl.load(batch), m2, m2 == 0, ddof, eps)
    if SCALE == _MEAN:
        factor /= (origin + mean) + eps
    if BASELINE != _NO_BASELINE or SCALE == _STD:
        shown_origin = tl.where(all_equal, origin, shown_origin)
        shown_offset = tl.where(all_equal, 0, shown_offset)
        factor = tl.where(all_equal, 0, factor)

    # A group of one that keeps its score: baseline 0, std or mean 1.
    alone = n == 1
    raw_factor = 1 / (1 + eps) if SCALE != _NO_SCALE else 1.0
    shown_origin = tl.where(alone, 0, shown_origin)
    shown_offset = tl.where(alone, 0, shown_offset)
    factor = tl.where(alone, raw_factor, factor)
    tl.store(maps + at, shown_origin, mask=n > 0)
    tl.store(maps + plane + at, shown_offset, mask=n > 0)
    tl.store(maps + 2 * plane + at, factor, mask=n > 0)


@_triton.jit
def advantages_kernel(
    scores, weights, heads, counts, maps, mask, out, num_samples: tl.int64,
    num_objectives: tl.int64, num_tokens: tl.int64, mask_stride: tl.int64,
    SINGLETON_RAW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The weighted sum over the objectives, for each sample ``[N]`` or at its valid tokens ``[N, T]``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_samples
    head = tl.load(heads + row, mask=is_row, other=0)
    plane = num_objectives * num_samples
    total = tl.zeros([ROWS], tl.float64)
    for objective in range(num_objectives):
        at = objective * num_samples + head
        score = tl.load(scores + objective * num_samples + row, mask=is_row, other=float("nan"))
        n = tl.load(counts + at, mask=is_row, other=0)
        shown = (score == score) & (n > (0 if SINGLETON_RAW else 1))
        centred = score - tl.load(maps + at, mask=shown, other=0)
        centred -= tl.load(maps + plane + at, mask=shown, other=0)
        factor = tl.load(maps + 2 * plane + at, mask=shown, other=0)
        advantage = tl.where(shown & (centred != 0), centred * factor, 0)
        if weights is not None:
            advantage *= tl.load(weights + objective)
        total += advantage

    if mask is None:
        tl.store(out + row, total, mask=is_row)
    else:
        value = total.to(out.dtype.element_ty)[:, None]
        mask_row = mask + (row * mask_stride)[:, None]
        out_row = out + (row * num_tokens)[:, None]
        lane = tl.arange(0, BLOCK).to(tl.int64)[None, :]
        for tile in range(tl.cdiv(num_tokens, BLOCK)):
            column = tile * BLOCK + lane
            inside = is_row[:, None] & (column < num_tokens)
            shown = is_valid(mask_row, column, inside)
            tl.store(out_row + column, tl.where(shown, value, 0), mask=inside)


def _scores(
    rewards: Tensor,
    valid: Tensor | None,
    weights: Tensor | None,
    mask: Tensor | None,
    needs_flags: bool,
    needs_lengths: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scores ``[K, N]``; whether each is scored, and lengths ``[N]``, where an option needs them."""
    num_samples = rewards.shape[0]
    num_objectives = 1 if weights is None else weights.shape[0]
    sums_tokens = rewards.dim() == 2 and weights is None
    scores = rewards.new_empty((num_objectives, num_samples), dtype=torch.float64)
    is_scored = torch.empty_like(scores, dtype=torch.uint8) if needs_flags else None
    lengths = scores.new_empty((num_samples,)) if needs_lengths else None
    if not sums_tokens:
        _triton.launch(
            read_scores_kernel,
            (triton.cdiv(scores.numel(), 1024),),
            *(rewards, valid, scores, is_scored, num_samples, num_objectives, rewards.stride(0)),
            BLOCK=1024,
            num_warps=4,
        )
    if sums_tokens or needs_lengths:
        _triton.launch(
            sum_tokens_kernel,
            (triton.cdiv(num_samples, 4),),
            *(rewards if sums_tokens else None, mask, valid, scores, is_scored, lengths),
            *(num_samples, rewards.shape[1] if mask is None else mask.shape[1]),
            *(rewards.stride(0), _triton.row_stride(mask)),
            ROWS=4,
            BLOCK=256,
            num_warps=4,
        )
    return scores, is_scored, lengths


def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    valid: Tensor | None,
    weights: Tensor | None,
    mask: Tensor | None,
    baseline: int,
    scale: int,
    ddof: int,
    eps: float,
    singleton_raw: bool,
) -> Tensor:
    if rewards.stride(-1) != 1:
        rewards = rewards.contiguous()
    weights = None if weights is None else weights.contiguous()
    mask = _triton.mask_rows(mask)
    scores, is_scored, lengths = _scores(
        *(rewards, _triton.dense_mask(valid), weights, mask),
        needs_flags=scale == SCALES["batch_std"],
        needs_lengths=baseline == BASELINES["length_weighted"],
    )
    sizes = num_objectives, num_samples = scores.shape

    batch_moments = None
    if is_scored is not None:
        batch_moments = scores.new_empty((num_objectives, 3))
        for objective in zip(scores, is_scored, batch_moments):
            masked_moments_out(*objective)

    ids, order = torch.sort(groups.contiguous(), stable=True)
    head_of, end_of = (torch.searchsorted(ids, ids, right=right) for right in (False, True))
    num_scored = scores.index_select(1, order).isnan().logical_not().cumsum(1)
    heads = torch.empty_like(order)
    counts = torch.empty_like(num_scored)
    member_scores = torch.empty_like(scores)
    member_lengths = None if lengths is None else torch.empty_like(scores)
    _triton.launch(
        place_members_kernel,
        (triton.cdiv(scores.numel(), 512),),
        *(order, head_of, end_of, num_scored, scores, lengths, heads, counts, member_scores),
        *(member_lengths, *sizes[::-1]),
        BLOCK=512,
        num_warps=4,
    )
    programs = triton.cdiv(num_samples, _GROUPS["ROWS"]) * num_objectives
    sums = scores.new_empty((3 if lengths is None else 5, *sizes))
    _triton.launch(
        sums_of_chunks_kernel,
        (programs,),
        *(head_of, counts, member_scores, member_lengths, sums, num_samples, num_objectives),
        **_GROUPS,
        num_warps=4,
    )
    maps = scores.new_empty((3, *sizes))
    _triton.launch(
        group_maps_kernel,
        (programs,),
        *(head_of, counts, member_scores, sums, batch_moments, maps),
        *(num_samples, num_objectives, ddof, eps),
        BASELINE=baseline,
        SCALE=scale,
        **_GROUPS,
        num_warps=4,
    )
    shape = rewards.shape[:1] if mask is None else mask.shape
    out = rewards.new_empty(shape, dtype=result_dtype(rewards.dtype))
    rows, block = (512, 1) if mask is None else _triton.tile_shape(mask, None)
    _triton.launch(
        advantages_kernel,
        (triton.cdiv(num_samples, rows),),
        *(scores, weights, heads, counts, maps, mask, out, num_samples, num_objectives),
        *(out.shape[-1], _triton.row_stride(mask)),
        SINGLETON_RAW=singleton_raw,
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
    )
    return out
