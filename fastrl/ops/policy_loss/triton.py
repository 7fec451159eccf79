"""The policy loss in Triton: one pass over slots of tokens gives sums and gradients.

The ratio of a whole sequence needs sums over its row first: a pass over the log-ratios comes before, and for the gradient
through that ratio another one after.
"""

from __future__ import annotations

import math
from typing import Any

import torch
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
    slots_of_row,
    store_sum,
)
from fastrl.ops.policy_loss.op import KL_GRADS, KLS, RATIOS, SURROGATES

_TOKEN, _SEQUENCE = (tl.constexpr(RATIOS[name]) for name in ("token", "sequence"))
_CISPO, _REINFORCE = (tl.constexpr(SURROGATES[name]) for name in ("cispo", "reinforce"))
_K1, _K2, _K3 = (tl.constexpr(KLS[name]) for name in ("k1", "k2", "k3"))
_GRAD_K2, _GRAD_RATIO = (tl.constexpr(KL_GRADS[name]) for name in ("k2", "ratio"))
# What a pass is for: all at once, or the sums of whole sequences and then their gradients.
_ALL, _SUMS, _GRADIENTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# Columns of a line of sums: the metrics behind the two counts of a call, in their order; the smallest ratio negated.
_COLUMNS, _RATIO_MIN, _RATIO_MAX = tl.constexpr(16), tl.constexpr(11), tl.constexpr(12)
_POLICY_TERM, _KL_TERM, _ENTROPY_TERM = tl.constexpr(13), tl.constexpr(14), tl.constexpr(15)


@triton.jit
def _exp_pair(x):
    """e^x, and e^x - 1 without the cancellation near 0: x = n ln 2 + r, with ln 2 in two parts so that r is exact."""
    if x.dtype == tl.float64:
        x = at_least(at_most(x, 710.0), -746.0)
        n = tl.floor(x * 1.4426950408889634 + 0.5)
        r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10
    else:
        x = at_least(at_most(x, 89.0), -104.0)
        n = tl.floor(x * 1.4426950408889634 + 0.5)
        r = (x - n * 0.693359375) - n * -2.12194440e-4
    # r (1 + r/2 (1 + r/3 (...))), for r up to ln 2 / 2.
    series = r * 0 + 1
    DEGREE: tl.constexpr = 14 if x.dtype == tl.float64 else 8
    for k in tl.static_range(DEGREE, 1, -1):
        series = 1 + r * (1.0 / k) * series
    expm1 = r * series
    # In two steps: n reaches beyond the exponents of normal numbers.
    half = tl.floor(n * 0.5)
    exp = (1 + expm1) * tl.exp2(half) * tl.exp2(n - half)
    return exp, tl.where(n == 0, expm1, exp - 1)


@triton.jit
def _surrogate(
    logp, ratio, advantage, ratio_low, ratio_high, dual_clip, ratio_cap, SURROGATE: tl.constexpr, HAS_CAP: tl.constexpr
):  # fmt: skip
    """Loss, its derivatives where logp appears directly and through the log-ratio; whether it is clipped, dual-clipped."""
    nothing = tl.zeros_like(logp)
    nowhere = nothing != 0
    if SURROGATE == _REINFORCE:
        return -advantage * logp, -advantage, nothing, nowhere, nowhere
    else:
        clipped_ratio = at_least(at_most(ratio, ratio_high), ratio_low)
        if SURROGATE == _CISPO:
            slope = -advantage * clipped_ratio
            return slope * logp, slope, nothing, clipped_ratio != ratio, nowhere
        else:
            capped = ratio
            if HAS_CAP:
                capped = at_most(ratio, ratio_cap)
            plain = -advantage * capped
            clipped = -advantage * clipped_ratio
            bound = -advantage * dual_clip
            is_clipped = clipped > plain
            larger = tl.where(is_clipped, clipped, plain)
            is_dual = (advantage < 0) & (larger > bound)
            through = tl.where(is_clipped, 0, larger)
            if HAS_CAP:
                # A cap below the edge of the clip can make the clipped branch win inside of the clip, where it has a
                # gradient.
                of_clipped = tl.where(clipped_ratio != ratio, 0, larger)
                of_plain = tl.where(ratio > ratio_cap, 0, larger)
                through = tl.where(is_clipped, of_clipped, of_plain)
            through = tl.where(is_dual, 0, through)
            return tl.where(is_dual, bound, larger), nothing, through, is_clipped, is_dual


@triton.jit
def _kl(logp, ref_logp, ratio, kl_input_clamp, kl_clamp, KL: tl.constexpr, KL_GRAD: tl.constexpr):
    """The estimate, what the loss contains of it, and the derivative of that where logp appears directly."""
    x = logp - ref_logp
    if KL == _K1:
        estimate = x
        slope = tl.zeros_like(x) + 1
    elif KL == _K2:
        estimate = 0.5 * (x * x)
        slope = x
    elif KL == _K3:
        y = at_least(at_most(ref_logp - logp, kl_input_clamp), -kl_input_clamp)
        _, minus_one = _exp_pair(y)
        value = minus_one - y
        estimate = at_most(value, kl_clamp)
        slope = tl.where((tl.abs(x) > kl_input_clamp) | (value > kl_clamp), 0, -minus_one)
    else:
        estimate = tl.abs(x)
        slope = tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, tl.zeros_like(x)))
    loss = estimate
    if KL_GRAD == _GRAD_K2:
        slope = x
    elif KL_GRAD == _GRAD_RATIO:
        loss = estimate * ratio
        slope = slope * ratio
    return estimate, loss, slope


@triton.jit
def _row_mean(sums, cu_seqlens, row_spans, row, count, num_rows, length, T: tl.constexpr):
    """The mean over the valid tokens of a row of what its slots have summed; 0 without one."""
    begin, slots = slots_of_row(row_spans, cu_seqlens, row, num_rows, length)
    total = tl.sum(add_lines(sums, begin, slots, 1, 0, 0, 128), 0)
    return (total / tl.maximum(count, 1).to(tl.float64)).to(T)


@triton.jit
def _per_token(x, row, stride, at, valid, PER_ROW: tl.constexpr, T: tl.constexpr):
    if PER_ROW:
        return tl.where(valid, tl.load(x + row * stride).to(T), 0)
    else:
        return tl.load(x + row * stride + at, mask=valid, other=0).to(T)


@_triton.jit
def log_ratio_kernel(
    logp, old_logp, mask, cu_seqlens, row_spans, log_ratio_sums,
    num_rows: tl.int64, length: tl.int64, mask_stride: tl.int64, logp_stride: tl.int64, old_stride: tl.int64,
    T: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    row, start, _, column, _, valid = slot_tokens(
        mask, cu_seqlens, row_spans, slot, num_rows, length, mask_stride
    )
    at = start + column
    new = tl.load(logp + row * logp_stride + at, mask=valid, other=0).to(T)
    old = tl.load(old_logp + row * old_stride + at, mask=valid, other=0).to(T)
    store_sum(log_ratio_sums, slot, 0, new - old, 1)


@_triton.jit
def policy_loss_kernel(
    logp, old_logp, advantages, is_weights, ref_logp, entropy, mask, cu_seqlens, row_spans, totals,
    log_ratio_sums, gradient_sums, slot_sums, grad_logp, grad_entropy,
    num_rows: tl.int64, length: tl.int64, mask_stride: tl.int64, logp_stride: tl.int64, old_stride: tl.int64,
    advantage_stride: tl.int64, weight_stride: tl.int64, ref_stride: tl.int64, entropy_stride: tl.int64,
    out_stride: tl.int64, ratio_low: tl.float64, ratio_high: tl.float64, dual_clip: tl.float64,
    ratio_cap: tl.float64, log_ratio_clamp: tl.float64, kl_coef: tl.float64, kl_input_clamp: tl.float64,
    kl_clamp: tl.float64, entropy_coef: tl.float64,
    PASS: tl.constexpr, RATIO: tl.constexpr, SURROGATE: tl.constexpr, HAS_CAP: tl.constexpr, KL: tl.constexpr,
    KL_GRAD: tl.constexpr, AGG: tl.constexpr, ADVANTAGE_PER_ROW: tl.constexpr, WEIGHT_PER_ROW: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    row, start, count, column, exists, valid = slot_tokens(
        mask, cu_seqlens, row_spans, slot, num_rows, length, mask_stride
    )
    at = start + column
    new = tl.load(logp + row * logp_stride + at, mask=valid, other=0).to(T)
    old = tl.load(old_logp + row * old_stride + at, mask=valid, other=0).to(T)
    advantage = _per_token(advantages, row, advantage_stride, at, valid, ADVANTAGE_PER_ROW, T)
    finite = is_finite(new) & is_finite(old) & is_finite(advantage)

    bound = tl.full([], log_ratio_clamp, T)
    token_log_ratio = new - old
    unclamped = token_log_ratio
    if RATIO != _TOKEN:
        mean = _row_mean(log_ratio_sums, cu_seqlens, row_spans, row, count, num_rows, length, T)
        unclamped = tl.where(valid, mean, 0)
    log_ratio = at_least(at_most(unclamped, bound), -bound)
    ratio, ratio_minus_one = _exp_pair(log_ratio)
    low, high = tl.full([], ratio_low, T), tl.full([], ratio_high, T)
    dual, cap = tl.full([], dual_clip, T), tl.full([], ratio_cap, T)
    policy, direct, through, is_clipped, is_dual = _surrogate(
        new, ratio, advantage, low, high, dual, cap, SURROGATE, HAS_CAP
    )
    if is_weights is not None:
        weight = _per_token(is_weights, row, weight_stride, at, valid, WEIGHT_PER_ROW, T)
        finite = finite & is_finite(weight)
        policy *= weight
        direct *= weight
        through *= weight
    kl, kl_loss = tl.zeros_like(new), tl.zeros_like(new)
    if ref_logp is not None:
        ref = tl.load(ref_logp + row * ref_stride + at, mask=valid, other=0).to(T)
        finite = finite & is_finite(ref)
        most, top = tl.full([], kl_input_clamp, T), tl.full([], kl_clamp, T)
        kl, kl_loss, kl_slope = _kl(new, ref, ratio, most, top, KL, KL_GRAD)
        coef = tl.full([], kl_coef, T)
        direct += coef * kl_slope
        if KL_GRAD == _GRAD_RATIO:
            through += coef * kl_loss
    bonus = tl.zeros_like(new)
    if entropy is not None:
        bonus = tl.load(entropy + row * entropy_stride + at, mask=valid, other=0).to(T)
        finite = finite & is_finite(bonus)
    # A clamped ratio has no gradient.
    through = tl.where(tl.abs(unclamped) > bound, 0, through)
    through = tl.where(valid, through, 0)

    if PASS != _GRADIENTS:
        shown = log_ratio if RATIO == _TOKEN else token_log_ratio
        is_high = (advantage > 0) & (ratio > high)
        is_low = (advantage < 0) & (ratio < low)
        # A NaN is neither the smallest nor the largest ratio.
        counts = valid & (ratio == ratio)
        smallest = tl.min(tl.where(counts, ratio, float("inf")), 0)
        largest = tl.max(tl.where(counts, ratio, -float("inf")), 0)
        store_sum(slot_sums, slot, 0, tl.where(finite, 0, 1), _COLUMNS)
        store_sum(slot_sums, slot, 1, is_high.to(tl.int32), _COLUMNS)
        store_sum(slot_sums, slot, 2, is_low.to(tl.int32), _COLUMNS)
        store_sum(slot_sums, slot, 3, (valid & is_clipped).to(tl.int32), _COLUMNS)
        store_sum(slot_sums, slot, 4, is_dual.to(tl.int32), _COLUMNS)
        store_sum(slot_sums, slot, 5, 0 - shown, _COLUMNS)
        store_sum(slot_sums, slot, 6, tl.where(valid, ratio_minus_one - log_ratio, 0), _COLUMNS)
        store_sum(slot_sums, slot, 7, tl.where(valid, kl, 0), _COLUMNS)
        store_sum(slot_sums, slot, 8, bonus, _COLUMNS)
        store_sum(slot_sums, slot, 9, tl.where(valid, ratio, 0), _COLUMNS)
        store_sum(slot_sums, slot, 10, tl.where(valid, ratio * ratio, 0), _COLUMNS)
        tl.store(slot_sums + slot * _COLUMNS + _RATIO_MIN, (-smallest).to(tl.float64))
        tl.store(slot_sums + slot * _COLUMNS + _RATIO_MAX, largest.to(tl.float64))
        # Zero advantage times the ratio of a row that has overflowed would be NaN.
        store_sum(slot_sums, slot, _POLICY_TERM, tl.where(valid, policy, 0), _COLUMNS)
        store_sum(slot_sums, slot, _KL_TERM, tl.where(valid, kl_loss, 0), _COLUMNS)
        store_sum(slot_sums, slot, _ENTROPY_TERM, bonus, _COLUMNS)
    if PASS == _SUMS:
        store_sum(gradient_sums, slot, 0, through, 1)
    else:
        scale = row_weight(totals, count, AGG).to(T)
        if PASS == _GRADIENTS:
            through = _row_mean(
                gradient_sums, cu_seqlens, row_spans, row, count, num_rows, length, T
            )
        out = row * out_stride + at
        if grad_logp is not None:
            gradient = scale * (direct + through)
            tl.store(grad_logp + out, tl.where(valid, gradient, 0), mask=exists)
        if grad_entropy is not None:
            gradient = scale * -tl.full([], entropy_coef, T)
            tl.store(grad_entropy + out, tl.where(valid, gradient, 0), mask=exists)


@_triton.jit
def policy_total_kernel(
    row_sums, totals, loss, metrics, num_rows: tl.int64, kl_coef: tl.float64, entropy_coef: tl.float64,
    BLOCK: tl.constexpr,
):  # fmt: skip
    line = add_lines(row_sums, 0, num_rows, _COLUMNS, _RATIO_MIN, 2, BLOCK)
    column = tl.arange(0, _COLUMNS)
    policy_term = tl.sum(tl.where(column == _POLICY_TERM, line, 0), 0)
    kl_term = tl.sum(tl.where(column == _KL_TERM, line, 0), 0)
    entropy_term = tl.sum(tl.where(column == _ENTROPY_TERM, line, 0), 0)
    kl_coef = tl.full([], kl_coef, tl.float64)
    entropy_coef = tl.full([], entropy_coef, tl.float64)
    tl.store(loss, policy_term + kl_coef * kl_term - entropy_coef * entropy_term)
    tokens = tl.load(totals)
    tl.store(metrics, tokens)
    tl.store(metrics + 1, tl.load(totals + 1))
    is_extreme = (column == _RATIO_MIN) | (column == _RATIO_MAX)
    line = tl.where(column == _RATIO_MIN, -line, line)
    extreme = tl.where(tokens == 0, 1, line)
    tl.store(metrics + 2 + column, tl.where(is_extreme, extreme, line))


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    is_weights: Tensor | None,
    ref_logp: Tensor | None,
    entropy: Tensor | None,
    cu_seqlens: Tensor | None,
    denom_tensor: Tensor | None,
    denom: float,
    numbers: list[float],
    choices: list[int],
    grad_logp: bool,
    grad_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    clip_low, clip_high, dual_clip, ratio_cap, *others = numbers
    _, kl_coef, _, _, entropy_coef = others
    ratio, surrogate, kl, kl_grad, agg = choices
    rows = LossRows(logp, mask, cu_seqlens, denom_tensor, denom, agg)
    new, old, ref, bonus = map(_triton.unit_stride, (logp, old_logp, ref_logp, entropy))
    advantages, advantage_stride, advantage_per_row = _token_or_row(advantages, logp)
    weights, weight_stride, weight_per_row = None, 0, False
    if is_weights is not None:
        weights, weight_stride, weight_per_row = _token_or_row(is_weights, logp)

    of_logp = logp.new_empty(logp.shape if grad_logp else (0,))
    of_entropy = logp if entropy is None else entropy
    of_entropy = of_entropy.new_empty(logp.shape if grad_entropy else (0,))
    slot_sums = rows.new_sums(_COLUMNS.value)
    is_sequence = ratio != _TOKEN.value
    log_ratio_sums = rows.new_sums(1) if is_sequence else None
    gradient_sums = rows.new_sums(1) if ratio == _SEQUENCE.value else None
    # Double has registers for half as many tokens of a thread.
    num_warps = 8 if logp.dtype == torch.float64 else 4
    meta: dict[str, Any] = {"num_warps": num_warps, "T": _triton.compute_type(logp.dtype)}
    if is_sequence:
        _triton.launch(
            log_ratio_kernel,
            (rows.num_slots,),
            *(new, old, *rows.tensors[:3], log_ratio_sums),
            *(*rows.numbers, _triton.row_stride(new), _triton.row_stride(old)),
            **meta,
        )

    def run(which: tl.constexpr) -> None:
        _triton.launch(
            policy_loss_kernel,
            (rows.num_slots,),
            *(new, old, advantages, weights, ref, bonus, *rows.tensors),
            *(log_ratio_sums, gradient_sums, slot_sums),
            *(of_logp if grad_logp else None, of_entropy if grad_entropy else None),
            *(*rows.numbers, _triton.row_stride(new), _triton.row_stride(old)),
            *(advantage_stride, weight_stride, _triton.row_stride(ref), _triton.row_stride(bonus)),
            *(dense_row_stride(logp), 1 - clip_low, 1 + clip_high, dual_clip, ratio_cap, *others),
            PASS=which.value,
            RATIO=ratio,
            SURROGATE=surrogate,
            HAS_CAP=math.isfinite(ratio_cap),
            KL=kl,
            KL_GRAD=kl_grad,
            AGG=agg,
            ADVANTAGE_PER_ROW=advantage_per_row,
            WEIGHT_PER_ROW=weight_per_row,
            # The sums of a sequence spill on sm_80 with four warps, its gradients with eight.
            **(meta | {"num_warps": 8} if which.value == _SUMS.value else meta),
        )

    if ratio != _SEQUENCE.value:
        run(_ALL)
    else:
        run(_SUMS)
        if grad_logp or grad_entropy:
            run(_GRADIENTS)

    row_sums = rows.fold(
        slot_sums, FIRST_WEIGHTED=_POLICY_TERM.value, FIRST_PEAK=_RATIO_MIN.value, NUM_PEAKS=2
    )
    loss = logp.new_empty((), dtype=result_dtype(logp.dtype))
    metrics = slot_sums.new_empty((_COLUMNS.value + 2,))
    _triton.launch(
        policy_total_kernel,
        (1,),
        *(row_sums, rows.totals, loss, metrics, rows.count, kl_coef, entropy_coef),
        num_warps=8,
        BLOCK=256,
    )
    return loss, metrics, of_logp, of_entropy


def _token_or_row(x: Tensor, logp: Tensor) -> tuple[Tensor, int, bool]:
    """An input with one value per token, or per row: as ``[B]``, or as ``[B, 1]`` expanded over the tokens; its stride
    between rows, and whether it is per row."""
    if x.shape != logp.shape or (x.dim() == 2 and x.stride(1) == 0):
        return x, x.stride(0), True
    dense = x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
    return dense, _triton.row_stride(dense), False
