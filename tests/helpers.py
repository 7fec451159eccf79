"""Inputs and comparisons that the op tests share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

Case = TypeVar("Case")

# Absolute and relative tolerance against a float64 reference, by the dtype of the inputs. Inputs in half precision are
# converted exactly and computed in float32, so only outputs in that dtype (gradients) are as coarse as it.
TOLERANCE = {
    torch.float64: (1e-10, 1e-9),
    torch.float32: (2e-5, 2e-5),
    torch.bfloat16: (2e-5, 2e-5),
    torch.float16: (2e-5, 2e-5),
}
GRAD_TOLERANCE = TOLERANCE | {torch.bfloat16: (1e-3, 8e-3), torch.float16: (2e-4, 1e-3)}
DTYPES = tuple(TOLERANCE)
HALF_DTYPES = (torch.bfloat16, torch.float16)

# One token, below and above a vector of 16 lanes, several blocks with a tail; rows that are odd in number.
SHAPES = ((1, 1), (3, 7), (2, 16), (5, 17), (3, 100), (2, 259))


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype, grad: bool = False) -> None:
    """Compare with a float64 result under the tolerance of the inputs' dtype."""
    atol, rtol = (GRAD_TOLERANCE if grad else TOLERANCE)[dtype]
    torch.testing.assert_close(got.double(), expected.double(), atol=atol, rtol=rtol)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bit pattern; unlike ``torch.equal`` it tells 0.0 from -0.0 and accepts NaN."""
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(view), b.contiguous().view(view))
    )


def masks(shape: tuple[int, int]) -> Iterator[tuple[str, Tensor | None]]:
    """Named masks: none, full, holes, padding on either side, nothing valid; each in another dtype."""
    rows, length = shape
    column = torch.arange(length).expand(rows, length)
    lengths = torch.randint(0, length + 1, (rows, 1))
    yield "none", None
    yield "full", torch.ones(shape, dtype=torch.bool)
    yield "holes", (torch.rand(shape) < 0.6).to(torch.int64)
    yield "right_padding", (column < lengths).float()
    yield "left_padding", (column >= length - lengths).to(torch.uint8)
    yield "nothing", torch.zeros(shape, dtype=torch.bfloat16)


def thinned(impl: str, cases: Iterable[Case], every: int = 5) -> Iterator[Case]:
    """All cases, but for interpreted kernels, which are slow, one in so many."""
    return itertools.islice(cases, 0, None, every if impl == "triton" else 1)


def poisoned(x: Tensor, mask: Tensor | None, value: float = float("nan")) -> Tensor:
    """``x`` with its masked positions overwritten."""
    return x if mask is None else torch.where(mask != 0, x, torch.full_like(x, value))


def strided(x: Tensor) -> Iterator[Tensor]:
    """``x`` under other memory layouts: transposed storage, gaps between rows, an offset that misaligns it."""
    yield x.t().contiguous().t()
    gaps = x.new_zeros(x.shape[0], x.shape[1] + 3)
    gaps[:, 1:-2] = x
    yield gaps[:, 1:-2]
    shifted = x.new_zeros(x.numel() + 1)[1:].view(x.shape)
    shifted.copy_(x)
    yield shifted


def pack(x: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Rows ``x[i, :lengths[i]]`` end to end, and their int32 offsets."""
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return torch.cat([row[:n] for row, n in zip(x, lengths)]), offsets


def uneven_lengths(impl: str) -> Iterator[list[int]]:
    """Rows enough for every stage of a kernel that sums over rows; empty ones, short ones, and a few long ones."""
    # Triton's kernels add up 256 rows at a time, and interpreting one takes 10 ms.
    yield [i % 10 for i in range(260 if impl == "triton" else 1100)]
    yield [1300 if i in (0, 17, 38) else i % 4 for i in range(40)]


def with_threads(count: int, call: Callable[[], Tensor]) -> Tensor:
    """Run ``call`` under another number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return call()
    finally:
        torch.set_num_threads(before)


def leaf(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of ``x`` that collects gradients."""
    return x.detach().clone().to(dtype or x.dtype).requires_grad_()
