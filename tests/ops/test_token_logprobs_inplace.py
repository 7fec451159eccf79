"""``fastrl.token_logprobs_``: the gradient over the logits, and what autograd makes of logits that are gone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fastrl
from fastrl.ops.token_logprobs.op import (
    token_logprobs_backward_inplace_op,
    token_logprobs_backward_op,
    token_logprobs_op,
)
from tests.helpers import DTYPES, leaf, same_bits
from tests.ops.logprobs import gradient, inputs


def overwritten(logits: Tensor, tokens: Tensor, g: Tensor, h: Tensor, impl: str) -> Tensor:
    """Gradient of a leaf whose copy is the logits; the copy must end as that gradient."""
    x = leaf(logits)
    copy = x.clone()
    out = fastrl.token_logprobs_(copy, tokens, temperature=0.8, entropy=True, impl=impl)
    assert out.entropy is not None
    ((out.logp * g).sum() + (out.entropy * h).sum()).backward()
    assert x.grad is not None
    if impl != "reference":
        assert same_bits(copy.detach(), x.grad)
    assert same_bits(x.detach(), logits)
    return x.grad


def test_hand_worked(impl: str) -> None:
    """p = 1/4, 3/4: d logp_0 = (3/4, -3/4), and that is what the logits hold afterwards."""
    logits = torch.tensor([[1.0, 3.0]], requires_grad=True).log()
    fastrl.token_logprobs_(logits, torch.tensor([0]), impl=impl).logp.sum().backward()
    expected = [0.75, -0.75] if impl != "reference" else torch.tensor([1.0, 3.0]).log().tolist()
    assert logits.detach()[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 5, 17, 1023, 4099])
def test_same_bits_as_a_gradient_of_its_own(impl: str, vocabulary: int, dtype: torch.dtype) -> None:
    """Rows of odd size, so that each starts at another alignment; rows without upstream gradient among them."""
    logits, tokens = inputs(5, vocabulary, dtype)
    tokens[1] = vocabulary - 1
    g, h = torch.tensor([1.0, -0.5, 0.0, 2.0, 0.0]), torch.tensor([0.0, 1.0, 0.0, -1.0, 0.5])
    expected = gradient(logits, tokens, g, h, temperature=0.8, impl=impl)
    assert same_bits(overwritten(logits, tokens, g, h, impl), expected)


def test_a_slice_is_overwritten_and_nothing_beside_it(impl: str) -> None:
    whole = torch.randn(2, 4, 9)
    x = leaf(whole)
    logits, tokens = x * 1, torch.randint(0, 9, (2, 3))
    fastrl.token_logprobs_(logits[:, :-1], tokens, impl=impl).logp.sum().backward()
    expected = gradient(whole[:, :-1], tokens, torch.ones(2, 3), None, impl=impl)
    assert x.grad is not None and same_bits(x.grad[:, :-1], expected)
    assert same_bits(logits.detach()[:, -1], whole[:, -1])
    if impl != "reference":
        assert same_bits(logits.detach()[:, :-1], expected)


def test_whoever_kept_the_logits_is_told(impl: str) -> None:
    if impl == "reference":
        return  # it overwrites nothing
    tokens = torch.tensor([1, 2])
    x = torch.randn(2, 5, requires_grad=True)
    logits = x * 1
    first = fastrl.token_logprobs_(logits, tokens, impl=impl).logp.sum()
    other = fastrl.token_logprobs(logits, tokens, impl=impl).logp.sum()
    own = (logits * logits).sum()
    first.backward(retain_graph=True)
    for later in (other, own, first):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            later.backward(retain_graph=True)

    capped = torch.tanh(x)  # its backward needs its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fastrl.token_logprobs_(capped, tokens, impl=impl).logp.sum().backward()


def test_without_a_gradient_nothing_is_written(impl: str) -> None:
    logits, tokens = inputs(3, 7)
    before = logits.clone()
    out = fastrl.token_logprobs_(logits, tokens, impl=impl)
    assert not out.logp.requires_grad and same_bits(logits, before)
    assert same_bits(out.logp, fastrl.token_logprobs(logits, tokens, impl=impl).logp)
    with torch.no_grad():
        assert not fastrl.token_logprobs_(leaf(logits), tokens, impl=impl).logp.requires_grad


def test_logits_that_cannot_be_overwritten_are_refused(impl: str) -> None:
    x, tokens = torch.randn(2, 3, 4, requires_grad=True), torch.zeros(2, 3, dtype=torch.long)
    for bad, message in (
        (x, "token_logprobs_: logits_ must be the result of an operation, got a leaf"),
        ((x[:1] * 1).expand(2, 3, 4), "no element twice"),
        ((x * 1).transpose(1, 2).contiguous().transpose(1, 2), "unit stride along V"),
    ):
        with pytest.raises(ValueError, match=message):
            fastrl.token_logprobs_(bad, tokens, impl=impl)
    odd = (torch.randn(2, 3, 2, 9, requires_grad=True) * 1)[..., :1, :4]
    with pytest.raises(ValueError, match="at most three dimensions"):
        fastrl.token_logprobs_(odd, tokens[..., None], impl=impl)


def test_compiled_it_allocates() -> None:
    """A trace takes the ordinary gradient: the same numbers."""
    tokens = torch.tensor([1, 2])

    def loss(x: Tensor) -> Tensor:
        return fastrl.token_logprobs_(x * 2, tokens).logp.sum()

    x = torch.randn(2, 5, requires_grad=True)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(x), x)[0]
    torch.testing.assert_close(got, torch.autograd.grad(loss(x), x)[0])


def test_tokens_out_of_range_on_a_device(impl: str) -> None:
    """Nobody checks them there: their rows give NaN, but for a row without upstream gradient of logp."""
    if impl in ("reference", "cpu"):
        return  # they raise: test_errors_name_op_argument_expected_got_and_remedy
    for vocabulary in (7, 3000):
        logits, tokens = inputs(5, vocabulary)
        bad = tokens.clone()
        bad[1], bad[2], bad[3] = vocabulary, -100, 2**40
        logp, entropy, statistics = token_logprobs_op[impl](logits, bad, None, 1.0, True)
        expected = token_logprobs_op[impl](logits, tokens, None, 1.0, True)
        assert logp.isnan().tolist() == [False, True, True, True, False]
        assert same_bits(entropy, expected[1]) and same_bits(statistics, expected[2])
        g, h = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0])
        grad = token_logprobs_backward_op[impl](g, h, logits, bad, None, 1.0, statistics)
        assert grad[1].isnan().all() and (grad[2] == 0).all() and grad[3].isfinite().all()
        same = token_logprobs_backward_op[impl](g, h, logits, tokens, None, 1.0, statistics)
        assert same_bits(grad[[0, 3, 4]], same[[0, 3, 4]])


def test_opcheck() -> None:
    logits, tokens = inputs(4, 20)
    statistics = token_logprobs_op["cpu"](logits, tokens, None, 0.7, True)[2]
    arguments = (torch.randn(4), torch.randn(4), logits, tokens, None, 0.7, statistics)
    torch.library.opcheck(token_logprobs_backward_inplace_op["cpu"], arguments)


def test_direct_calls_of_the_operator_are_checked() -> None:
    logits, tokens = inputs(4, 20)
    statistics = token_logprobs_op["cpu"](logits, tokens, None, 1.0, True)[2]
    columns = logits.t().contiguous().t()
    with pytest.raises(RuntimeError, match="in place, logits must have unit stride"):
        token_logprobs_backward_inplace_op["cpu"](
            *(torch.ones(4), None, columns, tokens, None, 1.0, statistics)
        )
