"""Log-probabilities of chosen tokens and entropies of their rows in Triton: a program per row, one read of the logits.

Sums are kept lane by lane relative to the largest logit so far and added up once, at the end of the row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl import _triton
from fastrl._library import result_dtype

_LOG2_E = tl.constexpr(1.4426950408889634)
# e^x is 0 there, and 0 * x is too, which it is not for an impossible class.
_LOWEST = tl.constexpr(-1000.0)


@triton.jit
def _row_begin(row, inner_rows, outer_stride, inner_stride, VECTOR: tl.constexpr):
    """Strides count vectors, so that the compiler sees where loads of a vector are aligned."""
    return (row // inner_rows * outer_stride + row % inner_rows * inner_stride) * VECTOR


@triton.jit
def _exponential(logits, reference, inverse_temperature):
    """x = (logits - reference) / temperature, made finite, and e^x; NaN passes."""
    x = (logits - reference) * inverse_temperature
    x = tl.where(x < _LOWEST, _LOWEST, x)
    return x, tl.exp2(x * _LOG2_E)


@triton.jit
def _inverse_temperature(temperatures, temperature, row, T: tl.constexpr):
    if temperatures is None:
        value = tl.full([], temperature, T)
    else:
        value = tl.load(temperatures + row)
    return 1 / value


@_triton.jit_aligned("logits")
def token_logprobs_kernel(
    logits, tokens, temperatures, logp, entropy, statistics,
    vectors: tl.int64, inner_rows: tl.int64, outer_stride: tl.int64, inner_stride: tl.int64, temperature: tl.float64,
    T: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    classes = vectors * VECTOR
    logits_row = logits + _row_begin(row, inner_rows, outer_stride, inner_stride, VECTOR)
    inverse_temperature = _inverse_temperature(temperatures, temperature, row, T)
    lane = tl.arange(0, BLOCK).to(tl.int64)
    largest = tl.full([], -float("inf"), T)
    exps, weighted = tl.zeros([BLOCK], T), tl.zeros([BLOCK], T)
    for tile in range(tl.cdiv(classes, BLOCK)):
        at = tile * BLOCK + lane
        x = tl.load(logits_row + at, mask=at < classes, other=-float("inf")).to(T)
        # NaN, which no maximum shows, must reach the sums.
        raised = tl.maximum(largest, tl.max(tl.where(x == x, x, -float("inf")), 0))
        if raised > largest:
            if largest > -float("inf"):
                step = (largest - raised) * inverse_temperature
                step = tl.where(step < _LOWEST, _LOWEST, step)
                factor = tl.exp2(step * _LOG2_E)
                weighted = factor * (weighted + step * exps)
                exps *= factor
            largest = raised
        reference = tl.where(largest > -float("inf"), largest, 0)
        x, e = _exponential(x, reference, inverse_temperature)
        exps += e
        if entropy is not None:
            weighted += e * x

    total = tl.sum(exps, 0)
    token = tl.load(tokens + row)
    is_class = (token >= 0) & (token < classes)
    logit = tl.load(logits_row + token, mask=is_class, other=float("nan")).to(T)
    tl.store(logp + row, (logit - largest) * inverse_temperature - tl.log(total))
    mean = tl.zeros([], T)
    if entropy is not None:
        mean = tl.sum(weighted, 0) / total
        tl.store(entropy + row, tl.log(total) - mean)
    tl.store(statistics + row * 3, largest)
    tl.store(statistics + row * 3 + 1, total)
    tl.store(statistics + row * 3 + 2, mean)


# The gradient of g logp + h entropy with respect to logit v is e^x_v (alpha + beta x_v) + g / temperature [v = token].
@_triton.jit_aligned("logits", "grad_logits")
def token_logprobs_backward_kernel(
    grad_logp, grad_entropy, logits, tokens, temperatures, statistics, grad_logits,
    vectors: tl.int64, inner_rows: tl.int64, outer_stride: tl.int64, inner_stride: tl.int64, temperature: tl.float64,
    T: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    classes = vectors * VECTOR
    logits_row = logits + _row_begin(row, inner_rows, outer_stride, inner_stride, VECTOR)
    out_row = grad_logits + row * vectors * VECTOR
    inverse_temperature = _inverse_temperature(temperatures, temperature, row, T)
    g, h = tl.zeros([], T), tl.zeros([], T)
    if grad_logp is not None:
        g = tl.load(grad_logp + row)
    if grad_entropy is not None:
        h = tl.load(grad_entropy + row)
    is_zero = (g == 0) & (h == 0)
    largest = tl.load(statistics + row * 3)
    scale = inverse_temperature / tl.load(statistics + row * 3 + 1)
    alpha = (h * tl.load(statistics + row * 3 + 2) - g) * scale
    beta = -h * scale
    token = tl.load(tokens + row)
    lane = tl.arange(0, BLOCK).to(tl.int64)
    for tile in range(tl.cdiv(classes, BLOCK)):
        at = tile * BLOCK + lane
        x = tl.load(logits_row + at, mask=at < classes, other=0).to(T)
        x, e = _exponential(x, largest, inverse_temperature)
        gradient = e * (alpha + beta * x)
        gradient = tl.where(at == token, gradient + g * inverse_temperature, gradient)
        tl.store(out_row + at, tl.where(is_zero, 0, gradient), mask=at < classes)


def _folded(logits: Tensor) -> tuple[int, int, int] | None:
    """(inner rows, outer stride, inner stride) of the leading dimensions; None when they need more strides than two."""
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        return None
    folded: list[tuple[int, int]] = []  # size and stride, outermost first
    for size, stride in zip(logits.shape[:-1], logits.stride()[:-1]):
        if size == 1:
            continue
        if folded and folded[-1][1] == size * stride:
            folded[-1] = (folded[-1][0] * size, stride)
        else:
            folded.append((size, stride))
    if len(folded) > 2:
        return None
    inner = folded[-1] if folded else (1, 0)
    return inner[0], folded[0][1] if len(folded) == 2 else 0, inner[1]


class _Rows:
    """Logits as a kernel walks them, in vectors of 16 bytes where all rows are aligned to that."""

    def __init__(self, logits: Tensor) -> None:
        layout = _folded(logits)
        self.logits = logits if layout is not None else logits.contiguous()
        inner_rows, *strides = layout or (logits.numel() // logits.shape[-1], 0, logits.shape[-1])
        classes, vector = logits.shape[-1], 16 // logits.element_size()
        if self.logits.data_ptr() % 16 or any(n % vector for n in (classes, *strides)):
            vector = 1
        self.count = logits.numel() // classes
        self.numbers = (classes // vector, max(inner_rows, 1), *(s // vector for s in strides))
        is_wide = classes > 1024
        self.meta: dict[str, Any] = {
            "T": _triton.compute_type(logits.dtype),
            "VECTOR": vector,
            "BLOCK": 4096 if is_wide else 1024,
            "num_warps": 8 if is_wide else 4,
            "fusion": True,
        }


def token_logprobs(
    logits: Tensor, tokens: Tensor, temperatures: Tensor | None, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows = _Rows(logits)
    dtype = result_dtype(logits.dtype)
    logp = logits.new_empty(tokens.shape, dtype=dtype)
    entropies = torch.empty_like(logp) if entropy else logp.new_empty((0,))
    statistics = logp.new_empty((*tokens.shape, 3))
    _triton.launch(
        token_logprobs_kernel,
        (rows.count,),
        *(rows.logits, tokens.contiguous(), _triton.dense(temperatures), logp),
        *(entropies if entropy else None, statistics, *rows.numbers, temperature),
        **rows.meta,
    )
    return logp, entropies, statistics


def token_logprobs_backward(
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    tokens: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    statistics: Tensor,
) -> Tensor:
    rows = _Rows(logits)
    grad_logits = logits.new_empty(logits.shape)
    _triton.launch(
        token_logprobs_backward_kernel,
        (rows.count,),
        *(_triton.dense(grad_logp), _triton.dense(grad_entropy), rows.logits, tokens.contiguous()),
        *(_triton.dense(temperatures), statistics, grad_logits, *rows.numbers, temperature),
        **rows.meta,
    )
    return grad_logits
