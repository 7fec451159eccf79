"""``torch.ops.fastrl.policy_loss``: schema, fake kernel and the autograd function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastrl import _library, _losses
from fastrl.ops.policy_loss.reference import Terms

RATIOS = {"token": 0, "sequence": 1, "sequence_token": 2}
SURROGATES = {"clip": 0, "cispo": 1, "reinforce": 2}
KLS = {"k1": 0, "k2": 1, "k3": 2, "abs": 3}
KL_GRADS = {"pathwise": 0, "k2": 1, "ratio": 2}
# Sums over valid tokens; ratio_min and ratio_max are extremes, the three terms are aggregated like the loss.
POLICY_METRICS = (
    *("tokens", "sequences", "nonfinite", "clip_high", "clip_low", "clipped", "dual_clip"),
    *("approx_kl", "approx_kl3", "ref_kl", "entropy", "ratio_sum", "ratio_sq_sum"),
    *("ratio_min", "ratio_max", "policy_term", "kl_term", "entropy_term"),
)


def _fake(
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
    dtype = _library.result_dtype(logp.dtype)
    of_entropy = logp if entropy is None else entropy
    return (
        logp.new_empty((), dtype=dtype),
        logp.new_empty((len(POLICY_METRICS),), dtype=torch.float64),
        logp.new_empty(logp.shape if grad_logp else (0,)),
        of_entropy.new_empty(logp.shape if grad_entropy else (0,)),
    )


policy_loss_op = _library.define(
    "policy_loss",
    "(Tensor logp, Tensor old_logp, Tensor advantages, Tensor? mask, Tensor? is_weights, Tensor? ref_logp, "
    "Tensor? entropy, Tensor? cu_seqlens, Tensor? denom_tensor, float denom, float[] numbers, int[] choices, "
    "bool grad_logp, bool grad_entropy) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake,
)

_library.implement_in_triton("policy_loss", "fastrl.ops.policy_loss.triton")


def numbers(terms: Terms) -> list[float]:
    """The schema's list of floats."""
    return [
        *(terms.clip_low, terms.clip_high, terms.dual_clip, terms.ratio_cap, terms.log_ratio_clamp),
        *(terms.kl_coef, terms.kl_input_clamp, terms.kl_clamp, terms.entropy_coef),
    ]


def choices(terms: Terms, agg: str) -> list[int]:
    """The schema's list of enumerators."""
    kl = 0 if terms.kl is None else KLS[terms.kl]
    surrogate = SURROGATES[terms.surrogate]
    return [RATIOS[terms.ratio], surrogate, kl, KL_GRADS[terms.kl_grad], _losses.AGGREGATIONS[agg]]


def call(
    impl: str, logp: Tensor, entropy: Tensor | None, others: tuple[Any, ...], *needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operator with the differentiable inputs first; ``others`` are the rest in the order of the schema."""
    result: tuple[Tensor, Tensor, Tensor, Tensor] = policy_loss_op[impl](
        logp, *others[:5], entropy, *others[5:], *needs_grad
    )
    return result


class PolicyLossFunction(torch.autograd.Function):
    """First-order gradients with respect to logp and entropy, both computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, logp: Tensor, entropy: Tensor | None, others: tuple[Any, ...], impl: str
    ) -> tuple[Tensor, Tensor]:
        loss, metrics, grad_logp, grad_entropy = call(
            impl, logp, entropy, others, *ctx.needs_input_grad[:2]
        )
        ctx.save_for_backward(grad_logp, grad_entropy)
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Any, ...]:
        grad_logp, grad_entropy = ctx.saved_tensors
        needs_logp, needs_entropy = ctx.needs_input_grad[:2]
        return (
            _losses.scaled(grad_logp, grad_loss) if needs_logp else None,
            _losses.scaled(grad_entropy, grad_loss) if needs_entropy else None,
            None,
            None,
        )
