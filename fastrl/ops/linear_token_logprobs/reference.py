"""The definition of an lm_head with token log-probabilities in plain torch: all logits at once, in float32 or float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastrl._library import result_dtype
from fastrl.ops.token_logprobs.reference import token_logprobs_reference


def linear_token_logprobs_reference(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    bias: Tensor | None,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    mask: Tensor | None,
    temperatures: Tensor | None,
    allowed: Tensor | None,
    numbers: list[float],
    vocabulary: int,
    compute: torch.dtype | None,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each token ``[N]`` and the entropy of each row when asked for; 0 at masked rows."""
    dtype = result_dtype(hidden.dtype)

    def exact(x: Tensor) -> Tensor:
        return (x if compute is None else x.to(compute)).to(dtype)

    temperature, scale, softcap, lora_scale = numbers
    valid = (
        torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.to(tokens.device) != 0
    )
    rows = torch.where(valid[:, None], exact(hidden), 0.0)
    logits = rows @ exact(weight)[:vocabulary].t()
    if bias is not None:
        logits = logits + exact(bias)[:vocabulary]
    if lora_a is not None and lora_b is not None:
        logits = logits + lora_scale * (rows @ exact(lora_a).t()) @ exact(lora_b)[:vocabulary].t()
    logits = logits * scale
    if math.isfinite(softcap):
        logits = softcap * torch.tanh(logits / softcap)
    if allowed is not None:
        logits = torch.where(_kept(allowed, vocabulary), logits, -torch.inf)
    by: float | Tensor = temperature
    if temperatures is not None:
        by = torch.where(valid, temperatures, 1.0)
    logp, entropies = token_logprobs_reference(logits, torch.where(valid, tokens, 0), by, entropy)
    if entropies is not None:
        entropies = torch.where(valid, entropies, 0.0)
    return torch.where(valid, logp, 0.0), entropies


def _kept(allowed: Tensor, vocabulary: int) -> Tensor:
    if allowed.dtype == torch.bool:
        return allowed[:, :vocabulary]
    classes = torch.arange(vocabulary, device=allowed.device)
    return (allowed[:, :, None] == classes).any(1)
