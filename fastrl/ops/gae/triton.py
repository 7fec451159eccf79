"""Generalised advantage estimation and its adjoint in Triton, tile by tile as `_triton_scan` says.

Tiles start at the last valid token, in the adjoint, which runs the other way, at the first one: so a row gives the same
bits with any amount of padding, on either side, and packed.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fastrl import _triton
from fastrl._library import result_dtype
from fastrl._triton import (
    before,
    edge,
    first_valid,
    last_valid_end,
    scan,
    spans,
    steps_to,
)
from fastrl._triton_scan import (
    BY_ROW,
    REDUCE,
    ScanRows,
    carry_into,
    completes,
    leave_steps,
    link_into,
    program_tile,
    tiles_end,
)

_CARRY, _ZERO_STEP, _IGNORE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _lam_of_rows(lam, lam_rows, row, num_rows, T: tl.constexpr, ROWS: tl.constexpr):
    if lam_rows is not None:
        return tl.load(lam_rows + row, mask=row < num_rows, other=0)[:, None]
    else:
        return tl.full([ROWS, 1], lam, T)


@triton.jit
def _tokens(mask_row, done_row, column, inside, HOLES: tl.constexpr):
    """Of each token: whether it is valid, is read, is a step, and is one that does not end its episode."""
    valid = inside
    if mask_row is not None:  # `is_valid` takes three registers more
        valid = tl.load(mask_row + column, mask=inside, other=0) != 0
    is_read = inside if HOLES == _IGNORE else valid
    is_step = valid if HOLES == _CARRY else inside
    kept = is_step
    if done_row is not None:
        kept = is_step & (tl.load(done_row + column, mask=is_read, other=0) == 0)
    return valid, is_read, is_step, kept


@triton.jit
def _factor(decay, is_step, kept):
    """What the running value is multiplied by: 1 where there is no step, 0 behind the end of an episode."""
    return tl.where(is_step, tl.where(kept, decay, 0), 1)


@triton.jit
def _value_behind(
    value_row, mask_row, column, end, following, HOLES: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """V of the nearest step from ``column [R]`` on, ``following [R, 1]`` without one."""
    column = tl.maximum(column, 0)
    if (mask_row is not None) and (HOLES == _CARRY):
        column += first_valid(mask_row + column[:, None], end - column, BLOCK)
    is_step = (column < end)[:, None]
    is_read = is_step
    if (mask_row is not None) and (HOLES != _IGNORE):
        is_read &= tl.load(mask_row + column[:, None], mask=is_step, other=0) != 0
    value = tl.load(value_row + column[:, None], mask=is_read, other=0).to(T)
    return tl.where(is_step, value, following)


@triton.jit
def _goes_on_before(
    done_row, mask_row, column, first, size, HOLES: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """1 where the nearest step in front of ``column [R]`` does not end its episode, 0 where it does or there is none."""
    column = tl.minimum(tl.maximum(column, first), size)
    # The first step is at ``first``: which one is the nearest matters only where it may end an episode.
    if (mask_row is not None) and (HOLES == _CARRY) and (done_row is not None):
        column = first + last_valid_end(mask_row + first[:, None], column - first, BLOCK)
    goes_on = (column > first)[:, None]
    if done_row is not None:
        is_read = goes_on
        if (mask_row is not None) and (HOLES != _IGNORE):
            is_read &= tl.load(mask_row + column[:, None] - 1, mask=goes_on, other=0) != 0
        goes_on &= tl.load(done_row + column[:, None] - 1, mask=is_read, other=0) == 0
    return goes_on.to(T)


@_triton.jit
def gae_kernel(
    rewards, values, mask, dones, bootstrap, lam_rows, cu_seqlens, advantages, returns, positions, states,
    num_rows: tl.int64, length: tl.int64, num_slots: tl.int64, reward_stride: tl.int64, value_stride: tl.int64,
    mask_stride: tl.int64, done_stride: tl.int64, out_stride: tl.int64, gamma: tl.float64, lam: tl.float64,
    returns_lam: tl.float64, PASS: tl.constexpr, HOLES: tl.constexpr, FILL_CARRY: tl.constexpr,
    TWO_LAMBDAS: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, first_tile = program_tile(cu_seqlens, num_rows, length, PASS, ROWS, BLOCK)
    start, size = spans(cu_seqlens, row, num_rows, length)
    lane = tl.arange(0, BLOCK)[None, :]
    reward_row = rewards + (start + row * reward_stride)[:, None]
    advantage_row = advantages + (start + row * out_stride)[:, None]
    if values is not None:
        value_row = values + (start + row * value_stride)[:, None]
        return_row = returns + (start + row * out_stride)[:, None]
    done_row = dones
    if dones is not None:
        done_row = dones + (start + row * done_stride)[:, None]

    end, mask_row = size, mask
    if mask is not None:
        mask_row = mask + (start + row * mask_stride)[:, None]
        # Padding on the right changes no state unless it bootstraps through steps of its own.
        if HOLES == _CARRY or (HOLES == _ZERO_STEP and bootstrap is None):
            if PASS == BY_ROW:
                end = last_valid_end(mask_row, size, BLOCK)
            else:
                end = tl.load(positions + row)
            padding = size - end if PASS != REDUCE else tl.zeros_like(size)
            for tile in range(first_tile, tiles_end(first_tile, padding, PASS, BLOCK)):
                column = (end + tile * BLOCK)[:, None] + lane
                inside = column < size[:, None]
                nothing = tl.zeros([ROWS, BLOCK], T)
                tl.store(advantage_row + column, nothing, mask=inside)
                if values is not None:
                    shown = nothing
                    if FILL_CARRY and HOLES == _CARRY:
                        shown = tl.load(value_row + column, mask=inside, other=0).to(T)
                    tl.store(return_row + column, shown, mask=inside)

    gammas = tl.full([ROWS, 1], gamma, T)
    decay = gammas * _lam_of_rows(lam, lam_rows, row, num_rows, T, ROWS)
    second_decay = gammas * tl.full([ROWS, 1], returns_lam, T)
    following = tl.zeros([ROWS, 1], T)
    if bootstrap is not None:
        following = tl.load(bootstrap + row, mask=row < num_rows, other=0)[:, None]
    carry = tl.zeros([ROWS, 1], T)
    if values is None:  # the return itself is carried, and the bootstrap enters it once
        carry = following
    else:
        if PASS == REDUCE:
            behind = end - first_tile * BLOCK
            following = _value_behind(value_row, mask_row, behind, end, following, HOLES, T, BLOCK)
        following = link_into(following, states, num_slots, 1 + TWO_LAMBDAS, PASS)
    carry = carry_into(carry, states, num_slots, 0, PASS)
    if TWO_LAMBDAS:
        second_carry = carry_into(tl.zeros([ROWS, 1], T), states, num_slots, 1, PASS)

    for tile in range(first_tile, tiles_end(first_tile, end, PASS, BLOCK)):
        column = (end - (tile + 1) * BLOCK)[:, None] + lane
        inside = column >= 0
        valid, is_read, is_step, kept = _tokens(mask_row, done_row, column, inside, HOLES)
        delta = tl.load(reward_row + column, mask=is_read, other=0).to(T)
        if values is not None:
            is_shown = inside if FILL_CARRY and HOLES == _CARRY else is_read
            shown = tl.load(value_row + column, mask=is_shown, other=0).to(T)
            value = tl.where(is_read, shown, 0)
            next_value, following = before(is_step, value, following, REVERSE=True)
            delta = (delta + gammas * tl.where(kept, next_value, 0)) - value
        delta = tl.where(is_step, delta, 0)
        factor = _factor(decay, is_step, kept)
        if TWO_LAMBDAS:
            second_factor = _factor(second_decay, is_step, kept)
        if PASS == REDUCE:
            factor, advantage = steps_to(factor, delta, REVERSE=True)
            leave_steps(states, num_slots, factor, advantage, 0, REVERSE=True)
            if TWO_LAMBDAS:
                factor, result = steps_to(second_factor, delta, REVERSE=True)
                leave_steps(states, num_slots, factor, result, 1, REVERSE=True)
        else:
            advantage = scan(factor, delta, carry, REVERSE=True)
            carry = edge(advantage, REVERSE=True)
            if values is not None:
                result = advantage
                if TWO_LAMBDAS:
                    result = scan(second_factor, delta, second_carry, REVERSE=True)
                    second_carry = edge(result, REVERSE=True)
                result += shown
                if not FILL_CARRY:
                    result = tl.where(valid, result, 0)
                tl.store(return_row + column, result, mask=inside)
            if not FILL_CARRY:
                advantage = tl.where(valid, advantage, 0)
            tl.store(advantage_row + column, advantage, mask=inside)


# Left to right over the same steps:
#   u_t = gA_t + c u_{t-1},  w_t = gR_t + c' w_{t-1},  d_t = u_t + w_t  (the gradient of delta_t)
#   grad r_t = d_t,  grad V_t = gR_t - d_t + gamma d_{t-1},  grad bootstrap = gamma d_last
# with c, c' and gamma replaced by 0 across the end of an episode. In holes u and w stay as they are, so that d before the
# first step of a tile is the sum of their carries.
@_triton.jit
def gae_backward_kernel(
    grad_advantages, grad_returns, mask, dones, lam_rows, cu_seqlens, grad_rewards, grad_values, grad_bootstrap,
    positions, states,
    num_rows: tl.int64, length: tl.int64, num_slots: tl.int64, advantage_stride: tl.int64, return_stride: tl.int64,
    mask_stride: tl.int64, done_stride: tl.int64, out_stride: tl.int64, gamma: tl.float64, lam: tl.float64,
    returns_lam: tl.float64, PASS: tl.constexpr, HOLES: tl.constexpr, TWO_LAMBDAS: tl.constexpr, T: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, first_tile = program_tile(cu_seqlens, num_rows, length, PASS, ROWS, BLOCK)
    start, size = spans(cu_seqlens, row, num_rows, length)
    lane = tl.arange(0, BLOCK)[None, :]
    advantage_row = grad_advantages + (start + row * advantage_stride)[:, None]
    out_row = (start + row * out_stride)[:, None]
    if grad_returns is not None:
        return_row = grad_returns + (start + row * return_stride)[:, None]
    done_row = dones
    if dones is not None:
        done_row = dones + (start + row * done_stride)[:, None]

    first, mask_row = tl.zeros_like(size), mask
    if mask is not None:
        mask_row = mask + (start + row * mask_stride)[:, None]
        if HOLES != _IGNORE:  # no gradient enters a hole, and none is there yet
            if PASS == BY_ROW:
                first = first_valid(mask_row, size, BLOCK)
            else:
                first = size - tl.load(positions + row)
            padding = first if PASS != REDUCE else tl.zeros_like(size)
            for tile in range(first_tile, tiles_end(first_tile, padding, PASS, BLOCK)):
                column = tile * BLOCK + lane
                outside = column < first[:, None]
                nothing = tl.zeros([ROWS, BLOCK], T)
                tl.store(grad_rewards + out_row + column, nothing, mask=outside)
                if grad_returns is not None:
                    tl.store(grad_values + out_row + column, nothing, mask=outside)

    gammas = tl.full([ROWS, 1], gamma, T)
    decay = gammas * _lam_of_rows(lam, lam_rows, row, num_rows, T, ROWS)
    second_decay = gammas * tl.full([ROWS, 1], returns_lam, T)
    # Of the last step to the left: whether the episode goes on behind it, and its gradients.
    goes_on = tl.zeros([ROWS, 1], T)
    if PASS == REDUCE:
        begin = first + first_tile * BLOCK
        goes_on = _goes_on_before(done_row, mask_row, begin, first, size, HOLES, T, BLOCK)
    goes_on = link_into(goes_on, states, num_slots, 1 + TWO_LAMBDAS, PASS)
    carry = carry_into(tl.zeros([ROWS, 1], T), states, num_slots, 0, PASS)
    if TWO_LAMBDAS:
        second_carry = carry_into(tl.zeros([ROWS, 1], T), states, num_slots, 1, PASS)

    for tile in range(first_tile, tiles_end(first_tile, size - first, PASS, BLOCK)):
        column = (first + tile * BLOCK)[:, None] + lane
        inside = column < size[:, None]
        valid, is_read, is_step, kept = _tokens(mask_row, done_row, column, inside, HOLES)
        kept, goes_on = before(is_step, kept.to(T), goes_on, REVERSE=False)
        delta = tl.load(advantage_row + column, mask=valid, other=0).to(T)
        if grad_returns is not None:
            of_return = tl.load(return_row + column, mask=valid, other=0).to(T)
            if not TWO_LAMBDAS:
                delta += of_return
        factor = _factor(decay, is_step, kept != 0)
        if TWO_LAMBDAS:
            second_factor = _factor(second_decay, is_step, kept != 0)
        if PASS == REDUCE:
            factor, delta = steps_to(factor, delta, REVERSE=False)
            leave_steps(states, num_slots, factor, delta, 0, REVERSE=False)
            if TWO_LAMBDAS:
                factor, delta = steps_to(second_factor, of_return, REVERSE=False)
                leave_steps(states, num_slots, factor, delta, 1, REVERSE=False)
        else:
            last = carry + second_carry if TWO_LAMBDAS else carry
            delta = scan(factor, delta, carry, REVERSE=False)
            carry = edge(delta, REVERSE=False)
            if TWO_LAMBDAS:
                second = scan(second_factor, of_return, second_carry, REVERSE=False)
                second_carry = edge(second, REVERSE=False)
                delta += second
            tl.store(grad_rewards + out_row + column, tl.where(is_read, delta, 0), mask=inside)
            delta_before, _ = before(is_step, delta, last, REVERSE=False)
            if grad_returns is not None:
                of_value = of_return - delta + gammas * kept * delta_before
                of_value = tl.where(is_read, of_value, 0)
                tl.store(grad_values + out_row + column, of_value, mask=inside)
    if PASS != REDUCE:
        last = carry + second_carry if TWO_LAMBDAS else carry
        is_known = completes(row, first_tile, size - first, num_rows, PASS, BLOCK)
        tl.store(grad_bootstrap + row[:, None], goes_on * gammas * last, mask=is_known)


def gae_out(
    rewards: Tensor,
    values: Tensor | None,
    mask: Tensor | None,
    dones: Tensor | None,
    bootstrap: Tensor | None,
    lam_rows: Tensor | None,
    cu_seqlens: Tensor | None,
    gamma: float,
    lam: float,
    returns_lam: float,
    holes: int,
    fill_carry: bool,
    advantages: Tensor,
    returns: Tensor | None,
) -> None:
    inputs = [_triton.unit_stride(rewards), _triton.unit_stride(values)]
    inputs += [_triton.mask_rows(mask), _triton.mask_rows(dones)]
    bootstrap, lam_rows, cu_seqlens = map(_triton.dense, (bootstrap, lam_rows, cu_seqlens))
    has_values = values is not None
    has_two = has_values and _has_two(lam_rows, lam, returns_lam)
    ends_early = holes == _CARRY.value or (holes == _ZERO_STEP.value and bootstrap is None)
    rows = ScanRows(
        *(rewards, cu_seqlens),
        num_scans=1 + has_two,
        num_links=int(has_values),
        mask=inputs[2] if ends_early else None,
    )
    rows.run(
        gae_kernel,
        *(*inputs, bootstrap, lam_rows, cu_seqlens, advantages, returns, rows.positions),
        *rows.arguments,
        *map(_triton.row_stride, (*inputs, advantages)),
        *(gamma, lam, returns_lam),
        initial=None if has_values else bootstrap,
        HOLES=holes if mask is not None else _IGNORE.value,
        FILL_CARRY=fill_carry and mask is not None,
        TWO_LAMBDAS=has_two,
        T=_triton.compute_type(rewards.dtype),
        num_warps=4 if rows.tile["ROWS"] == 16 else 8,  # eight would spill on sm_80
    )


def _has_two(lam_rows: Tensor | None, lam: float, returns_lam: float) -> bool:
    return returns_lam >= 0 and (lam_rows is not None or returns_lam != lam)


def _result(like: Tensor) -> Tensor:
    return like.new_empty(like.shape, dtype=result_dtype(like.dtype))


def gae(rewards: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    advantages, returns = _result(rewards), _result(rewards)
    gae_out(*(rewards, *others, advantages, returns))
    return advantages, returns


def discounted_returns(
    rewards: Tensor,
    mask: Tensor | None,
    dones: Tensor | None,
    bootstrap: Tensor | None,
    cu_seqlens: Tensor | None,
    gamma: float,
    holes: int,
    fill_carry: bool,
) -> Tensor:
    out = _result(rewards)
    gae_out(
        *(rewards, None, mask, dones, bootstrap, None, cu_seqlens, gamma, 1.0, -1.0),
        *(holes, fill_carry, out, None),
    )
    return out


def gae_backward(
    grad_advantages: Tensor,
    grad_returns: Tensor | None,
    mask: Tensor | None,
    dones: Tensor | None,
    lam_rows: Tensor | None,
    cu_seqlens: Tensor | None,
    gamma: float,
    lam: float,
    returns_lam: float,
    holes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad_values is empty for discounted returns, which have none; grad_bootstrap has one element per row."""
    inputs = [_triton.unit_stride(grad_advantages), _triton.unit_stride(grad_returns)]
    inputs += [_triton.mask_rows(mask), _triton.mask_rows(dones)]
    lam_rows, cu_seqlens = _triton.dense(lam_rows), _triton.dense(cu_seqlens)
    has_two = grad_returns is not None and _has_two(lam_rows, lam, returns_lam)
    rows = ScanRows(
        *(grad_advantages, cu_seqlens),
        num_scans=1 + has_two,
        num_links=1,
        mask=inputs[2] if holes != _IGNORE.value else None,
        reverse=False,
    )
    grad_rewards = _result(grad_advantages)
    grad_values = grad_rewards.new_empty(grad_rewards.shape if grad_returns is not None else (0,))
    grad_bootstrap = grad_rewards.new_empty((rows.count,))
    rows.run(
        gae_backward_kernel,
        *(*inputs, lam_rows, cu_seqlens, grad_rewards, grad_values, grad_bootstrap),
        *(rows.positions, *rows.arguments),
        *map(_triton.row_stride, (*inputs, grad_rewards)),
        *(gamma, lam, returns_lam),
        HOLES=holes if mask is not None else _IGNORE.value,
        TWO_LAMBDAS=has_two,
        T=_triton.compute_type(grad_advantages.dtype),
    )
    return grad_rewards, grad_values, grad_bootstrap
