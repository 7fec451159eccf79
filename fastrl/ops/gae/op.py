"""``torch.ops.fastrl.gae`` and its adjoint: schemas, fake kernels and the autograd function."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastrl import _library

HOLES = {"carry": 0, "zero_step": 1, "ignore": 2}
# What the schema calls "the returns use the lambda of the advantages".
SAME_LAMBDA = -1.0

_INPUTS = (
    "Tensor rewards, Tensor values, Tensor? mask, Tensor? dones, Tensor? bootstrap, Tensor? lam_rows, "
    "Tensor? cu_seqlens, float gamma, float lam, float returns_lam, int holes, bool fill_carry"
)


def _new(like: Tensor) -> Tensor:
    return like.new_empty(like.shape, dtype=_library.result_dtype(like.dtype))


def _fake_gae(rewards: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _new(rewards), _new(rewards)


def _fake_out(*_: Any) -> None:
    return None


def _fake_backward(
    grad_advantages: Tensor,
    grad_returns: Tensor | None,
    mask: Tensor | None,
    dones: Tensor | None,
    lam_rows: Tensor | None,
    cu_seqlens: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = grad_advantages.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    grad_values = _new(grad_advantages)
    if grad_returns is None:
        grad_values = grad_advantages.new_empty((0,), dtype=grad_values.dtype)
    return _new(grad_advantages), grad_values, _new(grad_advantages).new_empty((rows,))


gae_op = _library.define("gae", f"({_INPUTS}) -> (Tensor, Tensor)", _fake_gae)
gae_out_op = _library.define(
    "gae_out", f"({_INPUTS}, Tensor(a!) advantages, Tensor(b!) returns) -> ()", _fake_out
)
gae_backward_op = _library.define(
    "gae_backward",
    "(Tensor grad_advantages, Tensor? grad_returns, Tensor? mask, Tensor? dones, Tensor? lam_rows, "
    "Tensor? cu_seqlens, float gamma, float lam, float returns_lam, int holes) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)


for _name in ("gae", "gae_out", "gae_backward"):
    _library.implement_in_triton(_name, "fastrl.ops.gae.triton")


class Options(NamedTuple):
    """What does not take part in differentiation, in the order of the schema."""

    mask: Tensor | None
    dones: Tensor | None
    lam_rows: Tensor | None
    cu_seqlens: Tensor | None
    gamma: float
    lam: float
    returns_lam: float
    holes: int


class GAEFunction(torch.autograd.Function):
    """First-order gradients with respect to rewards, values and bootstrap."""

    @staticmethod
    def forward(
        ctx: Any,
        rewards: Tensor,
        values: Tensor,
        bootstrap: Tensor | None,
        options: Options,
        fill_carry: bool,
        impl: str,
    ) -> tuple[Tensor, Tensor]:
        mask, dones, lam_rows, cu_seqlens, *numbers = options
        ctx.save_for_backward(mask, dones, lam_rows, cu_seqlens)
        ctx.numbers, ctx.impl = numbers, impl
        ctx.dtypes = rewards.dtype, values.dtype
        return gae_op[impl](
            *(rewards, values, mask, dones, bootstrap, lam_rows, cu_seqlens, *numbers, fill_carry)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_advantages: Tensor, grad_returns: Tensor) -> tuple[Any, ...]:
        backward = gae_backward_op[ctx.impl]
        grads = backward(grad_advantages, grad_returns, *ctx.saved_tensors, *ctx.numbers)
        grad_rewards, grad_values, grad_bootstrap = grads
        rewards_dtype, values_dtype = ctx.dtypes
        return (
            grad_rewards.to(rewards_dtype),
            grad_values.to(values_dtype),
            grad_bootstrap if ctx.needs_input_grad[2] else None,
            None,
            None,
            None,
        )
