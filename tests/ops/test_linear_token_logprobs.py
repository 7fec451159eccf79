"""``fastrl.linear_token_logprobs``: hand-worked values, every option against the definition in float64, accuracy beside eager
torch, and faults that were reported of other fused heads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fastrl
from tests.helpers import DTYPES, leaf, same_bits
from tests.ops.heads import (
    Head,
    assert_close,
    error,
    exact,
    head,
    log_probs,
    mask_on_a_device,
    values_and_gradients,
)

INF, NAN = float("inf"), float("nan")
IMPLEMENTATIONS = ("auto", "reference")


def test_hand_worked_values(impl: str) -> None:
    """The states are the logarithms of odds 1 : 2 : 5 and of 1 : 1 : 2; weight is the identity."""
    hidden = torch.tensor([[1.0, 2.0, 5.0], [1.0, 1.0, 2.0]]).log()
    out = fastrl.linear_token_logprobs(
        hidden, torch.eye(3), torch.tensor([1, 2]), entropy=True, impl=impl
    )
    assert out.entropy is not None
    first = -(math.log(1 / 8) / 8 + math.log(1 / 4) / 4 + math.log(5 / 8) * 5 / 8)
    torch.testing.assert_close(out.logp, torch.tensor([1 / 4, 1 / 2]).log())
    torch.testing.assert_close(out.entropy, torch.tensor([first, 1.5 * math.log(2)]))


def test_hand_worked_gradient(impl: str) -> None:
    """One state of 1, weight (0, ln 3): p = 1/4, 3/4, so d logp_0 / d logits = (3/4, -3/4)."""
    hidden, weight = leaf(torch.ones(1, 1)), leaf(torch.tensor([[1.0], [3.0]]).log())
    out = fastrl.linear_token_logprobs(hidden, weight, torch.tensor([0]), impl=impl)
    assert out.entropy is None
    out.logp.sum().backward()
    torch.testing.assert_close(weight.grad, torch.tensor([[0.75], [-0.75]]))
    torch.testing.assert_close(hidden.grad, torch.tensor([[-0.75 * math.log(3)]]))


def test_hand_worked_cap_scale_and_low_rank_term(impl: str) -> None:
    """tanh(x) = 1/2 at x = ln(3) / 2, so a logit of ln 3 with scale 1/2 and cap 1 is 1/2; the other logit is 0."""
    options: dict[str, Any] = {"softcap": 1.0, "logit_scale": 0.5, "impl": impl}
    log3, one = math.log(3), torch.ones(1, 1)
    token = torch.tensor([0])
    expected = -math.log(1 + math.exp(-0.5))
    plain = fastrl.linear_token_logprobs(one, torch.tensor([[log3], [0.0]]), token, **options)
    assert plain.logp.item() == pytest.approx(expected, abs=1e-6)
    low_rank = fastrl.linear_token_logprobs(
        *(one, torch.zeros(2, 1), token),
        lora_a=2 * one,
        lora_b=torch.tensor([[log3], [0.0]]),
        lora_scale=0.5,
        **options,
    )
    assert low_rank.logp.item() == pytest.approx(expected, abs=1e-6)


# States, width, vocabulary: none and one, odd everywhere, the vocabularies of three model families.
SIZES = [
    *((5, 17, 1), (1, 1, 7), (0, 3, 7), (33, 17, 1030)),
    *((3, 33, 49152), (5, 17, 50257), (2, 9, 151936)),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_definition(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, width, vocabulary = size
    h = head((rows,), width, vocabulary, dtype, bias=True)
    if rows:
        h.tokens[0] = vocabulary - 1
    got = values_and_gradients(h, chunk=2)
    # Torch adds up a product over 151936 classes in one chain, with as large an error in eager code.
    assert_close(got, exact(h), dtype, factor=5 if vocabulary > 100_000 else 1)
    assert got[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert all(g.dtype == dtype for g in got[2:])


OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "temperature_per_token": {"temperature": torch.linspace(0.3, 2, 15).view(3, 5)},
    "scale": {"logit_scale": 0.4, "temperature": 1.3},
    "cap": {"softcap": 1.5},
    "cap_scale_temperature": {"softcap": 2.0, "logit_scale": 3.0, "temperature": 0.7},
    "padding": {"vocab_size": 50},
    "mask": {"mask": torch.arange(15).view(3, 5) % 4 != 1},
    "float_mask": {"mask": (torch.arange(15).view(3, 5) % 4 == 1).float()},
    "nothing_valid": {"mask": torch.zeros(3, 5)},
    "allowed": {"allowed": torch.arange(57).expand(3, 5, 57) % 3 != 1},
    "allowed_ids": {"allowed": torch.arange(75).view(3, 5, 5) % 37 - 1},
}
OPTIONS["everything"] = {
    **OPTIONS["cap_scale_temperature"],
    **OPTIONS["temperature_per_token"],
    **OPTIONS["mask"],
    **OPTIONS["allowed"],
    **OPTIONS["padding"],
}


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_against_definition(name: str, chunk: int | None) -> None:
    h = head((3, 5), 9, 57, bias=True, rank=3)
    options = OPTIONS[name] | {"lora_scale": 0.7}
    h.tokens.copy_(torch.arange(15).view(3, 5) * 3 % 50)
    if name in ("allowed", "everything"):
        h.tokens.fill_(3)
    if name == "allowed_ids":
        h.tokens.copy_(OPTIONS[name]["allowed"][..., 1])
    expected = exact(h, **options)
    assert_close(values_and_gradients(h, chunk=chunk, **options), expected, torch.float32)
    with mask_on_a_device():
        got = values_and_gradients(h, chunk=chunk, **options)
    assert_close(got, expected, torch.float32)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(0, 9),
    width=st.integers(1, 9),
    vocabulary=st.integers(1, 70),
    chunk=st.integers(1, 10),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
    seed=st.integers(0, 2**31),
)
def test_any_head_against_definition(
    rows: int, width: int, vocabulary: int, chunk: int, scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    h = head((rows,), width, vocabulary, torch.float64, bias=True, rank=2, scale=scale)
    options: dict[str, Any] = {"mask": torch.rand(rows) < 0.7, "temperature": 0.8}
    got = values_and_gradients(h, chunk=chunk, **options)
    for x, y in zip(got, exact(h, **options)):
        torch.testing.assert_close(x, y, atol=1e-9, rtol=1e-9)


def test_gradcheck() -> None:
    h = head((4,), 3, 7, torch.float64, bias=True, rank=2).fresh()

    def call(hidden: Tensor, weight: Tensor, *others: Tensor) -> Any:
        found = Head(hidden, weight, h.tokens, *others)
        return log_probs(found, softcap=3.0, lora_scale=0.5, temperature=0.7, chunk=3)

    assert torch.autograd.gradcheck(call, h.leaves())


# ---- classes that cannot be chosen ---------------------------------------------------------------------------------


def test_padded_classes_count_for_nothing() -> None:
    """Reported of verl (#2899): rows of zeros behind the vocabulary entered the normaliser."""
    h = head((6,), 8, 64)
    padded = h._replace(weight=torch.cat([h.weight, torch.zeros(13, 8)]))
    got = values_and_gradients(padded, vocab_size=64)
    expected = values_and_gradients(h)
    for x, y in zip(got[:3], expected[:3]):
        assert same_bits(x, y)
    assert same_bits(got[3][:64], expected[3]) and (got[3][64:] == 0).all()
    by_bias = torch.cat([torch.zeros(64), torch.full((13,), -INF)])
    masked = values_and_gradients(padded._replace(bias=by_bias))
    assert_close(masked[:4], [*expected[:3], got[3]], torch.float32)


def test_renormalised_sampling() -> None:
    """top-k kept sets: finite values and gradients (TRL #7221, SkyRL #2259), the softmax over the kept classes alone."""
    h = head((6,), 8, 40)
    logits = h.hidden @ h.weight.t()
    kept = logits.topk(5).indices
    h.tokens.copy_(kept[:, 2])
    mask = torch.zeros(6, 40, dtype=torch.bool).scatter_(1, kept, True)
    by_ids = values_and_gradients(h, allowed=torch.cat([kept, torch.full((6, 3), -1)], 1))
    by_mask = values_and_gradients(h, allowed=mask)
    for x, y in zip(by_ids, by_mask):
        assert same_bits(x, y) and x.isfinite().all()
    few = logits.gather(1, kept).log_softmax(-1)
    torch.testing.assert_close(by_ids[0], few[:, 2])
    torch.testing.assert_close(by_ids[1], -(few.exp() * few).sum(-1))


def test_a_token_outside_of_the_kept_classes() -> None:
    """Its logp is -inf, as in a dense softmax; its logit was replaced, so it has no gradient of its own."""
    h = head((2,), 4, 10)
    h.tokens.copy_(torch.tensor([3, 4]))
    allowed = torch.arange(10).expand(2, 10) != 3
    got = values_and_gradients(h, (torch.ones(2), torch.ones(2)), allowed=allowed)
    assert got[0][0] == -INF and got[0][1].isfinite() and got[1].isfinite().all()
    expected = exact(h, (torch.ones(2), torch.ones(2)), allowed=allowed)
    assert_close(got[2:], expected[2:], torch.float32)
    assert (got[3][3] == 0).all()


def test_logp_is_never_positive() -> None:
    """Reported of verl (#2656): values up to +123. Rows of every sharpness, the target on the peak."""
    hidden = torch.randn(500, 8) * torch.logspace(-2, 3, 500)[:, None]
    for dtype in (torch.float32, torch.bfloat16):
        h = head((500,), 8, 50, dtype)._replace(hidden=hidden.to(dtype))
        h.tokens.copy_((h.hidden @ h.weight.t()).argmax(-1))
        out = log_probs(h)
        assert out.entropy is not None
        assert (out.logp <= 0).all() and (out.entropy >= 0).all()


def test_a_row_that_is_not_finite_affects_no_other_row() -> None:
    h = head((5,), 4, 30)
    expected = log_probs(h)
    h.hidden[2, 1] = NAN
    got = log_probs(h)
    assert got.entropy is not None and expected.entropy is not None
    assert got.logp[2].isnan() and got.entropy[2].isnan()
    rest = [0, 1, 3, 4]
    assert same_bits(got.logp[rest], expected.logp[rest])
    assert same_bits(got.entropy[rest], expected.entropy[rest])


# ---- accuracy ------------------------------------------------------------------------------------------------------


def _eager(h: Head, g: Tensor, k: Tensor) -> list[Tensor]:
    """What trainers write: logits in the dtype of the model, everything behind them in float32."""
    h = h.fresh()
    log_p = F.linear(h.hidden, h.weight).float().log_softmax(-1)
    logp = log_p.gather(-1, h.tokens[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    gradients = torch.autograd.grad((logp * g + entropy * k).sum(), h.leaves())
    return [logp.detach(), entropy.detach(), *gradients]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_is_no_worse_than_eager(dtype: torch.dtype) -> None:
    """Root mean square errors against float64, with the chunk that fastrl chooses and with many small ones."""
    h = head((600,), 64, 2000, dtype)
    upstream = torch.randn(600), torch.randn(600)
    expected = exact(h, upstream)

    def errors(got: list[Tensor]) -> list[float]:
        return [(x.double() - y).square().mean().sqrt().item() for x, y in zip(got, expected)]

    theirs = errors(_eager(h, *upstream))
    # On CPU a chunk's product is rounded to bfloat16 before it is added: a little, where there are many chunks.
    for chunk, factor in ((None, 1.01), (16, 1.1)):
        ours = errors(values_and_gradients(h, upstream, chunk=chunk))
        for mine, other in zip(ours, theirs):
            assert mine <= factor * other


def test_the_gradient_of_the_weight_is_summed_in_float32() -> None:
    """Reported of Liger-Kernel (#1391): a bfloat16 sum over chunks is off by more with every chunk."""
    h = head((1024,), 16, 40, torch.bfloat16)
    expected = exact(h, (torch.ones(1024), None))[3]

    def found(chunk: int, accumulate: str) -> float:
        got = values_and_gradients(h, (torch.ones(1024), None), chunk=chunk, accumulate=accumulate)[
            3
        ]
        assert got.dtype == torch.bfloat16
        return (got.double() - expected).square().mean().sqrt().item()

    whole = found(1024, "float32")
    assert found(4, "float32") < 1.3 * whole
    assert found(4, "weight") > 3 * whole


def test_float16_on_cpu_computes_in_float32() -> None:
    """Logits beyond 65504 are finite; only the gradients are rounded."""
    h = head((4,), 8, 30, torch.float16, scale=3000.0)
    h = h._replace(hidden=h.hidden * 100)
    got, expected = values_and_gradients(h), exact(h)
    assert (h.hidden.float() @ h.weight.float().t()).abs().max() > 65504
    assert error(got[0], expected[0]) < 1e-5 and got[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_chunk_changes_rounding_alone(dtype: torch.dtype) -> None:
    h = head((70,), 24, 300, dtype, bias=True)
    whole = values_and_gradients(h, chunk=70)
    for chunk in (1, 16, 69, 1000):
        assert_close(values_and_gradients(h, chunk=chunk), whole, dtype)
    for _ in range(2):
        for x, y in zip(values_and_gradients(h, chunk=16), values_and_gradients(h, chunk=16)):
            assert same_bits(x, y)
