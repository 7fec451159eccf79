"""Inputs, definitions and measurements that the tests of the two ops over an lm_head share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastrl
from tests.helpers import leaf

# Largest error as a share of the largest value, by the dtype of states and weight, against float64 from the same numbers.
# In half precision the logits, and their gradient, are rounded to it before they are used; float16 on CPU is not.
LIMITS = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 4e-2,
}


class Head(NamedTuple):
    """What the logits of N rows come from, and the tokens chosen."""

    hidden: Tensor
    weight: Tensor
    tokens: Tensor
    bias: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None

    def options(self) -> dict[str, Tensor | None]:
        return {"bias": self.bias, "lora_a": self.lora_a, "lora_b": self.lora_b}

    def leaves(self) -> list[Tensor]:
        return [x for x in (self.hidden, self.weight, *self.options().values()) if x is not None]

    def fresh(self, dtype: torch.dtype | None = None) -> Head:
        """Copies that collect gradients."""
        return Head(*(x if i == 2 or x is None else leaf(x, dtype) for i, x in enumerate(self)))


def head(
    shape: tuple[int, ...],
    width: int,
    vocabulary: int,
    dtype: torch.dtype = torch.float32,
    *,
    bias: bool = False,
    rank: int = 0,
    scale: float = 2.0,
) -> Head:
    """Random states and weights whose logits have a standard deviation of ``scale`` or so."""
    spread = scale / width**0.5
    return Head(
        torch.randn(*shape, width).to(dtype),
        (torch.randn(vocabulary, width) * spread).to(dtype),
        torch.randint(0, vocabulary, shape),
        torch.randn(vocabulary).to(dtype) if bias else None,
        (torch.randn(rank, width) * spread).to(dtype) if rank else None,
        torch.randn(vocabulary, rank).to(dtype) if rank else None,
    )


def log_probs(h: Head, **options: Any) -> fastrl.LogProbs:
    return fastrl.linear_token_logprobs(
        h.hidden, h.weight, h.tokens, **{"entropy": True} | h.options() | options
    )


def values_and_gradients(
    h: Head, upstream: tuple[Tensor | None, Tensor | None] | None = None, **options: Any
) -> list[Tensor]:
    """logp, entropy and the gradients of the head's tensors for upstream gradients of logp and entropy."""
    h = h.fresh()
    out = log_probs(h, **options)
    assert out.entropy is not None
    g, k = upstream or (
        torch.linspace(-1, 2, h.tokens.numel()),
        torch.linspace(1, 0.2, h.tokens.numel()),
    )
    loss = out.logp.new_zeros(())
    if g is not None:
        loss = loss + (out.logp * g.view(h.tokens.shape)).sum()
    if k is not None:
        loss = loss + (out.entropy * k.view(h.tokens.shape)).sum()
    return [out.logp.detach(), out.entropy.detach(), *torch.autograd.grad(loss, h.leaves())]


def exact(h: Head, *upstream: Any, **options: Any) -> list[Tensor]:
    """The same by the definition in float64."""
    return values_and_gradients(h.fresh(torch.float64), *upstream, impl="reference", **options)


def error(got: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest expected value."""
    assert got.shape == expected.shape
    if expected.numel() == 0:
        return 0.0
    difference = (got.double() - expected.double()).abs().max().item()
    return difference / max(expected.double().abs().max().item(), 1e-6)


def assert_close(
    got: list[Tensor], expected: list[Tensor], dtype: torch.dtype, factor: float = 1.0
) -> None:
    assert len(got) == len(expected)
    for x, y in zip(got, expected):
        assert error(x, y) <= factor * LIMITS[dtype]


def peak_bytes(call: Callable[[], object]) -> int:
    """Most bytes that were allocated at any time during the call, beyond those before it."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        kept = call()
    events = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    del kept
    current = most = 0
    for _, change in changes:
        current += change
        most = max(most, current)
    return most


def products(call: Callable[[], object]) -> list[tuple[int, ...]]:
    """Sizes ``(n, k, m)`` of every matrix product ``[n, k] @ [k, m]`` that the call runs."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        call()
    found = []
    for event in profile.events():
        if event.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            first = 0 if event.name == "aten::mm" else 1  # what is added stands before the factors
            left, right = event.input_shapes[first : first + 2]
            found.append((left[0], left[1], right[1]))
    return found


@contextmanager
def mask_on_a_device() -> Iterator[None]:
    """Inside, masked rows are hidden and not dropped, as where counting them would stop the host."""
    from fastrl.ops.linear_token_logprobs import projection

    dropped = projection._selection
    projection._selection = lambda mask, device: (None, None if mask is None else mask != 0)
    try:
        yield
    finally:
        projection._selection = dropped
