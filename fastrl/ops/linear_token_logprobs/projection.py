"""The projection from hidden states to logits, a chunk of rows at a time, and its gradients.

Both ops over an lm_head walk through its chunks. Only the logits of one chunk exist at any time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import _library
from fastrl._library import result_dtype
from fastrl.ops.token_logprobs.op import (
    token_logprobs_backward_inplace_op,
    token_logprobs_backward_op,
    token_logprobs_op,
)

# What the logits of a chunk may take, by device. CPU products of this width run at full speed from about 100 rows.
_CHUNK_BYTES = {"cpu": 64 << 20}
_OTHER_CHUNK_BYTES = 1 << 30
# Rows of a weight gradient that are computed in half precision before they are added up in float32: they stay in cache.
_TILE = 1024


class Inputs(NamedTuple):
    """The arguments of the operators that belong to the projection, in the order of their schemas."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    tokens: Tensor  # int64 [N], ids in the whole vocabulary
    bias: Tensor | None  # [V]
    lora_a: Tensor | None  # [R, H]
    lora_b: Tensor | None  # [V, R]
    mask: Tensor | None  # [N]
    temperatures: Tensor | None  # [N], result dtype
    allowed: Tensor | None  # bool [N, V], or int64 [N, K] with negative ids for nothing
    numbers: list[float]  # temperature, logit scale, softcap (infinite: none), LoRA scale
    sizes: list[
        int
    ]  # rows of a chunk (0: from the budget), id of the first class here, classes here
    group: str  # name of the process group that shares the vocabulary; empty: none
    compute: torch.dtype | None  # dtype of the products under autocast
    accumulate: bool  # sum the gradient of the weight in float32 whatever its dtype


SCHEMA = (
    "Tensor hidden, Tensor weight, Tensor tokens, Tensor? bias, Tensor? lora_a, Tensor? lora_b, Tensor? mask, "
    "Tensor? temperatures, Tensor? allowed, float[] numbers, int[] sizes, str group, ScalarType? compute, "
    "bool accumulate"
)
# The inputs that have gradients.
DIFFERENTIABLE = ("hidden", "weight", "bias", "lora_a", "lora_b")


class Projection:
    """The rows that count, as chunks. ``take`` and ``spread`` go from all rows to these and back."""

    def __init__(self, inputs: Inputs, impl: str) -> None:
        self.inputs, self.impl = inputs, impl
        hidden = inputs.hidden
        self.dtype = _compute_dtype(inputs)
        self.result_dtype = result_dtype(self.dtype)
        self._index, self._valid = _selection(inputs.mask, hidden.device)
        self.num_rows = len(hidden) if self._index is None else len(self._index)

        temperature, scale, self._softcap, self._lora_scale = inputs.numbers
        self._scale = scale if math.isfinite(self._softcap) else 1.0
        # Without a cap between them the scale is one with the temperature, and costs nothing.
        self.temperature = temperature * self._scale / scale
        self.temperatures = None
        if inputs.temperatures is not None:
            self.temperatures = self.take(inputs.temperatures, 1.0) * (self._scale / scale)
        self.chunk, first, self.num_classes = inputs.sizes
        self._weight = inputs.weight[: self.num_classes].to(self.dtype)
        self._bias = None if inputs.bias is None else inputs.bias[: self.num_classes].to(self.dtype)
        if inputs.lora_a is not None and inputs.lora_b is not None:
            self._lora_a = inputs.lora_a.to(self.dtype)
            self._lora_b = inputs.lora_b[: self.num_classes].to(self.dtype)

        tokens = self.take(inputs.tokens, 0) - first
        self.is_here = (tokens >= 0) & (tokens < self.num_classes)
        self._tokens = torch.where(self.is_here, tokens, 0)
        self._first = first
        self.chunk = self.chunk or _chunk_rows(len(inputs.weight), self.dtype, hidden.device)
        self._buffer = hidden.new_empty(
            (min(self.chunk, self.num_rows), self.num_classes), dtype=self.dtype
        )
        self._slope: Tensor | None = None
        self._kept: Tensor | None = None

    # ---- rows ------------------------------------------------------------------------------------------------------

    def chunks(self) -> Iterator[slice]:
        """Ranges of the rows that count: the same on every rank with as many rows of the weight."""
        for start in range(0, self.num_rows, self.chunk):
            yield slice(start, min(start + self.chunk, self.num_rows))

    def take(self, x: Tensor, fill: float) -> Tensor:
        """The rows of ``x [N, ...]`` that count; on devices where counting them would stop the host ``fill`` hides others."""
        if self._index is not None:
            return x.index_select(0, self._index)
        if self._valid is not None:
            return torch.where(self._valid.view(-1, *[1] * (x.dim() - 1)), x, fill)
        return x

    def spread(self, x: Tensor) -> Tensor:
        """Back to all rows, with zeros at masked ones."""
        if self._index is not None:
            return x.new_zeros((len(self.inputs.hidden), *x.shape[1:])).index_copy_(
                0, self._index, x
            )
        return self.take(x, 0.0)

    def valid(self, rows: slice) -> Tensor | None:
        """Which of the rows of a chunk count, where ``take`` could not drop the others."""
        return None if self._valid is None else self._valid[rows]

    def new_rows(self, *shape: int) -> Tensor:
        """An uninitialised result for the rows that count."""
        return self.inputs.hidden.new_empty((self.num_rows, *shape), dtype=self.result_dtype)

    # ---- forward ---------------------------------------------------------------------------------------------------

    def logits(self, rows: slice, *, gradient: bool = False) -> Tensor:
        """The logits of a chunk, in memory that the next chunk reuses; ``gradient`` keeps what ``backward`` needs."""
        hidden = self._hidden(rows)
        logits = self._buffer[: len(hidden)]
        if self._bias is None:
            torch.mm(hidden, self._weight.t(), out=logits)
        else:
            torch.addmm(self._bias, hidden, self._weight.t(), out=logits)
        if self.inputs.lora_a is not None:
            logits.addmm_(self._low_rank(hidden), self._lora_b.t())
        if math.isfinite(self._softcap):
            logits = logits.to(self.result_dtype).mul_(self._scale / self._softcap).tanh_()
            if gradient:
                self._slope = logits.square().neg_().add_(1).mul_(self._scale)
            logits.mul_(self._softcap)
        if self.inputs.allowed is not None:
            self._kept = _kept(
                self._rows_of(self.inputs.allowed, rows), self._first, self.num_classes
            )
            logits.masked_fill_(self._kept.logical_not(), -torch.inf)
        return logits

    def log_probs(
        self, logits: Tensor, rows: slice, *, entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """logp, entropy and statistics of the chunk over the classes here."""
        if not self.num_classes:  # a shard of nothing but padding
            logp = logits.new_zeros(len(logits), dtype=self.result_dtype)
            return logp, logp, torch.stack([logp - torch.inf, logp, logp], 1)
        result: tuple[Tensor, Tensor, Tensor] = token_logprobs_op[self.impl](
            logits, *self._row_arguments(rows), entropy
        )
        return result

    # ---- backward --------------------------------------------------------------------------------------------------

    def backward(
        self,
        logits: Tensor,
        rows: slice,
        grad_logp: Tensor | None,
        grad_entropy: Tensor | None,
        statistics: Tensor,
        gradients: Gradients,
    ) -> None:
        """Add to ``gradients`` what upstream gradients of logp and entropy make of this chunk; overwrites its logits."""
        if not self.num_classes:
            return
        foreign_column = None
        if self.inputs.group:
            foreign_column = self._without_target(
                logits[:, 0], rows, grad_logp, grad_entropy, statistics
            )
        arguments = (logits, *self._row_arguments(rows), statistics)
        inplace = "token_logprobs_backward_"
        if self.impl != "triton" and _library.has_kernel(inplace, self.impl.upper()):
            token_logprobs_backward_inplace_op[self.impl](grad_logp, grad_entropy, *arguments)
            grad_logits = logits
        else:
            grad_logits = token_logprobs_backward_op[self.impl](grad_logp, grad_entropy, *arguments)
        if foreign_column is not None:
            # The row kernel has taken the target for a class of this shard.
            here = self.is_here[rows]
            grad_logits[:, 0] = torch.where(here, grad_logits[:, 0], foreign_column)
        if self._kept is not None:
            grad_logits.masked_fill_(self._kept.logical_not(), 0.0)
        if self._slope is not None:
            grad_logits.mul_(self._slope)
        gradients.add(grad_logits.to(self.dtype), self._hidden(rows), self._indices(rows), self)

    def _without_target(
        self,
        column: Tensor,
        rows: slice,
        grad_logp: Tensor | None,
        grad_entropy: Tensor | None,
        statistics: Tensor,
    ) -> Tensor:
        """The gradient of the logits of one class in rows whose target is another."""
        largest, total, mean = statistics.unbind(1)
        by = self.temperature if self.temperatures is None else self.temperatures[rows]
        zero = torch.zeros_like(total)
        g = zero if grad_logp is None else grad_logp
        h = zero if grad_entropy is None else grad_entropy
        x = ((column.to(total.dtype) - largest) / by).nan_to_num(neginf=-1e4, nan=torch.nan)
        gradient = x.exp() / total * (h * (mean - x) - g) / by
        return torch.where((g == 0) & (h == 0), zero, gradient).to(column.dtype)

    # ---- pieces ----------------------------------------------------------------------------------------------------

    def _row_arguments(self, rows: slice) -> tuple[Tensor, Tensor | None, float]:
        temperatures = None if self.temperatures is None else self.temperatures[rows]
        return self._tokens[rows], temperatures, self.temperature

    def _indices(self, rows: slice) -> Tensor | slice:
        """Where the rows of a chunk are among all rows."""
        return rows if self._index is None else self._index[rows]

    def _rows_of(self, x: Tensor, rows: slice) -> Tensor:
        return x[rows] if self._index is None else x.index_select(0, self._index[rows])

    def _hidden(self, rows: slice) -> Tensor:
        hidden = self._rows_of(self.inputs.hidden, rows).to(self.dtype)
        return hidden if self._valid is None else torch.where(self._valid[rows, None], hidden, 0.0)

    def _low_rank(self, hidden: Tensor) -> Tensor:
        return torch.mm(hidden, self._lora_a.t()).mul_(self._lora_scale)


class Gradients:
    """Sums of the gradients over chunks; those of parameters in float32, one entry per name in ``DIFFERENTIABLE``."""

    def __init__(self, inputs: Inputs, needs: list[bool]) -> None:
        self.inputs = inputs
        named = dict(zip(DIFFERENTIABLE, needs, strict=True))

        def zeros(name: str) -> Tensor | None:
            x: Tensor | None = getattr(inputs, name)
            if x is None or not named[name]:
                return None
            is_wide = name != "hidden" and (inputs.accumulate or name != "weight")
            return torch.zeros_like(x, dtype=result_dtype(x.dtype) if is_wide else x.dtype)

        self.hidden, self.weight, self.bias = zeros("hidden"), zeros("weight"), zeros("bias")
        self.lora_a, self.lora_b = zeros("lora_a"), zeros("lora_b")

    def add(
        self, grad_logits: Tensor, hidden: Tensor, rows: Tensor | slice, head: Projection
    ) -> None:
        """One chunk: what its logits' gradient says of everything that they were made of."""
        classes = slice(0, head.num_classes)
        if self.weight is not None:
            _add_product(self.weight[classes], grad_logits, hidden)
        if self.bias is not None:
            self.bias[classes] += grad_logits.sum(0, dtype=self.bias.dtype)
        grad_low_rank = None
        if head.inputs.lora_a is not None:
            if self.lora_b is not None:
                _add_product(self.lora_b[classes], grad_logits, head._low_rank(hidden))
            grad_low_rank = torch.mm(grad_logits, head._lora_b).mul_(head._lora_scale)
            if self.lora_a is not None:
                _add_product(self.lora_a, grad_low_rank, hidden)
        if self.hidden is not None:
            grad_hidden = torch.mm(grad_logits, head._weight)
            if grad_low_rank is not None:
                grad_hidden.addmm_(grad_low_rank, head._lora_a)
            self.hidden[rows] = grad_hidden.to(self.hidden.dtype)

    def result(self) -> list[Tensor]:
        """In the dtype of the inputs; an empty tensor where none was wanted."""
        results = []
        for name in DIFFERENTIABLE:
            gradient, x = getattr(self, name), getattr(self.inputs, name)
            if gradient is None:
                gradient = self.inputs.hidden.new_empty((0,))
            else:
                gradient = gradient.to(x.dtype)
            setattr(self, name, None)
            results.append(gradient)
        return results


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left.T @ right``, summed in the dtype of ``total``."""
    if total.dtype == left.dtype:
        total.addmm_(left.t(), right)
    elif total.device.type == "cuda":
        torch.addmm(total, left.t(), right, out_dtype=total.dtype, out=total)
    else:
        for start in range(0, len(total), _TILE):
            tile = slice(start, start + _TILE)
            total[tile] += torch.mm(left[:, tile].t(), right)


def _compute_dtype(inputs: Inputs) -> torch.dtype:
    dtype = inputs.compute or inputs.hidden.dtype
    # CPUs multiply float16 through slow paths, ten to forty times slower than float32.
    return torch.float32 if dtype == torch.float16 and inputs.hidden.is_cpu else dtype


def _chunk_rows(num_classes: int, dtype: torch.dtype, device: torch.device) -> int:
    budget = _CHUNK_BYTES.get(device.type, _OTHER_CHUNK_BYTES)
    rows = budget // max(num_classes * dtype.itemsize, 1)
    return max(rows // 128 * 128 if rows > 128 else rows, 16)


def _selection(mask: Tensor | None, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Indices of the rows that count where they can be counted for free, otherwise which rows do."""
    if mask is None:
        return None, None
    if mask.device.type == "cpu":
        return mask.nonzero().squeeze(1).to(device, non_blocking=True), None
    return None, mask != 0


def _kept(allowed: Tensor, first: int, num_classes: int) -> Tensor:
    """bool [rows, classes here]: what ``allowed`` says of a chunk."""
    if allowed.dtype == torch.bool:
        return allowed[:, :num_classes]
    ids = allowed - first
    is_here = (ids >= 0) & (ids < num_classes) & (allowed >= 0)
    kept = torch.zeros((len(allowed), num_classes + 1), dtype=torch.bool, device=allowed.device)
    # What is nowhere here goes to a column of its own.
    return kept.scatter_(1, torch.where(is_here, ids, num_classes), True)[:, :num_classes]
