"""Discounted returns by definition: advantages with V = 0 and lambda = 1."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.ops.gae.reference import gae_reference


def discounted_returns_reference(
    rewards: Tensor,
    mask: Tensor | None,
    dones: Tensor | None,
    bootstrap: Tensor | None,
    cu_seqlens: Tensor | None,
    gamma: float,
    holes: str,
    fill: str,
) -> Tensor:
    """Returns of ``[B, T]`` rows, or of ``[N]`` packed rows with ``cu_seqlens``."""
    values = torch.zeros_like(rewards)
    advantages, _ = gae_reference(
        *(rewards, values, mask, dones, bootstrap, 1.0, 1.0, cu_seqlens, gamma, holes, fill)
    )
    return advantages
