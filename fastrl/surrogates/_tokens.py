"""What the surrogates share: inputs selected by the mask before any arithmetic, and the aggregation of ``policy_loss``."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl import _checks, _losses
from fastrl._library import result_dtype
from fastrl.errors import ArgumentError


class Tokens:
    """logp with its gradient and the constants beside it, per token, zero at masked positions."""

    def __init__(
        self,
        op: str,
        logp: Tensor,
        old_logp: Tensor,
        advantages: Tensor,
        mask: Tensor | None,
        is_weights: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> None:
        _checks.floating(op, "logp", logp)
        num_rows = _checks.num_rows(op, "logp", logp, cu_seqlens)
        _checks.mask(op, mask, logp, "logp")
        _checks.like(op, "old_logp", old_logp, logp, "logp")
        self.op, self.dtype = op, result_dtype(logp.dtype)
        self.rows = _losses.TokenRows(logp, mask, cu_seqlens)
        self.valid = self.rows.valid
        self.logp = self.rows.select(logp, self.dtype)
        self.old_logp = self.rows.select(old_logp.detach(), self.dtype)
        self.advantages = self._per_token("advantages", advantages, num_rows)
        self.is_weights = (
            None if is_weights is None else self._per_token("is_weights", is_weights, num_rows)
        )

    def _per_token(self, name: str, x: Tensor, num_rows: int) -> Tensor:
        _checks.floating(self.op, name, x)
        if x.shape != self.valid.shape and x.shape != (num_rows,):
            raise ArgumentError(
                f"{self.op}: {name} must have the shape of logp, {list(self.valid.shape)}, or one element per sequence, "
                f"[{num_rows}], got {list(x.shape)}"
            )
        return self.rows.select(self.rows.tokens_of(x.detach()), self.dtype)

    def total(self, x: Tensor) -> Tensor:
        """Float64 sum over the valid tokens."""
        return torch.where(self.valid, x.detach(), 0).sum(dtype=torch.float64)

    def loss(self, per_token: Tensor, agg: str, denom: float | Tensor | None) -> Tensor:
        """``per_token`` times the importance weights, aggregated as in ``policy_loss``."""
        packed = self.rows.cu_seqlens is not None
        divisor, tensor = _losses.aggregation(self.op, agg, denom, packed, self.logp.device)
        if self.is_weights is not None:
            per_token = per_token * self.is_weights
        chosen = tensor if tensor is not None else divisor or None
        return _losses.aggregate(
            torch.where(self.valid, per_token, 0.0), self.rows, agg, chosen
        ).to(self.dtype)

    def metrics(self, log_ratio: Tensor, **sums: Tensor) -> dict[str, Tensor]:
        """Sums over the valid tokens by name; ``approx_kl`` is that of ``-log_ratio``."""
        named = {"tokens": self.rows.num_tokens(), "approx_kl": self.total(-log_ratio)}
        return named | {name: self.total(x) for name, x in sums.items()}


def clamp(x: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """Gradient 1 inside and at the bounds, 0 outside."""
    return torch.where(x > high, high, torch.where(x < low, low, x))
