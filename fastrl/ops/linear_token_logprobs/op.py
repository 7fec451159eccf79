"""``torch.ops.fastrl.linear_token_logprobs`` and its gradient: loops over chunks, written in Python over other operators.

As operators they are opaque to ``torch.compile``: a graph has the same few nodes for any number of chunks, and no length is
compiled into it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl import _library
from fastrl._library import result_dtype
from fastrl.ops.linear_token_logprobs import shards
from fastrl.ops.linear_token_logprobs.projection import (
    DIFFERENTIABLE,
    SCHEMA,
    Gradients,
    Inputs,
    Projection,
)
from fastrl.ops.token_logprobs.op import NUM_STATISTICS

_NUM_INPUTS = len(Inputs._fields)
_ROW_OPS = ("token_logprobs", "token_logprobs_backward")


def no_autocast(like: Tensor) -> Any:
    """Products run in the dtype they were given: the caller has already chosen it."""
    return torch.autocast(like.device.type, enabled=False)


def log_probs(head: Projection, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """logp, entropy and statistics of the rows of ``head`` that count."""
    logp, statistics = head.new_rows(), head.new_rows(NUM_STATISTICS)
    entropies = head.new_rows() if entropy else logp.new_empty((0,))
    for rows in head.chunks():
        found = head.log_probs(head.logits(rows), rows, entropy=entropy)
        logp[rows], statistics[rows] = found[0], found[2]
        if entropy:
            entropies[rows] = found[1]
    group = head.inputs.group
    if group:
        by = head.temperature if head.temperatures is None else head.temperatures
        logp, found_entropy, statistics = shards.merged(logp, statistics, head.is_here, by, group)
        entropies = found_entropy if entropy else entropies
    return logp, entropies, statistics


@torch.no_grad()
def _forward(impl: str, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, entropy = Inputs(*arguments[:_NUM_INPUTS]), arguments[_NUM_INPUTS]
    with no_autocast(inputs.hidden):
        head = Projection(inputs, impl)
        logp, entropies, statistics = log_probs(head, entropy)
        spread = head.spread(entropies) if entropy else entropies
        return head.spread(logp), spread, head.spread(statistics)


@torch.no_grad()
def _backward(
    impl: str,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    statistics: Tensor,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    inputs, needs = Inputs(*arguments[:_NUM_INPUTS]), arguments[_NUM_INPUTS]
    with no_autocast(inputs.hidden):
        gradients = Gradients(inputs, needs)
        _walk_back(Projection(inputs, impl), grad_logp, grad_entropy, statistics, gradients)
        # The memory of the chunks is free again when results are converted.
        return finished(gradients)


def _walk_back(
    head: Projection,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    statistics: Tensor,
    gradients: Gradients,
) -> None:
    g = None if grad_logp is None else head.take(grad_logp, 0.0)
    h = None if grad_entropy is None else head.take(grad_entropy, 0.0)
    statistics = head.take(statistics, 0.0)
    for rows in head.chunks():
        head.backward(
            head.logits(rows, gradient=True),
            rows,
            None if g is None else g[rows],
            None if h is None else h[rows],
            statistics[rows],
            gradients,
        )


def finished(gradients: Gradients) -> tuple[Tensor, ...]:
    """The gradients in the order of ``DIFFERENTIABLE``; what every rank holds a copy of is added up over the ranks."""
    group = gradients.inputs.group
    if group:
        if gradients.hidden is not None:
            gradients.hidden = shards.sum_over_ranks(gradients.hidden, group)
        if gradients.lora_a is not None:
            gradients.lora_a = shards.sum_over_ranks(gradients.lora_a, group)
    return tuple(gradients.result())


def fake_rows(inputs: Inputs, entropy: bool) -> tuple[Tensor, Tensor]:
    """logp and entropy as the operators return them."""
    dtype = result_dtype(inputs.compute or inputs.hidden.dtype)
    logp = inputs.hidden.new_empty(inputs.tokens.shape, dtype=dtype)
    return logp, torch.empty_like(logp) if entropy else logp.new_empty((0,))


def fake_gradients(inputs: Inputs, needs: list[bool]) -> tuple[Tensor, ...]:
    """The gradients as the operators return them."""
    results = []
    for name, needed in zip(DIFFERENTIABLE, needs, strict=True):
        x = getattr(inputs, name)
        has = needed and x is not None
        results.append(x.new_empty(x.shape) if has else inputs.hidden.new_empty((0,)))
    return tuple(results)


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs = Inputs(*arguments[:_NUM_INPUTS])
    logp, entropies = fake_rows(inputs, arguments[_NUM_INPUTS])
    return logp, entropies, logp.new_empty((*logp.shape, NUM_STATISTICS))


def _fake_backward(g: Any, h: Any, statistics: Any, *arguments: Any) -> tuple[Tensor, ...]:
    return fake_gradients(Inputs(*arguments[:_NUM_INPUTS]), arguments[_NUM_INPUTS])


linear_token_logprobs_op = _library.compose(
    "linear_token_logprobs",
    f"({SCHEMA}, bool entropy) -> (Tensor, Tensor, Tensor)",
    _fake_forward,
    _forward,
    _ROW_OPS,
)
linear_token_logprobs_backward_op = _library.compose(
    "linear_token_logprobs_backward",
    f"(Tensor? grad_logp, Tensor? grad_entropy, Tensor statistics, {SCHEMA}, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_backward,
    _backward,
    _ROW_OPS,
)


class LinearTokenLogprobsFunction(torch.autograd.Function):
    """First-order gradients of what ``DIFFERENTIABLE`` names; the logits are computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, *arguments_and_impl: Any) -> tuple[Tensor, Tensor]:
        *arguments, ctx.impl = arguments_and_impl
        logp, entropies, statistics = linear_token_logprobs_op[ctx.impl](*arguments)
        # Tensors are kept where autograd notices that they were changed in place, the rest beside them.
        inputs = arguments[:_NUM_INPUTS]
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs), statistics)
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.has_entropy = arguments[_NUM_INPUTS]
        ctx.set_materialize_grads(False)
        return logp, entropies

    @staticmethod
    def backward(
        ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *tensors, statistics = ctx.saved_tensors
        inputs = [t if o is None else o for t, o in zip(tensors, ctx.others, strict=True)]
        needs = needed(ctx)
        with torch.no_grad():
            gradients = linear_token_logprobs_backward_op[ctx.impl](
                *(grad_logp, grad_entropy if ctx.has_entropy else None, statistics, *inputs, needs)
            )
        sources = [x for x in (*tensors, grad_logp, grad_entropy) if x is not None]
        gradients = first_order("linear_token_logprobs", gradients, sources)
        return placed(gradients, needs, len(ctx.needs_input_grad))


class _FirstOrder(torch.autograd.Function):
    """The identity, except that it has no derivative in anything."""

    @staticmethod
    def forward(ctx: Any, op: str, gradient: Tensor, *sources: Tensor) -> Tensor:
        ctx.op = op
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.op}: only first-order gradients exist, got a request for a second derivative; "
            "use impl='reference' for it, or leave out create_graph=True"
        )


def first_order(
    op: str, gradients: tuple[Tensor, ...], sources: list[Tensor]
) -> tuple[Tensor, ...]:
    """``gradients`` made from ``sources``: under ``create_graph`` a derivative of them raises and is not taken for 0."""
    if not torch.is_grad_enabled():
        return gradients
    return tuple(_FirstOrder.apply(op, gradient, *sources) for gradient in gradients)


def needed(ctx: Any) -> list[bool]:
    """Which of ``DIFFERENTIABLE`` need a gradient."""
    return [ctx.needs_input_grad[Inputs._fields.index(name)] for name in DIFFERENTIABLE]


def placed(
    gradients: tuple[Tensor, ...], needs: list[bool], num_arguments: int
) -> tuple[Tensor | None, ...]:
    """The gradients at the places of their inputs among all arguments."""
    results: list[Tensor | None] = [None] * num_arguments
    for name, gradient, is_needed in zip(DIFFERENTIABLE, gradients, needs, strict=True):
        results[Inputs._fields.index(name)] = gradient if is_needed else None
    return tuple(results)
