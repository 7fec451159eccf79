"""Log-probabilities and entropies of logits under the names that verl, SkyRL and OpenRLHF share. Float32 for half precision."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.ops.token_logprobs import token_logprobs


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """``[...]`` log-probabilities of ``labels`` under ``[..., V]``; the logits survive the backward, whatever the flag."""
    return token_logprobs(logits, labels).logp


def entropy_from_logits(logits: Tensor) -> Tensor:
    """``[...]`` entropies of ``[..., V]``."""
    nothing = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    entropy = token_logprobs(logits, nothing, entropy=True).entropy
    assert entropy is not None
    return entropy


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """The same: no softmax is stored, so there is nothing to cut into chunks."""
    return entropy_from_logits(logits)
