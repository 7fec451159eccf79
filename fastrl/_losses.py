"""What policy_loss and value_loss share: rows of tokens, aggregation to one number, and the backward that only scales."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl import _checks
from fastrl.errors import ArgumentError

AGGREGATIONS = {
    "token_mean": 0,
    "token_sum": 1,
    "seq_mean_token_sum": 2,
    "seq_mean_token_mean": 3,
    "seq_mean_token_sum_norm": 4,
}
# What the schemas call "divide by the default".
DEFAULT_DENOM = 0.0


class TokenRows:
    """Rows of ``[B, T]``, or of packed ``[N]`` with ``cu_seqlens``, which of their tokens are valid, and sums of them.

    Plain torch for the references, without a host synchronisation. Packed rows are summed in float64.
    """

    def __init__(self, like: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
        self.valid = torch.ones_like(like, dtype=torch.bool) if mask is None else mask != 0
        self.cu_seqlens = cu_seqlens
        if cu_seqlens is not None:
            positions = torch.arange(like.shape[0], device=like.device)
            self._row_of = torch.searchsorted(cu_seqlens[1:].long(), positions, right=True)
            self._num_rows = cu_seqlens.shape[0] - 1
        self.counts = self.sums(self.valid.double())

    def select(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``x`` in ``dtype`` with zeros at masked positions, so that nothing there is ever read."""
        return torch.where(self.valid, x.to(dtype), 0.0)

    def sums(self, x: Tensor) -> Tensor:
        """``[B]``: the sum of each row."""
        if self.cu_seqlens is None:
            return x.sum(-1)
        total = torch.zeros(self._num_rows, dtype=torch.float64, device=x.device)
        return total.index_add(0, self._row_of, x.double()).to(x.dtype)

    def spread(self, per_row: Tensor) -> Tensor:
        """``[B]`` to one element per token."""
        return per_row.unsqueeze(-1) if self.cu_seqlens is None else per_row[self._row_of]

    def tokens_of(self, x: Tensor) -> Tensor:
        """``x`` per token as it is, ``[B]`` with the value of its row at each token."""
        return x if x.shape == self.valid.shape else self.spread(x).expand(self.valid.shape)

    def num_tokens(self) -> Tensor:
        return self.counts.sum()

    def num_sequences(self) -> Tensor:
        """Rows with at least one valid token, float64."""
        return (self.counts > 0).double().sum()


def aggregate(x: Tensor, rows: TokenRows, agg: str, denom: float | Tensor | None) -> Tensor:
    """``x``, zero at masked positions, summed and divided as ``agg`` says; 0 when nothing is valid."""
    if agg == "seq_mean_token_mean":
        total = (rows.sums(x) / rows.counts.clamp(min=1).to(x.dtype)).sum()
    else:
        total = x.sum()
    by = divisor(rows, agg, denom, x.shape[-1])
    return total / (by.to(x.dtype) if isinstance(by, Tensor) else by)


def divisor(rows: TokenRows, agg: str, denom: float | Tensor | None, width: int) -> float | Tensor:
    """What the sum of ``agg`` is divided by; rows are ``width`` wide where they are padded."""
    if agg == "token_sum":
        return 1.0
    if denom is not None:
        return denom
    if agg == "token_mean":
        return rows.num_tokens().clamp(min=1)
    scale = width if agg == "seq_mean_token_sum_norm" else 1
    return (rows.num_sequences() * scale).clamp(min=1)


def token_weights(rows: TokenRows, agg: str, denom: float | Tensor | None, width: int) -> Tensor:
    """The factor that ``agg`` gives the loss of each token, float64."""
    factor = torch.ones_like(rows.valid, dtype=torch.float64)
    if agg == "seq_mean_token_mean":
        factor = factor / rows.spread(rows.counts.clamp(min=1))
    return factor / divisor(rows, agg, denom, width)


def aggregation(
    op: str, agg: str, denom: float | Tensor | None, packed: bool, device: torch.device
) -> tuple[float, Tensor | None]:
    """Check ``agg`` and ``denom``; return denom as (number or DEFAULT_DENOM, float64 tensor or None)."""
    if agg not in AGGREGATIONS:
        _checks.option(op, "agg", agg, tuple(AGGREGATIONS))
    if denom is None:
        if packed and agg == "seq_mean_token_sum_norm":
            raise ArgumentError(
                f"{op}: denom must be given for agg='seq_mean_token_sum_norm' with cu_seqlens, where there is no padded "
                "width to divide by, got None; pass sequences * max_length"
            )
        return DEFAULT_DENOM, None
    if agg == "token_sum":
        raise ArgumentError(
            f"{op}: denom must be None for agg='token_sum', which divides by nothing, got {denom!r}; "
            "use agg='token_mean' to divide"
        )
    if isinstance(denom, Tensor):
        if denom.numel() != 1:
            raise ArgumentError(
                f"{op}: denom must be a number or a tensor with one element, got {list(denom.shape)}; "
                "pass the global count, denom.sum()"
            )
        _checks.same_device(op, "denom", denom, device, "the tokens")
        return DEFAULT_DENOM, denom.detach().reshape(()).double()
    number = _checks.number(op, "denom", denom)
    if number <= 0:
        raise ArgumentError(
            f"{op}: denom must be greater than 0, got {denom!r}; pass max(count, 1) for an empty batch"
        )
    if torch.compiler.is_compiling():
        # A float argument of an operator is a constant of the graph, and every batch has another count.
        return DEFAULT_DENOM, torch.full((), number, dtype=torch.float64, device=device)
    return number, None


def scaled(gradient: Tensor, upstream: Tensor) -> Tensor:
    """``gradient * upstream`` for a scalar upstream; ``gradient`` itself when that is 1 and looking is free."""
    if not torch.compiler.is_compiling() and upstream.device.type == "cpu" and upstream.item() == 1:
        return gradient
    return gradient * upstream
