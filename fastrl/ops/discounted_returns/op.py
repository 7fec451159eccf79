"""``torch.ops.fastrl.discounted_returns``: the schema, its fake kernel and the autograd function.

The kernel is the one of ``gae`` without values, and so is the adjoint (csrc/gae).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastrl import _library
from fastrl.ops.gae.op import SAME_LAMBDA, gae_backward_op


def _fake(rewards: Tensor, *_: Any) -> Tensor:
    return rewards.new_empty(rewards.shape, dtype=_library.result_dtype(rewards.dtype))


discounted_returns_op = _library.define(
    "discounted_returns",
    "(Tensor rewards, Tensor? mask, Tensor? dones, Tensor? bootstrap, Tensor? cu_seqlens, float gamma, "
    "int holes, bool fill_carry) -> Tensor",
    _fake,
)


_library.implement_in_triton("discounted_returns", "fastrl.ops.gae.triton")


class DiscountedReturnsFunction(torch.autograd.Function):
    """First-order gradients with respect to rewards and bootstrap."""

    @staticmethod
    def forward(
        ctx: Any,
        rewards: Tensor,
        bootstrap: Tensor | None,
        mask: Tensor | None,
        dones: Tensor | None,
        cu_seqlens: Tensor | None,
        gamma: float,
        holes: int,
        fill_carry: bool,
        impl: str,
    ) -> Tensor:
        ctx.save_for_backward(mask, dones, cu_seqlens)
        ctx.gamma, ctx.holes, ctx.dtype, ctx.impl = gamma, holes, rewards.dtype, impl
        result: Tensor = discounted_returns_op[impl](
            *(rewards, mask, dones, bootstrap, cu_seqlens, gamma, holes, fill_carry)
        )
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        mask, dones, cu_seqlens = ctx.saved_tensors
        grad_rewards, _, grad_bootstrap = gae_backward_op[ctx.impl](
            *(grad, None, mask, dones, None, cu_seqlens, ctx.gamma, 1.0, SAME_LAMBDA, ctx.holes)
        )
        grad_bootstrap = grad_bootstrap if ctx.needs_input_grad[1] else None
        return (grad_rewards.to(ctx.dtype), grad_bootstrap, *(None,) * 7)
