"""Lambda of GAE as a function of the length of the response."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl import _checks


def length_adaptive_lam(mask: Tensor, *, alpha: float) -> Tensor:
    r"""``lam_i = clamp(1 - 1 / (alpha * len_i), 0, 1)``, ``[B]`` float32, for ``fastrl.gae(..., lam=...)``.

    ``len_i`` counts the valid tokens of the row; rows with ``alpha * len_i <= 1`` get 0. Pass ``returns_lam=1.0`` beside it
    for the decoupled returns of VAPO.

    Args:
        mask: ``[B, T]``, non-zero is valid.
        alpha: at least 0.

    Source: VAPO (2025), equation 6; NeMo-RL ``length_adaptive_alpha``; AReaL ``vapo_length_adaptive``.

    >>> length_adaptive_lam(torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]), alpha=0.5)
    tensor([0.5000, 0.0000])
    """
    _checks.number("length_adaptive_lam", "alpha", alpha, 0.0)
    lengths = (mask != 0).sum(-1).float()
    return (1 - 1 / (alpha * lengths).clamp(min=1.0)).clamp(0.0, 1.0)


def relative_position_lam(mask: Tensor, *, decay: float) -> Tensor:
    r"""``lam_i = decay ** (1 / (len_i - 1))``, ``[B]`` float32: the first token keeps ``decay`` of the last one's error.

    Rows with fewer than two valid tokens get ``decay``; lambda reaches nothing there.

    Args:
        mask: ``[B, T]``, non-zero is valid.
        decay: in [0, 1].

    Source: AReaL ``relative_position``.

    >>> relative_position_lam(torch.tensor([[1, 1, 1], [1, 1, 0]]), decay=0.25)
    tensor([0.5000, 0.2500])
    """
    _checks.number("relative_position_lam", "decay", decay, 0.0, 1.0)
    lengths = (mask != 0).sum(-1).float()
    return torch.full_like(lengths, decay) ** (1 / (lengths - 1).clamp(min=1))
