"""AReaL's log-probabilities of labels, without the softmax ever being stored and therefore without its chunks."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from fastrl.ops.token_logprobs import token_logprobs
from fastrl.presets._tokens import NotCovered


def gather_logprobs(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    chunk_size: int = 1024,
) -> Tensor:
    """``[...]`` log-probabilities of ``labels`` under ``logits`` ``[..., V]``; ``chunk_size`` is not needed."""
    _refuse_split_vocabulary(tp_group)
    return token_logprobs(logits, labels, temperature=temperature).logp


def gather_logprobs_entropy(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    chunk_size: int = 1024,
) -> tuple[Tensor, Tensor]:
    """The same with the entropy of each row, also ``[...]``."""
    _refuse_split_vocabulary(tp_group)
    out = token_logprobs(logits, labels, temperature=temperature, entropy=True)
    assert out.entropy is not None
    return out.logp, out.entropy


def _refuse_split_vocabulary(tp_group: dist.ProcessGroup | None) -> None:
    if tp_group is not None and dist.get_world_size(tp_group) > 1:
        raise NotCovered(
            "fastrl.presets.areal.gather_logprobs: tp_group must be None or of one rank, got "
            f"{dist.get_world_size(tp_group)} ranks; use AReaL's function, or fastrl.linear_token_logprobs"
        )
