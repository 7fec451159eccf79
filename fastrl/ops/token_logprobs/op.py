"""``torch.ops.fastrl.token_logprobs`` and its gradient: schemas, fake kernels and the autograd function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastrl import _library
from fastrl._library import result_dtype

# Per row, kept for the backward: the largest logit, and the sum of exponentials and the mean of the scaled logits, both
# relative to it.
NUM_STATISTICS = 3


def _fake_token_logprobs(
    logits: Tensor, tokens: Tensor, temperatures: Tensor | None, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = result_dtype(logits.dtype)
    logp = logits.new_empty(tokens.shape, dtype=dtype)
    statistics = logits.new_empty((*tokens.shape, NUM_STATISTICS), dtype=dtype)
    return logp, torch.empty_like(logp) if entropy else logp.new_empty((0,)), statistics


def _fake_backward(
    grad_logp: Tensor | None, grad_entropy: Tensor | None, logits: Tensor, *_: Any
) -> Tensor:
    return logits.new_empty(logits.shape)


def _fake_inplace(*_: Any) -> None:
    return None


_library.define(
    "token_logprobs",
    "(Tensor logits, Tensor tokens, Tensor? temperatures, float temperature, bool entropy) "
    "-> (Tensor, Tensor, Tensor)",
    _fake_token_logprobs,
)
_library.define(
    "token_logprobs_backward",
    "(Tensor? grad_logp, Tensor? grad_entropy, Tensor logits, Tensor tokens, Tensor? temperatures, "
    "float temperature, Tensor statistics) -> Tensor",
    _fake_backward,
)
# The gradient takes the place of the logits: for callers that own them and need them no more.
_library.define(
    "token_logprobs_backward_",
    "(Tensor? grad_logp, Tensor? grad_entropy, Tensor(a!) logits, Tensor tokens, Tensor? temperatures, "
    "float temperature, Tensor statistics) -> ()",
    _fake_inplace,
)

token_logprobs_op = torch.ops.fastrl.token_logprobs.default
token_logprobs_backward_op = torch.ops.fastrl.token_logprobs_backward.default
token_logprobs_backward_inplace_op = torch.ops.fastrl.token_logprobs_backward_.default


class TokenLogprobsFunction(torch.autograd.Function):
    """First-order gradient with respect to the logits; the entropy is an empty tensor unless asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        tokens: Tensor,
        temperatures: Tensor | None,
        temperature: float,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logp, entropies, statistics = token_logprobs_op(
            logits, tokens, temperatures, temperature, entropy
        )
        ctx.save_for_backward(logits, tokens, temperatures, statistics)
        ctx.temperature = temperature
        ctx.has_entropy = entropy
        ctx.set_materialize_grads(False)
        return logp, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Any, ...]:
        logits, tokens, temperatures, statistics = ctx.saved_tensors
        grad_logits = token_logprobs_backward_op(
            grad_logp,
            grad_entropy if ctx.has_entropy else None,
            *(logits, tokens, temperatures, ctx.temperature, statistics),
        )
        return grad_logits, None, None, None, None
