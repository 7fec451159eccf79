"""``fastrl.token_logprobs``: hand-worked values, impossible and extreme logits, the kernels against the definition in
float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fastrl
from tests.helpers import DTYPES, assert_close, same_bits
from tests.ops.logprobs import gradient, inputs, reference

INF, NAN = float("inf"), float("nan")
# One class, around a vector of 16 lanes, around one and two tiles of 4096, a vocabulary of odd size.
VOCABULARIES = (1, 7, 16, 17, 4097, 8191, 8192, 8193, 50257)


def test_hand_worked_values(impl: str) -> None:
    """Odds 1 : 2 : 5, so p = 1/8, 1/4, 5/8; and a fair coin at any temperature."""
    logits = torch.tensor([[1.0, 2.0, 5.0]]).log()
    out = fastrl.token_logprobs(logits, torch.tensor([1]), entropy=True, impl=impl)
    assert out.entropy is not None
    entropy = -(math.log(1 / 8) / 8 + math.log(1 / 4) / 4 + math.log(5 / 8) * 5 / 8)
    assert out.logp.item() == pytest.approx(math.log(1 / 4), abs=1e-6)
    assert out.entropy.item() == pytest.approx(entropy, abs=1e-6)

    coin = fastrl.token_logprobs(
        torch.zeros(1, 2), torch.tensor([0]), temperature=0.3, entropy=True, impl=impl
    )
    assert coin.entropy is not None
    assert coin.logp.item() == pytest.approx(-math.log(2), abs=1e-6)
    assert coin.entropy.item() == pytest.approx(math.log(2), abs=1e-6)


def test_hand_worked_gradient(impl: str) -> None:
    """p = 1/4, 3/4: d logp_0 = (3/4, -3/4); d entropy = p (E z - z) = (3/16, -3/16) ln 3."""
    logits, token = torch.tensor([[1.0, 3.0]]).log(), torch.tensor([0])
    one = torch.ones(1)
    torch.testing.assert_close(
        gradient(logits, token, one, None, impl=impl), torch.tensor([[0.75, -0.75]])
    )
    entropy = torch.tensor([[3.0, -3.0]]) / 16 * math.log(3)
    torch.testing.assert_close(gradient(logits, token, None, one, impl=impl), entropy)


def test_temperature_divides_the_logits(impl: str) -> None:
    logits, tokens = inputs(4, 100)
    got = fastrl.token_logprobs(logits, tokens, temperature=0.5, impl=impl).logp
    torch.testing.assert_close(got, fastrl.token_logprobs(logits * 2, tokens, impl=impl).logp)


def test_temperature_per_row(impl: str) -> None:
    logits, tokens = inputs(4, 300)
    temperature = torch.tensor([0.3, 1.0, 2.5, 1e-3])
    got = fastrl.token_logprobs(logits, tokens, temperature=temperature, entropy=True, impl=impl)
    grad = gradient(
        logits, tokens, torch.ones(4), torch.ones(4), temperature=temperature, impl=impl
    )
    for i, t in enumerate(temperature.tolist()):
        row = logits[i : i + 1], tokens[i : i + 1]
        alone = fastrl.token_logprobs(*row, temperature=t, entropy=True, impl=impl)
        for x, y in zip(got, alone):
            assert x is not None
            assert same_bits(x[i : i + 1], y)
        one = torch.ones(1)
        assert same_bits(grad[i : i + 1], gradient(*row, one, one, temperature=t, impl=impl))


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_reference(impl: str, vocabulary: int, dtype: torch.dtype) -> None:
    logits, tokens = inputs(3, vocabulary, dtype)
    tokens[0] = vocabulary - 1
    for temperature in (1.0, 0.7):
        options = {"temperature": temperature}
        got = fastrl.token_logprobs(logits, tokens, entropy=True, impl=impl, **options)
        expected = reference(logits, tokens, **options)
        for x, y in zip(got, expected):
            assert x is not None and y is not None
            assert x.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert_close(x, y, dtype)
        assert same_bits(got.logp, fastrl.token_logprobs(logits, tokens, impl=impl, **options).logp)
        g, h = torch.randn(3), torch.randn(3)
        for upstream in ((g, h), (g, None), (None, h)):
            x = gradient(logits, tokens, *upstream, impl=impl, **options)
            y = gradient(logits.double(), tokens, *upstream, impl="reference", **options)
            assert x.dtype == dtype
            assert_close(x, y, dtype, grad=True)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(0, 5),
    vocabulary=st.integers(1, 130),
    scale=st.sampled_from([0.0, 1.0, 30.0, 1000.0]),
    possible=st.sampled_from([0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_any_row_against_reference(
    rows: int, vocabulary: int, scale: float, possible: float, seed: int
) -> None:
    torch.manual_seed(seed)
    logits, tokens = inputs(rows, vocabulary, scale=scale)
    logits[torch.rand_like(logits) > possible] = -INF
    got = fastrl.token_logprobs(logits, tokens, entropy=True, impl="cpu")
    for x, y in zip(got, reference(logits, tokens)):
        assert x is not None and y is not None
        torch.testing.assert_close(x, y.float(), atol=2e-5, rtol=2e-5, equal_nan=True)


def impossible(case: str, vocabulary: int = 9000) -> tuple[Tensor, Tensor]:
    logits, tokens = inputs(4, vocabulary)
    column = torch.arange(vocabulary)
    tokens[:] = torch.tensor([vocabulary - 1, 4096, 8500, 4100])
    removed = {
        "scattered": torch.rand(vocabulary) < 0.5,
        "first_tile": column < 4096,
        "first_two_tiles": column < 8192,
        "middle_tile": (column >= 4096) & (column < 8192),
        "last_tile": column >= 8192,
    }
    if case == "all_but_the_target":
        only = logits.gather(-1, tokens[:, None])
        logits = torch.full_like(logits, -INF).scatter(-1, tokens[:, None], only)
    elif case == "target":
        logits.scatter_(-1, tokens[:, None], -INF)
    else:
        logits[:, removed[case]] = -INF
    return logits, tokens


@pytest.mark.parametrize(
    "case",
    [
        *("scattered", "first_tile", "first_two_tiles", "middle_tile", "last_tile"),
        *("all_but_the_target", "target"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_impossible_classes(impl: str, case: str, dtype: torch.dtype) -> None:
    """-inf contributes nothing, to values and gradients, wherever it stands."""
    logits, tokens = impossible(case)
    logits = logits.to(dtype)
    got = fastrl.token_logprobs(logits, tokens, entropy=True, impl=impl)
    for x, y in zip(got, reference(logits, tokens)):
        assert x is not None and y is not None
        assert_close(x, y, dtype)
    if case == "target":
        assert (got.logp == -INF).all()
    if case == "all_but_the_target":
        assert (got.logp == 0).all() and got.entropy is not None and (got.entropy == 0).all()
    g, h = torch.randn(4), torch.randn(4)
    grad = gradient(logits, tokens, g, h, impl=impl)
    assert_close(grad, gradient(logits.double(), tokens, g, h, impl="reference"), dtype, True)
    others = (logits == -INF).scatter(-1, tokens[:, None], False)
    assert (grad[others] == 0).all()


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_extreme_logits(impl: str, scale: float) -> None:
    """Large common offsets cancel; what remains is exact in the logits' own rounding."""
    logits, tokens = inputs(3, 5000)
    shifted = logits + scale
    got = fastrl.token_logprobs(shifted, tokens, entropy=True, impl=impl)
    grad = gradient(shifted, tokens, torch.ones(3), torch.ones(3), impl=impl)
    for x, y in zip(got, reference(shifted, tokens)):
        assert x is not None and y is not None
        assert_close(x, y, torch.float32)
    expected = gradient(shifted.double(), tokens, torch.ones(3), torch.ones(3), impl="reference")
    assert_close(grad, expected, torch.float32)

    # A difference of 1e4 between classes: certain, and the other class as improbable as it is.
    two = torch.tensor([[0.0, scale]])
    for token in (0, 1):
        sure = fastrl.token_logprobs(two, torch.tensor([token]), entropy=True, impl=impl)
        assert sure.logp.item() == min(0.0, -scale if token == 0 else scale)
        assert sure.entropy is not None and sure.entropy.item() == 0


@pytest.mark.parametrize("ends", [(-500.0, 500.0), (500.0, -500.0), (-3e38, 3e38)], ids=str)
def test_the_largest_logit_may_come_at_any_time(impl: str, ends: tuple[float, float]) -> None:
    """Logits that rise or fall over three tiles by more than the range of an exponential."""
    logits = torch.linspace(ends[0] / 2, ends[1] / 2, 9001)[None] * 2
    logits = torch.cat([logits, logits.roll(4500, -1)])
    tokens = (logits.argmax(-1) - 1).abs()
    got = fastrl.token_logprobs(logits, tokens, entropy=True, impl=impl)
    for x, y in zip(got, reference(logits, tokens)):
        assert x is not None and y is not None
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-5)
    grad = gradient(logits, tokens, torch.ones(2), torch.ones(2), impl=impl)
    expected = gradient(logits.double(), tokens, torch.ones(2), torch.ones(2), impl="reference")
    assert_close(grad, expected, torch.float32)


def test_equal_logits_are_uniform(impl: str) -> None:
    for value in (0.0, 1e4, -3e38):
        logits = torch.full((2, 5000), value)
        out = fastrl.token_logprobs(logits, torch.tensor([0, 4999]), entropy=True, impl=impl)
        assert out.entropy is not None
        torch.testing.assert_close(out.logp, torch.full((2,), -math.log(5000)))
        torch.testing.assert_close(out.entropy, torch.full((2,), math.log(5000)))
        grad = gradient(logits, torch.tensor([0, 1]), None, torch.ones(2), impl=impl)
        assert grad.abs().max() < 1e-8


def test_shift_invariance() -> None:
    """Adding 256 to logits that are multiples of 1/256 is exact, so nothing may change at all."""
    logits, tokens = inputs(3, 9000)
    logits = (logits * 256).round() / 256
    a = fastrl.token_logprobs(logits, tokens, entropy=True, impl="cpu")
    b = fastrl.token_logprobs(logits + 256, tokens, entropy=True, impl="cpu")
    for x, y in zip(a, b):
        assert x is not None and y is not None
        assert same_bits(x, y)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_row_that_is_not_finite_affects_only_itself(impl: str, bad: float) -> None:
    """Anywhere in the row, behind or before impossible classes; values and gradients."""
    clean, tokens = inputs(6, 9000)
    for at in (0, 4095, 8191, 8999):
        logits = clean.clone()
        logits[2, :8192] = -INF
        logits[2, at] = bad
        logits[4, at] = bad
        logits[5] = -INF  # no class is possible
        got = fastrl.token_logprobs(logits, tokens, entropy=True, impl=impl)
        grad = gradient(logits, tokens, torch.ones(6), torch.ones(6), impl=impl)
        for row in (2, 4, 5):
            assert got.logp[row].isnan() and got.entropy is not None and got.entropy[row].isnan()
            assert grad[row].isnan().any()
        fine = [0, 1, 3]
        expected = fastrl.token_logprobs(clean, tokens, entropy=True, impl=impl)
        for x, y in zip(got, expected):
            assert x is not None and y is not None
            assert same_bits(x[fine], y[fine])
        assert grad[fine].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 7), (2, 0, 7), (0, 3, 1)])
def test_no_rows(impl: str, shape: tuple[int, ...]) -> None:
    logits = torch.zeros(shape, requires_grad=True)
    out = fastrl.token_logprobs(
        logits, torch.zeros(shape[:-1], dtype=torch.long), entropy=True, impl=impl
    )
    assert out.entropy is not None
    assert out.logp.shape == out.entropy.shape == shape[:-1]
    (out.logp.sum() + out.entropy.sum()).backward()
    assert logits.grad is not None and logits.grad.shape == shape


def test_one_class_is_certain(impl: str) -> None:
    logits = torch.randn(5, 1)
    zeros = torch.zeros(5, dtype=torch.long)
    out = fastrl.token_logprobs(logits, zeros, entropy=True, impl=impl)
    assert out.entropy is not None
    assert (out.logp == 0).all() and (out.entropy == 0).all()
    assert (gradient(logits, zeros, torch.ones(5), torch.ones(5), impl=impl) == 0).all()


def test_a_single_row_without_a_batch(impl: str) -> None:
    logits, tokens = inputs(1, 50)
    out = fastrl.token_logprobs(logits[0], tokens[0], impl=impl)
    assert out.logp.dim() == 0 and out.entropy is None
    assert same_bits(out.logp, fastrl.token_logprobs(logits, tokens, impl=impl).logp[0])
