"""Bytes that the kernels load and store, over the least that their inputs and outputs need.

The checked build counts every access to global memory, so that an input that is read twice, a mask that is widened
before it is read, or a store that is repeated shows without a GPU. On a device caches hide some of it; nothing here
says how fast a kernel is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import fastrl
from tests.cuda_on_host import library
from tests.cuda_on_host.traffic import Meter


@pytest.fixture(scope="module")
def kernels() -> Iterator[library.Kernels]:
    built = library.kernels("checked")
    undo = library.route(built.operators)
    yield built
    undo()


def size(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


class Case(NamedTuple):
    """A call, its inputs, the bytes of its outputs, and what it may move over their sum."""

    op: str
    call: Callable[[], object]
    inputs: dict[str, Tensor]
    outputs: int
    factor: float


def all_valid(rows: int, tokens: int) -> Tensor:
    return torch.ones(rows, tokens, dtype=torch.uint8)


def gae(rows: int, tokens: int, factor: float) -> Case:
    rewards, values = torch.randn(rows, tokens), torch.randn(rows, tokens)
    mask = all_valid(rows, tokens)
    return Case(
        "gae",
        lambda: fastrl.gae(rewards, values, mask, gamma=0.99, lam=0.95, impl="cuda"),
        {"rewards": rewards, "values": values, "mask": mask},
        2 * size(rewards),
        factor,
    )


def affine_scan(rows: int, tokens: int, factor: float) -> Case:
    a, b = torch.rand(rows, tokens), torch.randn(rows, tokens)
    call = lambda: fastrl.affine_scan(a, b, impl="cuda")  # noqa: E731
    return Case("affine_scan", call, {"a": a, "b": b}, size(b), factor)


def policy_loss(rows: int, tokens: int, factor: float) -> Case:
    logp, old_logp, ref_logp, advantages = torch.randn(4, rows, tokens).unbind()
    mask = all_valid(rows, tokens)
    logp = logp.clone().requires_grad_()

    def call() -> object:
        return fastrl.policy_loss(
            *(logp, old_logp, advantages, mask),
            ref_logp=ref_logp,
            kl="k3",
            kl_coef=0.1,
            impl="cuda",
        )

    inputs = {"logp": logp, "old_logp": old_logp, "ref_logp": ref_logp, "advantages": advantages}
    return Case("policy_loss", call, inputs | {"mask": mask}, size(logp), factor)


def value_loss(rows: int, tokens: int, factor: float) -> Case:
    values, old_values, returns = torch.randn(3, rows, tokens).unbind()
    mask = all_valid(rows, tokens)
    values = values.clone().requires_grad_()
    return Case(
        "value_loss",
        lambda: fastrl.value_loss(values, old_values, returns, mask, impl="cuda"),
        {"values": values, "old_values": old_values, "returns": returns, "mask": mask},
        size(values),
        factor,
    )


def whiten(rows: int, tokens: int, factor: float) -> Case:
    """The moments come first, so x and the mask are read twice: that is the least."""
    x, mask = torch.randn(rows, tokens), all_valid(rows, tokens)
    return Case(
        "whiten_apply",
        lambda: fastrl.whiten(x, mask, impl="cuda"),
        {"x": x, "mask": mask},
        2 * size(x) + size(mask),
        factor,
    )


def group_advantages(samples: int, group: int, factor: float) -> Case:
    """Groups of equal size in a random order. They meet in a hash table: what is bounded here is its traffic."""
    rewards = torch.randn(samples)
    groups = torch.arange(samples // group).repeat_interleave(group)[torch.randperm(samples)]
    return Case(
        "group_advantages",
        lambda: fastrl.group_advantages(rewards, groups, impl="cuda"),
        {"rewards": rewards, "groups": groups},
        size(rewards),
        factor,
    )


def token_logprobs(rows: int, vocabulary: int, factor: float) -> Case:
    logits = torch.randn(rows, vocabulary).to(torch.bfloat16)
    tokens = torch.randint(0, vocabulary, (rows,))
    return Case(
        "token_logprobs",
        lambda: fastrl.token_logprobs(logits, tokens, impl="cuda"),
        {"logits": logits, "tokens": tokens},
        4 * rows,
        factor,
    )


CASES = {
    "gae": lambda: gae(8, 4096, 1.05),
    # Rows too few to keep a device busy one by one: cut into blocks, all inputs are read twice.
    "gae_few_long_rows": lambda: gae(4, 8192, 1.65),
    "affine_scan": lambda: affine_scan(8, 4096, 1.05),
    "policy_loss": lambda: policy_loss(4, 8192, 1.05),
    "value_loss": lambda: value_loss(4, 8192, 1.08),
    "group_advantages": lambda: group_advantages(4096, 8, 10),
    "whiten": lambda: whiten(4, 8192, 1.05),
    "token_logprobs": lambda: token_logprobs(8, 32768, 1.05),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_moved_over_the_least(kernels: library.Kernels, name: str) -> None:
    op, call, inputs, outputs, factor = CASES[name]()
    assert op in kernels.operators
    meter = Meter(kernels.library, **inputs)
    call()
    total = meter.total()
    least = size(*inputs.values()) + outputs
    reads = {key: round(meter.of(key).loaded / size(inputs[key]), 3) for key in inputs}
    ratio = total.moved / least
    assert 1 <= ratio <= factor, f"{ratio:.3f} times the least; inputs are read {reads} times"
    assert all(meter.of(key).distinct_loaded == size(inputs[key]) for key in inputs)


def test_the_meter_counts_what_a_kernel_moves() -> None:
    """16 bytes a thread both ways, and four bytes once more."""
    from tests.cuda_on_host.test_shim import Fixtures

    fixtures = Fixtures("checked")
    x, out = torch.ones(4 * 64), torch.empty(4 * 64)
    meter = Meter(fixtures.library, x=x)
    fixtures.run("copy_quads", x, out, 2, 32)
    assert meter.total() == (1024 + 4, 1024, 1024, 1024, 129, 128)
    assert meter.of("x") == (1024 + 4, 0, 1024, 0, 65, 64)
