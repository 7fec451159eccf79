"""Inputs, the definition and gradients that the tests of ``token_logprobs`` share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fastrl
from tests.helpers import leaf


def inputs(
    rows: int, vocabulary: int, dtype: torch.dtype = torch.float32, scale: float = 3.0
) -> tuple[Tensor, Tensor]:
    logits = (torch.randn(rows, vocabulary) * scale).to(dtype)
    return logits, torch.randint(0, vocabulary, (rows,))


def reference(logits: Tensor, tokens: Tensor, **options: Any) -> fastrl.LogProbs:
    """The definition in float64."""
    return fastrl.token_logprobs(
        logits.double(), tokens, **({"entropy": True} | options), impl="reference"
    )


def gradient(
    logits: Tensor, tokens: Tensor, g: Tensor | None, h: Tensor | None, **options: Any
) -> Tensor:
    """Gradient in the logits for upstream gradients of logp and entropy."""
    x = leaf(logits)
    out = fastrl.token_logprobs(x, tokens, entropy=h is not None, **options)
    loss = x.new_zeros((), dtype=out.logp.dtype)
    if g is not None:
        loss = loss + (out.logp * g).sum()
    if out.entropy is not None and h is not None:
        loss = loss + (out.entropy * h).sum()
    return torch.autograd.grad(loss, x)[0]
