"""Rules of ``fastrl.linear_token_logprobs``: masks, upstream gradients, memory, products, tracing, autocast, checkpoints,
errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fastrl
from fastrl.ops.linear_token_logprobs import op, projection
from tests.helpers import leaf, same_bits, with_threads
from tests.ops.heads import (
    Head,
    assert_close,
    exact,
    head,
    log_probs,
    mask_on_a_device,
    peak_bytes,
    products,
    values_and_gradients,
)

NAN = float("nan")


def test_masked_rows_influence_nothing() -> None:
    """NaN states and tokens outside of the vocabulary change no bit, and their gradients are exactly 0."""
    h = head((40,), 8, 100, bias=True, rank=2)
    mask = torch.rand(40) < 0.5
    expected = values_and_gradients(h, mask=mask, chunk=7)
    h.hidden[~mask] = NAN
    h.tokens[~mask] = -100
    got = values_and_gradients(h, mask=mask, chunk=7)
    for x, y in zip(got, expected):
        assert same_bits(x, y)
    for x in got[:3]:
        assert (x[~mask] == 0).all() and (x[mask] != 0).any()
    with mask_on_a_device():
        hidden = values_and_gradients(h, mask=mask, chunk=7)
    assert_close(hidden, got, torch.float32)
    assert (hidden[2][~mask] == 0).all()


def test_masked_rows_cost_no_products() -> None:
    h = head((64,), 8, 100)
    mask = torch.arange(64) % 4 == 0
    sizes = products(lambda: values_and_gradients(h, mask=mask))
    assert sizes == [(16, 8, 100), (16, 8, 100), (100, 16, 8), (16, 100, 8)]


def test_upstream_gradients_of_any_kind() -> None:
    """Uneven, expanded, strided, zero, of one output alone (reported of TransformerEngine, #409)."""
    h = head((12,), 8, 50)
    for upstream in [
        (torch.randn(12), torch.randn(12)),
        (torch.tensor(0.3).expand(12), None),
        (None, torch.randn(24)[::2]),
        (torch.randn(12, 2)[:, 1], torch.tensor(-1.0).expand(12)),
        (torch.zeros(12), torch.randn(12)),
    ]:
        got = values_and_gradients(h, upstream, chunk=5)
        assert_close(got, exact(h, upstream), torch.float32)
    nothing = values_and_gradients(h, (torch.zeros(12), None), chunk=5)
    assert all((x == 0).all() for x in nothing[2:])


def test_only_what_needs_a_gradient_gets_one() -> None:
    """A frozen head costs two products fewer and no memory of its size; a frozen trunk one fewer."""
    h = head((64,), 8, 100)
    expected = values_and_gradients(h, (torch.ones(64), None))

    def run(hidden: Tensor, weight: Tensor) -> None:
        log_probs(Head(hidden, weight, h.tokens), entropy=False).logp.sum().backward()

    hidden, weight = leaf(h.hidden), leaf(h.weight)
    forward = (64, 8, 100)
    assert products(lambda: run(hidden, h.weight)) == [forward, forward, (64, 100, 8)]
    assert products(lambda: run(h.hidden, weight)) == [forward, forward, (100, 64, 8)]
    torch.testing.assert_close(hidden.grad, expected[2])
    torch.testing.assert_close(weight.grad, expected[3])
    with torch.no_grad():
        assert not log_probs(h.fresh()).logp.requires_grad
    assert not log_probs(h).logp.requires_grad


def test_inputs_are_left_alone_and_other_users_of_the_states_too() -> None:
    """Reported of Liger-Kernel (#272): a gradient written over logits or states corrupted a second head."""
    h = head((20,), 8, 60).fresh()
    before = [x.detach().clone() for x in h.leaves()]
    second = nn.Linear(8, 3)
    states = h.hidden * 1
    loss = log_probs(h._replace(hidden=states), entropy=False).logp.sum()
    other = second(states).square().sum()
    together = torch.autograd.grad(loss + other, h.hidden, retain_graph=True)[0]
    alone = torch.autograd.grad(loss, h.hidden, retain_graph=True)[0]
    again = torch.autograd.grad(loss, h.hidden, retain_graph=True)[0]
    torch.testing.assert_close(together - alone, torch.autograd.grad(other, h.hidden)[0])
    assert same_bits(alone, again)
    assert all(same_bits(x.detach(), y) for x, y in zip(h.leaves(), before))


def test_a_weight_changed_in_place_is_noticed() -> None:
    h = head((4,), 8, 60).fresh()
    loss = log_probs(h, entropy=False).logp.sum()
    with torch.no_grad():
        h.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tied_embedding() -> None:
    """One parameter as embedding and head: the two gradients add up."""
    embedding = nn.Embedding(30, 8)
    ids, tokens = torch.randint(0, 30, (2, 6)), torch.randint(0, 30, (2, 6))

    def gradient(impl: str) -> Tensor:
        hidden = torch.tanh(embedding(ids))
        out = fastrl.linear_token_logprobs(hidden, embedding.weight, tokens, impl=impl)
        return torch.autograd.grad(out.logp.sum(), embedding.weight)[0]

    torch.testing.assert_close(gradient("auto"), gradient("reference"))


def test_strides_do_not_matter() -> None:
    h = head((3, 5), 8, 60)
    expected = values_and_gradients(h)
    for layout in (
        h._replace(hidden=h.hidden.transpose(0, 1).contiguous().transpose(0, 1)),
        h._replace(hidden=torch.cat([h.hidden, h.hidden], -1)[..., :8]),
        h._replace(weight=h.weight.t().contiguous().t()),
    ):
        assert_close(values_and_gradients(layout), expected, torch.float32)
    sliced = fastrl.linear_token_logprobs(h.hidden[:, :-1], h.weight, h.tokens[:, 1:]).logp
    rows = h.hidden[:, :-1].reshape(-1, 8), h.weight, h.tokens[:, 1:].reshape(-1)
    assert same_bits(sliced.flatten(), fastrl.linear_token_logprobs(*rows).logp)


def test_same_bits_for_any_number_of_threads() -> None:
    """Beyond what the products of torch do, which is why one of them is small enough for one thread."""
    h = head((7,), 4, 50)

    def run() -> Tensor:
        return torch.cat([x.flatten() for x in values_and_gradients(h, chunk=3)])

    assert same_bits(with_threads(1, run), with_threads(2, run))


# ---- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_memory_is_a_chunk_and_the_gradients(dtype: torch.dtype) -> None:
    """2048 rows of 8192 logits: eager holds several of 67 MB; here 128 of them at a time, and results."""
    h = head((2048,), 16, 8192, dtype).fresh()
    chunk, weight = 128 * 8192 * dtype.itemsize, 8192 * 16 * 4

    def ours() -> object:
        out = log_probs(h, chunk=128)
        assert out.entropy is not None
        return torch.autograd.grad((out.logp + out.entropy).sum(), h.leaves())

    def eager() -> object:
        log_p = (h.hidden @ h.weight.t()).float().log_softmax(-1)
        logp = log_p.gather(-1, h.tokens[:, None])
        entropy = -(log_p.exp() * log_p).sum(-1)
        return torch.autograd.grad(logp.sum() + entropy.sum(), h.leaves())

    peak = peak_bytes(ours)
    assert chunk < peak < 1.2 * (chunk + 2 * weight) + 200_000
    assert 8 * peak <= peak_bytes(eager)


def test_the_chunk_follows_from_a_budget() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for vocabulary, dtype in ((151936, torch.float32), (49152, torch.bfloat16), (7, torch.float32)):
        row = vocabulary * dtype.itemsize
        rows = projection._chunk_rows(vocabulary, dtype, cpu)
        assert rows * row <= 64 << 20 < (rows + 128) * row
        assert projection._chunk_rows(vocabulary, dtype, gpu) * row <= 1 << 30
    assert projection._chunk_rows(10**9, torch.float32, cpu) == 16  # never next to nothing


def test_beyond_2_to_the_31_elements() -> None:
    """Reported of TRL (#7266): offsets of 32 bits. Shapes come out right where rows times classes pass 2^31."""
    with FakeTensorMode():
        hidden = torch.empty(8, 4096, 64, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(151936, 64, dtype=torch.bfloat16, requires_grad=True)
        tokens = torch.empty(8, 4096, dtype=torch.long)
        assert tokens.numel() * len(weight) > 2**31
        out = fastrl.linear_token_logprobs(hidden, weight, tokens, entropy=True)
        assert out.entropy is not None and out.logp.shape == out.entropy.shape == (8, 4096)
        (out.logp + out.entropy).sum().backward()
        assert hidden.grad is not None and hidden.grad.shape == hidden.shape
        assert weight.grad is not None and weight.grad.dtype == torch.bfloat16


# ---- around torch --------------------------------------------------------------------------------------------------


def test_opcheck() -> None:
    h = head((5,), 4, 11, bias=True, rank=2)
    mask, temperatures = torch.tensor([1, 0, 1, 1, 1]), torch.rand(5) + 0.5
    common = (
        *(h.hidden, h.weight, h.tokens, h.bias, h.lora_a, h.lora_b, mask, temperatures, None),
        *([1.0, 0.5, 3.0, 0.7], [2, 0, 11], "", None, True),
    )
    torch.library.opcheck(op.linear_token_logprobs_op["cpu"], (*common, True))
    statistics = op.linear_token_logprobs_op["cpu"](*common, True)[2]
    for needs in ([True] * 5, [True, False, False, True, False]):
        torch.library.opcheck(
            op.linear_token_logprobs_backward_op["cpu"],
            (torch.randn(5), torch.randn(5), statistics, *common, needs),
        )


def test_compile_fullgraph_with_dynamic_shapes() -> None:
    compiles = CompileCounter()

    def loss(hidden: Tensor, weight: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        out = fastrl.linear_token_logprobs(
            hidden, weight, tokens, mask=mask, temperature=0.8, entropy=True, chunk=4
        )
        assert out.entropy is not None
        return out.logp.sum() + (out.entropy * out.entropy).sum()

    torch._dynamo.reset()
    counted = torch.compile(loss, fullgraph=True, dynamic=True, backend=compiles)
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, length in ((2, 5), (3, 4), (4, 9)):
        h = head((rows, length), 6, 30).fresh()
        mask = torch.rand(rows, length) < 0.6
        arguments = (h.hidden, h.weight, h.tokens, mask)
        counted(*arguments)
        got = torch.autograd.grad(compiled(*arguments), h.leaves())
        for x, y in zip(got, torch.autograd.grad(loss(*arguments), h.leaves())):
            torch.testing.assert_close(x, y)
    assert compiles.frame_count == 1


def test_autocast_computes_in_its_dtype_and_keeps_float32_gradients() -> None:
    """The same as bfloat16 copies, except that the gradient of the weight is never rounded to bfloat16."""
    h = head((50,), 16, 200)
    rounded = Head(h.hidden.bfloat16(), h.weight.bfloat16(), h.tokens)
    expected = values_and_gradients(rounded, chunk=16)
    with torch.autocast("cpu", torch.bfloat16):
        got = values_and_gradients(h, chunk=16)
        nested = fastrl.linear_token_logprobs(h.hidden.double(), h.weight.double(), h.tokens).logp
    assert same_bits(got[0], expected[0]) and same_bits(got[1], expected[1])
    assert got[2].dtype == got[3].dtype == torch.float32 and nested.dtype == torch.float64
    assert same_bits(got[3].bfloat16(), expected[3]) and not same_bits(got[3], expected[3].float())
    mixed = head((4,), 8, 20)
    with torch.autocast("cpu", torch.bfloat16):
        log_probs(mixed._replace(hidden=mixed.hidden.bfloat16()))


def test_activation_checkpointing() -> None:
    h = head((20,), 8, 60).fresh()
    layer = nn.Linear(8, 8)

    def block(hidden: Tensor) -> Tensor:
        states = torch.tanh(layer(hidden))
        return log_probs(h._replace(hidden=states), entropy=False).logp.sum()

    expected = torch.autograd.grad(block(h.hidden), [*h.leaves(), layer.weight])
    for reentrant in (False, True):
        loss = checkpoint(block, h.hidden, use_reentrant=reentrant)
        assert isinstance(loss, Tensor)
        for x in (*h.leaves(), layer.weight):
            x.grad = None
        loss.backward()
        for x, y in zip((*h.leaves(), layer.weight), expected):
            assert x.grad is not None and same_bits(x.grad, y)


def test_second_derivatives_are_refused() -> None:
    """A gradient penalty raises instead of being silently 0; the definition has one."""
    h = head((4,), 8, 20).fresh()
    loss = log_probs(h, entropy=False).logp.sum()
    gradient = torch.autograd.grad(loss, h.hidden, create_graph=True)[0]
    torch.testing.assert_close(gradient.detach(), values_and_gradients(h, (torch.ones(4), None))[2])
    with pytest.raises(RuntimeError, match=r"linear_token_logprobs: only first-order.*reference"):
        gradient.square().sum().backward()
    loss = log_probs(h, entropy=False, impl="reference").logp.sum()
    torch.autograd.grad(loss, h.hidden, create_graph=True)[0].square().sum().backward()


def test_errors_name_op_argument_expected_got_and_remedy() -> None:
    h = head((2, 5), 4, 7)
    hidden, weight, tokens = h[:3]
    call: Any = fastrl.linear_token_logprobs
    cases: list[tuple[str, Any]] = [
        (r"weight must be \[V, H\].*got \[28\]; a flat shard of FSDP", lambda: call(hidden, weight.flatten(), tokens)),
        (r"hidden must be \[..., H\] with H = 4.*got \[2, 5, 3\]", lambda: call(hidden[..., :3], weight, tokens)),
        (r"weight must have the dtype of hidden.*got torch.bfloat16; convert", lambda: call(hidden, weight.bfloat16(), tokens)),
        (r"hidden must be float32.*got torch.int64", lambda: call(hidden.long(), weight, tokens)),
        (r"tokens must be integers, got torch.float32; pass tokens.long\(\)", lambda: call(hidden, weight, tokens.float())),
        (r"tokens must have the shape of hidden.*pass hidden\[:, :-1\]", lambda: call(hidden, weight, tokens[:, 1:])),
        (r"tokens must be in \[0, V\) = \[0, 7\), got 7; mask", lambda: call(hidden, weight, tokens * 0 + 7)),
        (r"tokens must be in \[0, V\) = \[0, 5\), got 5", lambda: call(hidden, weight, tokens * 0 + 5, vocab_size=5)),
        (r"bias must have the shape of the classes of weight, \[7\]", lambda: call(hidden, weight, tokens, bias=torch.zeros(6))),
        (r"mask must have the shape of tokens", lambda: call(hidden, weight, tokens, mask=torch.ones(2, 4))),
        (r"temperature must be a finite number in \[1e-06, inf\], got 0", lambda: call(hidden, weight, tokens, temperature=0.0)),
        (r"temperature is a constant to the gradient", lambda: call(hidden, weight, tokens, temperature=torch.ones(2, 5, requires_grad=True))),
        (r"softcap must be greater than 0, got 0.0; pass None", lambda: call(hidden, weight, tokens, softcap=0.0)),
        (r"logit_scale must be greater than 0, got -1.0; pass 1.0", lambda: call(hidden, weight, tokens, logit_scale=-1)),
        (r"lora_b must be given too, got None", lambda: call(hidden, weight, tokens, lora_a=torch.ones(2, 4))),
        (r"lora_a and lora_b must be \[R, 4\] and \[7, R\], got \[2, 4\] and \[2, 7\]", lambda: call(hidden, weight, tokens, lora_a=torch.ones(2, 4), lora_b=torch.ones(2, 7))),
        (r"allowed must be bool .* or integer ids .*got torch.float32; pass allowed != 0", lambda: call(hidden, weight, tokens, allowed=torch.ones(2, 5, 7))),
        (r"allowed must be \[2, 5, 7\], got \[2, 5, 6\]", lambda: call(hidden, weight, tokens, allowed=torch.ones(2, 5, 6).bool())),
        (r"vocab_start must be at least 0 and needs process_group, got 3", lambda: call(hidden, weight, tokens, vocab_start=3)),
        (r"vocab_size must be at least 1, got 0", lambda: call(hidden, weight, tokens, vocab_size=0)),
        (r"chunk must be a number of rows, at least 1, got 0; pass None", lambda: call(hidden, weight, tokens, chunk=0)),
        (r"accumulate must be one of 'float32', 'weight', got 'bfloat16'", lambda: call(hidden, weight, tokens, accumulate="bfloat16")),
        (r"impl must be one of auto", lambda: call(hidden, weight, tokens, impl="fast")),
        (r"impl='cuda' cannot run", lambda: call(hidden, weight, tokens, impl="cuda")),
    ]  # fmt: skip
    for message, bad in cases:
        with pytest.raises(ValueError, match="linear_token_logprobs: .*" + message):
            bad()
    with pytest.raises(TypeError, match=r"weight must be a torch.Tensor, got list; wrap it"):
        call(hidden, [1.0], tokens)
