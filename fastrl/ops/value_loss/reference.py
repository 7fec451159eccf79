"""The definition of the value loss and its metrics in plain torch; autograd derives the gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastrl._library import result_dtype
from fastrl._losses import TokenRows, aggregate


def value_loss_reference(
    values: Tensor,
    old_values: Tensor | None,
    returns: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    clip: float,
    huber_delta: float,
    agg: str,
    denom: float | Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The loss and the metrics in the order of ``VALUE_METRICS``; an infinite ``huber_delta`` gives the squared error."""
    dtype = result_dtype(values.dtype)
    rows = TokenRows(values, mask, cu_seqlens)
    new = rows.select(values, dtype)
    target = rows.select(returns.detach(), dtype)
    error = new - target
    loss = _loss(error, huber_delta)
    is_clipped = torch.zeros_like(rows.valid)
    finite = new.isfinite() & target.isfinite()
    if old_values is not None:
        old = rows.select(old_values.detach(), dtype)
        finite = finite & old.isfinite()
        low, high = old - clip, old + clip
        # Where the clipped loss is the larger one the value lies outside of the clip, and nothing depends on it.
        near = torch.where(new > high, high, torch.where(new < low, low, new)).detach()
        clipped_loss = _loss(near - target, huber_delta)
        is_clipped = clipped_loss > loss
        loss = torch.where(is_clipped, clipped_loss, loss)
    result = aggregate(loss, rows, agg, denom)

    with torch.no_grad():

        def total(x: Tensor) -> Tensor:
            return torch.where(rows.valid, x, 0).sum(dtype=torch.float64)

        metrics = torch.stack(
            [
                rows.num_tokens(),
                rows.num_sequences(),
                total(~finite),
                total(is_clipped),
                total(error),
                total(error.square()),
                total(target),
                total(target.square()),
                total(new),
            ]
        )
    return result, metrics


def _loss(error: Tensor, delta: float) -> Tensor:
    if math.isinf(delta):
        return 0.5 * error.square()
    size = error.abs()
    return torch.where(size > delta, delta * (size - 0.5 * delta), 0.5 * error.square())
