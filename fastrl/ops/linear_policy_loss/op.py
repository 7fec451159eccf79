"""``torch.ops.fastrl.linear_policy_loss``: the loss with the gradients of the head, chunk by chunk, and its autograd function."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl import _library, _losses
from fastrl.ops.linear_token_logprobs import shards
from fastrl.ops.linear_token_logprobs.op import (
    fake_gradients,
    fake_rows,
    finished,
    first_order,
    needed,
    no_autocast,
    placed,
)
from fastrl.ops.linear_token_logprobs.projection import (
    DIFFERENTIABLE,
    SCHEMA,
    Gradients,
    Inputs,
    Projection,
)
from fastrl.ops.policy_loss.op import POLICY_METRICS, policy_loss_op

_NUM_INPUTS = len(Inputs._fields)
_AGG_NAMES = {number: name for name, number in _losses.AGGREGATIONS.items()}


class LossInputs(NamedTuple):
    """The arguments that belong to the loss, in the order of the schema; as for ``policy_loss``."""

    old_logp: Tensor  # [B, T], or [N] with cu_seqlens: the layout of the rows
    advantages: Tensor
    is_weights: Tensor | None
    ref_logp: Tensor | None
    cu_seqlens: Tensor | None
    denom_tensor: Tensor | None
    denom: float
    terms: list[float]
    choices: list[int]
    entropy: bool


_SCHEMA = (
    "Tensor old_logp, Tensor advantages, Tensor? is_weights, Tensor? ref_logp, Tensor? cu_seqlens, "
    "Tensor? denom_tensor, float denom, float[] terms, int[] choices, bool entropy"
)


@torch.no_grad()
def _forward(impl: str, *arguments: Any) -> tuple[Tensor, ...]:
    inputs = Inputs(*arguments[:_NUM_INPUTS])
    loss_inputs, needs = LossInputs(*arguments[_NUM_INPUTS:-1]), arguments[-1]
    with no_autocast(inputs.hidden):
        return _loss_and_gradients(Projection(inputs, impl), loss_inputs, needs)


def _loss_and_gradients(
    head: Projection, loss_inputs: LossInputs, needs: list[bool]
) -> tuple[Tensor, ...]:
    gradients = Gradients(head.inputs, needs)
    logp, entropies = _walk(head, loss_inputs, gradients)
    # The memory of the chunks is free again when results are converted.
    return (*_total(head, loss_inputs, logp, entropies), logp, entropies, *finished(gradients))


def _walk(head: Projection, loss_inputs: LossInputs, gradients: Gradients) -> tuple[Tensor, Tensor]:
    """logp and entropy of all rows; ``gradients`` get what the loss makes of every chunk."""
    inputs = head.inputs
    losses = _TokenLosses(loss_inputs, head)
    logp = head.new_rows()
    entropies = head.new_rows() if loss_inputs.entropy else logp.new_empty((0,))
    by = head.temperature if head.temperatures is None else head.temperatures
    for rows in head.chunks():
        logits = head.logits(rows, gradient=True)
        found = head.log_probs(logits, rows, entropy=loss_inputs.entropy)
        if inputs.group:
            by_rows = by[rows] if isinstance(by, Tensor) else by
            found = shards.merged(found[0], found[2], head.is_here[rows], by_rows, inputs.group)
        logp[rows] = found[0]
        if loss_inputs.entropy:
            entropies[rows] = found[1]
        head.backward(logits, rows, *losses.gradients(*found[:2], rows), found[2], gradients)
    return head.spread(logp), head.spread(entropies) if loss_inputs.entropy else entropies


def _mask(inputs: Inputs, loss_inputs: LossInputs) -> Tensor | None:
    """The mask in the layout of the loss, on the device of the rest."""
    old = loss_inputs.old_logp
    return None if inputs.mask is None else inputs.mask.to(old.device).view(old.shape)


def _total(
    head: Projection, loss_inputs: LossInputs, logp: Tensor, entropies: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss and metrics over all tokens, as ``policy_loss`` has them."""
    loss, shape = loss_inputs, loss_inputs.old_logp.shape
    total, metrics, _, _ = policy_loss_op[head.impl](
        logp.view(shape),
        *(loss.old_logp, loss.advantages, _mask(head.inputs, loss), loss.is_weights, loss.ref_logp),
        entropies.view(shape) if loss.entropy else None,
        *(loss.cu_seqlens, loss.denom_tensor, loss.denom, loss.terms, loss.choices),
        *(False, False),
    )
    return total, metrics


class _TokenLosses:
    """The policy loss of single tokens, with the factor that the aggregation gives each."""

    def __init__(self, loss_inputs: LossInputs, head: Projection) -> None:
        self._loss = loss_inputs
        self._head = head
        old = loss_inputs.old_logp
        layout = _losses.TokenRows(old, _mask(head.inputs, loss_inputs), loss_inputs.cu_seqlens)
        agg = _AGG_NAMES[loss_inputs.choices[-1]]
        denom = loss_inputs.denom_tensor
        if denom is None and loss_inputs.denom != _losses.DEFAULT_DENOM:
            denom = torch.tensor(loss_inputs.denom, dtype=torch.float64, device=old.device)
        weights = _losses.token_weights(layout, agg, denom, old.shape[-1])

        def per_token(x: Tensor | None) -> Tensor | None:
            return None if x is None else head.take(layout.tokens_of(x).reshape(-1), 0.0)

        self._old, self._ref = per_token(old), per_token(loss_inputs.ref_logp)
        self._advantages = per_token(loss_inputs.advantages)
        self._is_weights = per_token(loss_inputs.is_weights)
        self._weights = head.take(weights.to(head.result_dtype).expand(old.shape).reshape(-1), 0.0)

    def gradients(self, logp: Tensor, entropy: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
        """The derivative of the loss in logp and entropy of the tokens of a chunk."""
        loss = self._loss
        choices = [*loss.choices[:-1], _losses.AGGREGATIONS["token_sum"]]
        has_bonus = loss.terms[-1] != 0

        def row(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[rows].unsqueeze(0)

        _, _, grad_logp, grad_entropy = policy_loss_op[self._head.impl](
            logp.unsqueeze(0),
            row(self._old),
            row(self._advantages),
            None if (valid := self._head.valid(rows)) is None else valid.unsqueeze(0),
            row(self._is_weights),
            row(self._ref),
            entropy.unsqueeze(0) if has_bonus else None,
            *(None, None, _losses.DEFAULT_DENOM, loss.terms, choices, True, has_bonus),
        )
        weights = self._weights[rows]
        return grad_logp[0] * weights, grad_entropy[0] * weights if has_bonus else None


def _fake(*arguments: Any) -> tuple[Tensor, ...]:
    inputs = Inputs(*arguments[:_NUM_INPUTS])
    loss_inputs = LossInputs(*arguments[_NUM_INPUTS:-1])
    logp, entropies = fake_rows(inputs, loss_inputs.entropy)
    metrics = logp.new_empty((len(POLICY_METRICS),), dtype=torch.float64)
    gradients = fake_gradients(inputs, arguments[-1])
    return (logp.new_empty(()), metrics, logp, entropies, *gradients)


linear_policy_loss_op = _library.compose(
    "linear_policy_loss",
    f"({SCHEMA}, {_SCHEMA}, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake,
    _forward,
    ("token_logprobs", "token_logprobs_backward", "policy_loss"),
)


class LinearPolicyLossFunction(torch.autograd.Function):
    """First-order gradients of the head, all computed in the forward pass; the backward pass scales them."""

    @staticmethod
    def forward(ctx: Any, *arguments_and_impl: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        *arguments, impl = arguments_and_impl
        ctx.needs = needed(ctx)
        results = linear_policy_loss_op[impl](*arguments, ctx.needs)
        loss, metrics, logp, entropies, *gradients = results
        sources = (x for x in arguments[:_NUM_INPUTS] if isinstance(x, Tensor) and x.requires_grad)
        ctx.save_for_backward(*gradients, *sources)
        ctx.mark_non_differentiable(metrics, logp, entropies)
        return loss, metrics, logp, entropies

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        gradients, sources = tensors[: len(DIFFERENTIABLE)], tensors[len(DIFFERENTIABLE) :]
        with torch.no_grad():
            gradients = tuple(_losses.scaled(gradient, grad_loss) for gradient in gradients)
        gradients = first_order("linear_policy_loss", gradients, [*sources, grad_loss])
        return placed(gradients, ctx.needs, len(ctx.needs_input_grad))
