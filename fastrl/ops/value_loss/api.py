"""``fastrl.value_loss``: the clipped loss of a critic over padded or packed tokens with metrics, in one pass."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import _backends, _checks, _losses
from fastrl.errors import ArgumentError
from fastrl.ops.value_loss import op
from fastrl.ops.value_loss.op import VALUE_METRICS
from fastrl.ops.value_loss.reference import value_loss_reference


class ValueLoss(NamedTuple):
    """``loss`` is 0-d and differentiable; ``metrics`` is float64, one element per name in ``VALUE_METRICS``."""

    loss: Tensor
    metrics: Tensor

    def named(self) -> dict[str, Tensor]:
        """The metrics by name, as 0-d views: nothing is copied from the device."""
        return dict(zip(VALUE_METRICS, self.metrics.unbind()))


def value_loss(
    values: Tensor,
    old_values: Tensor | None,
    returns: Tensor,
    mask: Tensor | None = None,
    *,
    clip: float | None = 0.5,
    loss: str = "mse",
    huber_delta: float = 10.0,
    agg: str = "token_mean",
    denom: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> ValueLoss:
    r"""Clipped value loss with its metrics and (through autograd) its gradient.

    ::

        l    = max(f(V - R), f(clip(V, V_old - clip, V_old + clip) - R)),   aggregated over valid tokens by agg
        f(e) = e^2 / 2                               "mse", the factor 1/2 included (verl, OpenRLHF, AReaL)
        f(e) = e^2 / 2 where |e| <= delta, delta (|e| - delta / 2) beyond    "huber"

    Where the clipped loss is the larger one the gradient is 0; at a tie it is that of ``f(V - R)``.

    Args:
        values: predictions of the critic in training, ``[B, T]``, or packed ``[N]`` with ``cu_seqlens``; float32,
            bfloat16, float16 or float64, any strides.
        old_values: like ``values``, predictions when the batch was collected; may be None when ``clip`` is. A constant.
        returns: like ``values``, what to predict. A constant.
        mask: like ``values``, bool, integer or float; non-zero is valid. None: every token is valid.
        clip: how far V may move from V_old, a number of at least 0; None: plain ``f(V - R)``, old_values is not read.
        loss: ``"mse"`` or ``"huber"``.
        huber_delta: where huber becomes linear, greater than 0.
        agg, denom: as in ``fastrl.policy_loss``.
        cu_seqlens: int32 or int64 ``[B+1]``, where each packed row starts, and the end.
        impl: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"triton"`` or ``"reference"``.

    Returns:
        ``ValueLoss(loss, metrics)``. The loss is float32, float64 for float64 values; without a valid token it is 0 with
        zero gradients. Metrics are float64, detached and never synchronised, sums over valid tokens:

        ============= ==============================================================================================
        tokens        valid tokens; sequences: rows with at least one
        nonfinite     valid tokens with NaN or inf in any input that is used
        clipped       the clipped loss is the larger one
        error_sum     V - R; error_sq_sum: its square
        return_sum    R; return_sq_sum: R^2, so that explained variance is 1 - Var(V - R) / Var(R)
        value_sum     V
        ============= ==============================================================================================

    Raises:
        ValueError, TypeError: a shape, dtype, device or option does not fit; the message names the remedy.

    Differentiable once, in values. Masked positions influence nothing, NaN included, and their gradient is exactly 0;
    what is not finite at a valid token reaches the loss. Deterministic: loss, metrics and gradient have the same bits
    from run to run, for any number of threads, and for rows padded on either side or packed. On CPU the forward pass
    writes the gradient, and backward only scales it: 18 bytes a token for float32 with a byte mask.

    Source: the value clip of OpenAI baselines' PPO2, as in verl 0.9.1 ``compute_value_loss``.

    >>> values = torch.tensor([[1.0, 2.0]], requires_grad=True)
    >>> out = fastrl.value_loss(values, torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 2.0]]))
    >>> out.loss.detach()  # the second value is right but moved too far: (1/2 + 0.5^2 / 2) / 2
    tensor(0.3125)
    >>> out.loss.backward()
    >>> values.grad
    tensor([[0.5000, 0.0000]])
    """
    name = "value_loss"
    _checks.floating(name, "values", values)
    _checks.num_rows(name, "values", values, cu_seqlens)
    _checks.mask(name, mask, values, "values")
    _like(values, "returns", returns)
    if loss not in ("mse", "huber"):
        _checks.option(name, "loss", loss, ("mse", "huber"))
    delta = _checks.number(name, "huber_delta", huber_delta)
    if delta <= 0:
        raise ArgumentError(
            f"{name}: huber_delta must be greater than 0, got {huber_delta!r}; use loss='mse' for no bound"
        )
    if clip is None:
        old_values, distance = None, math.inf
    elif old_values is None:
        raise ArgumentError(
            f"{name}: old_values must be given for clip={clip!r}, got None; pass them, or clip=None"
        )
    else:
        _like(values, "old_values", old_values)
        distance = _checks.number(name, "clip", clip, 0.0)
    packed = cu_seqlens is not None
    divisor, divisor_tensor = _losses.aggregation(name, agg, denom, packed, values.device)
    delta = delta if loss == "huber" else math.inf
    implementation = _backends.resolve(name, impl, values.device)
    if implementation == "reference":
        chosen = divisor_tensor if divisor_tensor is not None else divisor or None
        return ValueLoss(
            *value_loss_reference(
                *(values, old_values, returns, mask, cu_seqlens, distance, delta, agg, chosen)
            )
        )
    others = (
        *(old_values, returns, mask, cu_seqlens, divisor_tensor, divisor, distance, delta),
        _losses.AGGREGATIONS[agg],
    )
    if torch.is_grad_enabled() and values.requires_grad:
        return ValueLoss(*op.ValueLossFunction.apply(values, others, implementation))
    return ValueLoss(*op.value_loss_op[implementation](values, *others, False)[:2])


def _like(values: Tensor, name: str, value: Tensor) -> None:
    """``value`` is shaped like values and is float64 exactly if values is."""
    _checks.like("value_loss", name, value, values, "values")
    if (value.dtype == torch.float64) != (values.dtype == torch.float64):
        raise ArgumentError(
            f"value_loss: values and {name} must both be float64 or neither, got {values.dtype} and {value.dtype}; "
            "convert one of them"
        )
