"""The definition of token log-probabilities and entropy in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl._library import result_dtype


def token_logprobs_reference(
    logits: Tensor, tokens: Tensor, temperature: float | Tensor, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each token, and the entropy of each row when asked for."""
    scaled = logits.to(result_dtype(logits.dtype))
    scaled = scaled / (temperature[..., None] if isinstance(temperature, Tensor) else temperature)
    log_p = torch.log_softmax(scaled, -1)
    token_log_p = log_p.gather(-1, tokens[..., None]).squeeze(-1)
    if not entropy:
        return token_log_p, None
    # 0 log 0 = 0, in the gradient too: an impossible class is taken out before the product.
    finite_log_p = torch.where(log_p == -torch.inf, 0.0, log_p)
    return token_log_p, -(log_p.exp() * finite_log_p).sum(-1)
