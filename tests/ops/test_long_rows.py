"""Rows of thousands of tokens: GPU kernels share them out over programs or thread blocks, and no bit may show it (rule 5).

Which way a row goes depends on its length and its company: alone or packed it is cut up, among many it is not. For
Triton's kernels three rows are many here, because interpreting hundreds of long ones takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import fastrl
from tests.helpers import leaf, pack, same_bits
from tests.ops.losses import batch, run_policy

WIDTH = 4200
# Of packed rows; kernels cut a row every 256, 512 or 1024 tokens.
LENGTHS = [WIDTH, 0, 700]


@pytest.fixture(autouse=True)
def _three_rows_are_many(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if impl == "reference":
        pytest.skip("the definition takes all rows step by step, in any company")
    if impl == "triton":
        from fastrl import _triton

        monkeypatch.setattr(_triton, "MANY_ROWS", 3)


class Results(NamedTuple):
    of_tokens: list[Tensor]
    of_rows: list[Tensor]

    def assert_close(self, exact: Results, atol: float) -> None:
        for got, expected in zip(self, exact):
            for x, y in zip(got, expected):
                torch.testing.assert_close(x.double(), y, atol=atol, rtol=1e-4)


# Inputs per token, one per row, offsets of packed rows.
Run = Callable[[list[Tensor], Tensor, Tensor | None], Results]


def assert_same_bits_in_any_company(run: Run, of_tokens: list[Tensor], of_rows: Tensor) -> Results:
    """The results of the three rows of a batch, equal to those of rows alone and packed."""
    together = run(of_tokens, of_rows, None)
    flat, offsets = zip(*(pack(x, LENGTHS) for x in of_tokens))
    packed = run(list(flat), of_rows, offsets[0])
    for i, n in enumerate(LENGTHS):
        row = slice(i, i + 1)
        alone = run([x[row, :n] for x in of_tokens], of_rows[row], None)
        begin = int(offsets[0][i])
        for x, y, z in zip(alone.of_tokens, packed.of_tokens, together.of_tokens):
            assert same_bits(x[0], y[begin : begin + n])
            assert n < WIDTH or same_bits(x, z[row])
        for x, y, z in zip(alone.of_rows, packed.of_rows, together.of_rows):
            assert same_bits(x, y[row])
            assert n < WIDTH or same_bits(x, z[row])
    return together


def grads(*leaves: Tensor) -> list[Tensor]:
    assert all(x.grad is not None for x in leaves)
    return [x.grad for x in leaves if x.grad is not None]


@pytest.mark.parametrize("reverse", [True, False])
def test_affine_scan(impl: str, reverse: bool) -> None:
    def run(
        of_tokens: list[Tensor], initial: Tensor, offsets: Tensor | None, which: str = impl
    ) -> Results:
        a, b, first = map(leaf, (*of_tokens, initial))
        x = fastrl.affine_scan(a, b, reverse=reverse, initial=first, cu_seqlens=offsets, impl=which)
        (x * of_tokens[1]).sum().backward()
        return Results([x.detach(), *grads(a, b)], grads(first))

    a, b, initial = torch.rand(3, WIDTH) + 0.4, torch.randn(3, WIDTH), torch.randn(3)
    got = assert_same_bits_in_any_company(run, [a, b], initial)
    if impl != "cpu":  # which goes through rows of any length in one way
        got.assert_close(run([a.double(), b.double()], initial.double(), None, "reference"), 1e-4)


@pytest.mark.parametrize(
    ("holes", "returns_lam"),
    [("carry", None), ("carry", 1.0), ("zero_step", 1.0), ("ignore", None)],
)
def test_gae(impl: str, holes: str, returns_lam: float | None) -> None:
    """Episodes end within rows, and holes reach over several pieces of one."""

    def run(
        of_tokens: list[Tensor], bootstrap: Tensor, offsets: Tensor | None, which: str = impl
    ) -> Results:
        r, v, mask, dones = of_tokens
        rewards, values, last = map(leaf, (r, v, bootstrap))
        out = fastrl.gae(
            *(rewards, values, mask),
            gamma=0.99,
            lam=0.95,
            returns_lam=returns_lam,
            dones=dones,
            bootstrap=last,
            holes=holes,
            cu_seqlens=offsets,
            impl=which,
        )
        (out.advantages * r + out.returns * v).sum().backward()
        return Results([x.detach() for x in out] + grads(rewards, values), grads(last))

    shape = (3, WIDTH)
    mask = torch.rand(shape) < 0.7
    mask[0, 900:2600] = mask[1, 1000:1500] = mask[2, 300:] = False
    inputs = [torch.randn(shape), torch.randn(shape)]
    dones = torch.rand(shape) < 0.002
    dones[0, 3000:] = torch.rand(WIDTH - 3000) < 0.7
    flags = [mask, dones]
    bootstrap = torch.randn(3)
    got = assert_same_bits_in_any_company(run, inputs + flags, bootstrap)
    if impl != "cpu":
        exact = [x.double() for x in inputs] + flags
        got.assert_close(run(exact, bootstrap.double(), None, "reference"), 1e-3)


def test_gae_with_padding(impl: str) -> None:
    """On either side, of more than one piece of a row."""
    rewards, values, mask = torch.randn(3, WIDTH), torch.randn(3, WIDTH), torch.rand(3, WIDTH) < 0.7
    begin, end = 1100, 2900
    mask[:, :begin] = mask[:, end:] = False
    mask[:, begin] = mask[:, end - 1] = True
    mask[2] = False
    results = []
    for row, tokens in (
        (slice(3), slice(None)),
        (slice(1), slice(None)),
        (slice(1), slice(begin, end)),
    ):
        r, v = (leaf(x[row, tokens]) for x in (rewards, values))
        out = fastrl.gae(r, v, mask[row, tokens], gamma=0.99, lam=0.95, impl=impl)
        (out.advantages * rewards[row, tokens] + out.returns * values[row, tokens]).sum().backward()
        results.append([x.detach() for x in out] + grads(r, v))
    for together, padded, trimmed in zip(*results):
        assert same_bits(together[:1], padded)
        assert same_bits(padded[:, begin:end], trimmed)
        assert not padded[:, :begin].any() and not padded[:, end:].any()
        assert not together[2].any()


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_policy_loss(impl: str, ratio: str) -> None:
    """Both losses find their valid tokens by the same kernels."""
    data, mask = batch((3, WIDTH)), torch.rand(3, WIDTH) < 0.5
    mask[0, :1300] = mask[0, 1500:3000] = mask[2] = False
    options = {"ratio": ratio, "agg": "seq_mean_token_mean", "kl": "k3", "kl_coef": 0.1}
    together = run_policy(impl, data, mask, **options)
    offsets = torch.arange(4) * WIDTH
    flat = run_policy(impl, data.map(Tensor.flatten), mask.flatten(), cu_seqlens=offsets, **options)
    together[2] = together[2].flatten()
    for x, y in zip(flat, together):
        assert same_bits(x, y)
    expected = run_policy("reference", data.double(), mask, **options)
    torch.testing.assert_close(together[0].double(), expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(together[2].double(), expected[2].flatten(), atol=1e-7, rtol=1e-3)
