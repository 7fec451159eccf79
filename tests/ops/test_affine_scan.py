"""``fastrl.affine_scan`` and ``fastrl.discounted_returns``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastrl
from fastrl.ops.affine_scan.op import affine_scan_backward_op, affine_scan_op
from fastrl.ops.discounted_returns.op import discounted_returns_op
from tests.helpers import (
    DTYPES,
    SHAPES,
    assert_close,
    leaf,
    masks,
    pack,
    poisoned,
    same_bits,
    strided,
    with_threads,
)


def test_hand_worked_scan(impl: str) -> None:
    a, b = torch.tensor([[2.0, 0.5, 3.0]]), torch.tensor([[1.0, 1.0, 1.0]])
    initial = torch.tensor([2.0])
    right_to_left = fastrl.affine_scan(a, b, initial=initial, impl=impl)
    assert right_to_left.tolist() == [[10.0, 4.5, 7.0]]
    left_to_right = fastrl.affine_scan(a, b, reverse=False, initial=initial, impl=impl)
    assert left_to_right.tolist() == [[5.0, 3.5, 11.5]]


def test_transparent_and_forgetting_steps(impl: str) -> None:
    a, b = torch.tensor([[1.0, 1.0, 0.0, 1.0]]), torch.tensor([[0.0, 0.0, 5.0, 7.0]])
    assert fastrl.affine_scan(a, b, impl=impl).tolist() == [[5.0, 5.0, 5.0, 7.0]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reverse", [True, False])
def test_scan_and_gradients_against_reference(
    impl: str, shape: tuple[int, int], dtype: torch.dtype, reverse: bool
) -> None:
    base = (
        (torch.rand(shape) * 1.2).to(dtype),
        torch.randn(shape).to(dtype),
        torch.randn(shape[0]),
    )
    weights = torch.randn(shape)
    results = []
    for which, compute in ((impl, dtype), ("reference", torch.float64)):
        a, b = (leaf(x, compute) for x in base[:2])
        initial = leaf(base[2], torch.float64 if compute == torch.float64 else torch.float32)
        x = fastrl.affine_scan(a, b, reverse=reverse, initial=initial, impl=which)
        (x * weights.to(x.dtype)).sum().backward()
        results.append((x, a.grad, b.grad, initial.grad))
    (x, *grads), (expected, *expected_grads) = results
    assert_close(x, expected, dtype)
    for got, want in zip(grads, expected_grads):
        assert_close(got, want, dtype, grad=True)


def test_scan_packed_bits_equal_rows(impl: str) -> None:
    lengths = [0, 5, 33, 1, 16]
    a, b = torch.rand(5, 33), torch.randn(5, 33)
    (flat_a, offsets), (flat_b, _) = pack(a, lengths), pack(b, lengths)
    initial = torch.randn(5)
    for reverse in (True, False):
        packed = fastrl.affine_scan(
            flat_a, flat_b, reverse=reverse, initial=initial, cu_seqlens=offsets, impl=impl
        )
        for i, n in enumerate(lengths):
            alone = fastrl.affine_scan(
                *(a[i : i + 1, :n], b[i : i + 1, :n]),
                reverse=reverse,
                initial=initial[i : i + 1],
                impl=impl,
            )
            assert same_bits(alone[0], packed[int(offsets[i]) : int(offsets[i + 1])])


def test_scan_gradients_stay_within_packed_rows(impl: str) -> None:
    a, b = (torch.rand(12, requires_grad=True) for _ in range(2))
    x = fastrl.affine_scan(a, b, cu_seqlens=torch.tensor([0, 5, 12]), impl=impl)
    x[:5].sum().backward()
    assert a.grad is not None and b.grad is not None
    assert torch.count_nonzero(a.grad[5:]) == 0
    assert torch.count_nonzero(b.grad[5:]) == 0
    assert torch.all(b.grad[:5] > 0)


def test_scan_gradcheck(impl: str) -> None:
    leaves = [torch.randn(2, 7, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    initial = torch.randn(2, dtype=torch.float64, requires_grad=True)
    for reverse in (True, False):
        assert torch.autograd.gradcheck(
            lambda a, b, i, r=reverse: fastrl.affine_scan(a, b, reverse=r, initial=i, impl=impl),
            (*leaves, initial),
        )


def test_scan_layouts_threads_and_empty(impl: str) -> None:
    a, b = torch.rand(40, 300), torch.randn(40, 300)
    expected = fastrl.affine_scan(a, b, impl=impl)
    for x, y in zip(strided(a), strided(b)):
        assert same_bits(fastrl.affine_scan(x, y, impl=impl), expected)
    turned = fastrl.affine_scan(a.t().contiguous(), b.t().contiguous(), time_dim=0, impl=impl)
    assert same_bits(turned.t(), expected)
    assert same_bits(with_threads(1, lambda: fastrl.affine_scan(a, b, impl=impl)), expected)
    for shape in ((0, 4), (3, 0)):
        assert fastrl.affine_scan(torch.zeros(shape), torch.zeros(shape), impl=impl).shape == shape


@pytest.mark.parametrize("holes", ["carry", "zero_step", "ignore"])
@pytest.mark.parametrize("fill", ["zero", "carry"])
def test_returns_against_reference(impl: str, holes: str, fill: str) -> None:
    for shape in SHAPES:
        for _, mask in masks(shape):
            for extra in ({}, {"dones": torch.rand(shape) < 0.2}):
                options: dict[str, Any] = {"gamma": 0.9, "holes": holes, "fill": fill} | extra
                rewards, bootstrap = torch.randn(shape), torch.randn(shape[0])
                weights = torch.randn(shape)
                results = []
                for which, dtype in ((impl, torch.float32), ("reference", torch.float64)):
                    leaves = [leaf(x, dtype) for x in (rewards, bootstrap)]
                    out = fastrl.discounted_returns(
                        leaves[0], mask, bootstrap=leaves[1], impl=which, **options
                    )
                    (out * weights).sum().backward()
                    results.append((out, *(x.grad for x in leaves)))
                for got, expected in zip(*results):
                    assert_close(got, expected, torch.float32)


def test_returns_hand_worked_over_a_tool_call(impl: str) -> None:
    """The reward at the end reaches the first turn undecayed by the two masked tokens (gamma 0.5)."""
    rewards, mask = torch.tensor([[0.0, 9.0, 9.0, 0.0, 4.0]]), torch.tensor([[1, 0, 0, 1, 1]])
    out = fastrl.discounted_returns(rewards, mask, gamma=0.5, impl=impl)
    assert out.tolist() == [[1.0, 0.0, 0.0, 2.0, 4.0]]
    shown = fastrl.discounted_returns(rewards, mask, gamma=0.5, fill="carry", impl=impl)
    assert shown.tolist() == [[1.0, 2.0, 2.0, 2.0, 4.0]]


def test_returns_ignore_poison(impl: str) -> None:
    rewards, mask = torch.randn(3, 50), torch.rand(3, 50) < 0.5
    clean = fastrl.discounted_returns(rewards, mask, gamma=0.9, impl=impl)
    assert same_bits(
        fastrl.discounted_returns(poisoned(rewards, mask), mask, gamma=0.9, impl=impl), clean
    )


def test_opcheck() -> None:
    a, b = torch.rand(3, 20), torch.randn(3, 20)
    offsets = torch.tensor([0, 20, 45, 60])
    for reverse in (True, False):
        torch.library.opcheck(affine_scan_op["cpu"], (a, b, torch.randn(3), None, reverse))
        torch.library.opcheck(
            affine_scan_op["cpu"], (a.flatten(), b.flatten(), None, offsets, reverse)
        )
        torch.library.opcheck(
            affine_scan_backward_op["cpu"], (b, a, b, torch.randn(3), None, reverse)
        )
    torch.library.opcheck(
        discounted_returns_op["cpu"], (b, a > 0.5, None, None, None, 0.9, 0, False)
    )


def test_compile_fullgraph() -> None:
    def loss(a: Tensor, b: Tensor) -> Tensor:
        return (fastrl.affine_scan(a, b) * fastrl.discounted_returns(b, gamma=0.9)).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 30), (3, 17)):
        a, b = (torch.rand(shape, requires_grad=True) for _ in range(2))
        got = torch.autograd.grad(compiled(a, b), (a, b))
        for x, y in zip(got, torch.autograd.grad(loss(a, b), (a, b))):
            torch.testing.assert_close(x, y)


def test_errors() -> None:
    a = torch.zeros(2, 5)
    with pytest.raises(
        ValueError, match=r"affine_scan: b must have the shape of a, \[2, 5\], got \[2, 4\]"
    ):
        fastrl.affine_scan(a, a[:, :4])
    with pytest.raises(
        ValueError, match=r"affine_scan: initial must have the shape of one value per row"
    ):
        fastrl.affine_scan(a, a, initial=torch.zeros(3))
    with pytest.raises(ValueError, match=r"affine_scan: a and b must both be float64 or neither"):
        fastrl.affine_scan(a, a.double())
    with pytest.raises(
        ValueError, match=r"discounted_returns: gamma must be a finite number in \[0, 1\]"
    ):
        fastrl.discounted_returns(a, gamma=-0.1)
    with pytest.raises(ValueError, match=r"discounted_returns: time_dim must be -1, 0 or 1, got 2"):
        fastrl.discounted_returns(a, gamma=0.9, time_dim=2)
