"""KL estimates per token, as a reward penalty or as a loss with a chosen gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastrl import _checks
from fastrl.surrogates._tokens import clamp

ESTIMATORS = ("k1", "k2", "k3", "abs")
GRADIENTS = ("pathwise", "k2", "score")


def kl_penalty(
    logp: Tensor,
    ref_logp: Tensor,
    mask: Tensor | None = None,
    *,
    estimator: str = "k1",
    gradient: str = "pathwise",
    weight: Tensor | None = None,
    input_clamp: float | None = None,
    clamp_value: float | None = None,
) -> Tensor:
    r"""Per-token estimate of KL(pi || ref), 0 at masked positions.

    With x = logp - ref_logp, y = clamp(-x, +-``input_clamp``)::

        "k1"  x        "k2"  x^2 / 2        "abs"  |x|        "k3"  exp(y) - y - 1

    clamped to +-``clamp_value``. Inside a loss, ``fastrl.policy_loss(kl=...)`` computes and aggregates it in one pass.

    Args:
        logp, ref_logp: any shape; ref_logp is a constant.
        mask: like ``logp``, non-zero is valid; what stands at masked positions influences nothing.
        estimator: see above.
        gradient: ``"pathwise"``, the derivative of the estimator; ``"k2"``, its value with the gradient of k2 times
            ``weight`` (verl's ``+``, OpenRLHF's unbiased gradient); ``"score"``, times exp(logp - sg(logp)), which adds the
            score-function term that the derivative of an expectation has (NeMo-RL).
        weight: like ``logp``, a constant factor of the k2 gradient; None: 1.
        input_clamp, clamp_value: None: no clamp.

    Returns:
        Like ``logp``, float32 (float64 for float64), differentiable in ``logp``.

    Source: Schulman, Approximating KL Divergence (2020).

    >>> kl_penalty(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0]), estimator="k2")
    tensor([0.1250, 0.0000])
    """
    name = "kl_penalty"
    _checks.option(name, "estimator", estimator, ESTIMATORS)
    _checks.option(name, "gradient", gradient, GRADIENTS)
    _checks.floating(name, "logp", logp)
    _checks.like(name, "ref_logp", ref_logp, logp, "logp")
    _checks.mask(name, mask, logp, "logp")
    dtype = torch.promote_types(logp.dtype, torch.float32)
    valid = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask != 0
    new = torch.where(valid, logp.to(dtype), 0.0)
    x = new - torch.where(valid, ref_logp.detach().to(dtype), 0.0)
    if estimator == "k1":
        value = x
    elif estimator == "k2":
        value = x.square() / 2
    elif estimator == "abs":
        value = x.abs()
    else:
        bound = math.inf if input_clamp is None else input_clamp
        y = clamp(-x, -bound, bound)
        value = torch.expm1(y) - y
    if clamp_value is not None:
        value = clamp(value, -clamp_value, clamp_value)
    if gradient == "k2":
        factor = x.detach() if weight is None else x.detach() * torch.where(valid, weight, 0.0)
        return value.detach() + factor * (x - x.detach())
    if gradient == "score":
        return value * (new - new.detach()).exp()
    return value
