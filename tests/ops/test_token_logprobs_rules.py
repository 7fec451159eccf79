"""Rules of ``fastrl.token_logprobs``: memory layouts, upstream gradients, determinism, accuracy beside eager torch,
tracing, error messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import fastrl
from fastrl.ops.token_logprobs.op import (
    token_logprobs_backward_op,
    token_logprobs_op,
)
from tests.helpers import HALF_DTYPES, assert_close, leaf, same_bits, with_threads
from tests.ops.logprobs import gradient, inputs, reference

NAN = float("nan")

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice_of_time": lambda x: torch.cat([x, x[:, :1]], 1)[:, :-1],
    "slice_of_batch_and_time": lambda x: torch.cat([x, x], 0).repeat(1, 2, 1)[: len(x), ::2],
    "slice_of_classes": lambda x: torch.cat([x, x[..., :3]], -1)[..., :-3],
    "time_first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "classes_first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "every_second_class": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "misaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "four_dimensions": lambda x: x[:, None].transpose(1, 2),
    "three_strides": lambda x: x[None].repeat(2, 1, 2, 1)[:1, :, : x.shape[1]].transpose(0, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_layouts(impl: str, layout: str, dtype: torch.dtype) -> None:
    """The same bits from every layout of the same numbers, forward and backward."""
    dense = (torch.randn(3, 5, 37) * 3).to(dtype)
    dense[:, 1::2] = dense[:, :-1:2]
    if layout == "slice_of_batch_and_time":
        dense = dense[:, :1].expand(3, 5, 37).contiguous()
    view = LAYOUTS[layout](dense)
    same = view.contiguous().clone()
    tokens = torch.randint(0, 37, view.shape[:-1])
    assert same_bits(view, same)
    a = fastrl.token_logprobs(view, tokens, entropy=True, impl=impl)
    b = fastrl.token_logprobs(same, tokens, entropy=True, impl=impl)
    for x, y in zip(a, b):
        assert x is not None and y is not None
        if impl == "reference":  # torch sums in another order for another layout
            torch.testing.assert_close(x, y)
        else:
            assert same_bits(x, y)
    base = leaf(dense)
    g, h = torch.randn(tokens.shape), torch.randn(tokens.shape)
    out = fastrl.token_logprobs(LAYOUTS[layout](base), tokens, entropy=True, impl=impl)
    assert out.entropy is not None
    got = torch.autograd.grad((out.logp * g + out.entropy * h).sum(), base)[0]
    base = leaf(dense.double())
    expected = reference(LAYOUTS[layout](base), tokens)
    assert expected.entropy is not None
    expected_grad = torch.autograd.grad((expected.logp * g + expected.entropy * h).sum(), base)[0]
    # A view that repeats elements adds rounded gradients up.
    atol = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(
        got.double(), expected_grad, atol=atol, rtol=1e-5 if dtype == torch.float32 else 2e-2
    )


def test_expanded_logits_and_tokens(impl: str) -> None:
    """Stride 0 reads one row many times and its gradient is the sum."""
    row = torch.randn(40)
    tokens = torch.tensor([3, 5, 3])
    x, y = leaf(row), leaf(row)
    a = fastrl.token_logprobs(x.expand(3, 40), tokens, entropy=True, impl=impl)
    b = fastrl.token_logprobs(y.repeat(3, 1), tokens, entropy=True, impl=impl)
    for p, q in zip(a, b):
        assert p is not None and q is not None
        torch.testing.assert_close(p, q)
    a.logp.sum().backward()
    b.logp.sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    same = fastrl.token_logprobs(y.repeat(4, 1), tokens[:1].expand(4), impl=impl).logp
    assert same_bits(same[:1].expand(4), same)


def test_slices_are_not_copied() -> None:
    """A slice of [B, T, V] along T costs no memory of the order of the logits."""
    logits = torch.randn(2, 9, 50257)
    tokens = torch.randint(0, 50257, (2, 8))
    with torch.profiler.profile(profile_memory=True) as profile:
        fastrl.token_logprobs(logits[:, :-1], tokens, entropy=True)
    allocated = sum(max(e.self_cpu_memory_usage, 0) for e in profile.key_averages())
    assert allocated < 100 * tokens.numel()


def test_integer_dtypes_of_tokens(impl: str) -> None:
    logits, tokens = inputs(6, 100)
    expected = fastrl.token_logprobs(logits, tokens, impl=impl).logp
    for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
        got = fastrl.token_logprobs(logits, tokens.to(dtype), impl=impl).logp
        assert same_bits(got, expected)


def test_upstream_gradients_of_any_kind(impl: str) -> None:
    """Uneven, negative, expanded, strided, zero, and from one output alone."""
    logits, tokens = inputs(6, 300)
    double = logits.double()
    for g, h in [
        (torch.randn(6), torch.randn(6)),
        (-torch.rand(6), None),
        (None, torch.full((), 0.3).expand(6)),
        (torch.randn(6, 2)[:, 1], torch.randn(12)[::2]),
        (torch.zeros(6), torch.randn(6)),
    ]:
        got = gradient(logits, tokens, g, h, impl=impl)
        assert_close(
            got, gradient(double, tokens, g, h, impl="reference"), torch.float32, grad=True
        )


def test_rows_without_upstream_gradient_are_zero(impl: str) -> None:
    """What a loss masks out costs nothing and receives exactly 0, even next to other rows."""
    logits, tokens = inputs(4, 5000)
    g = torch.tensor([0.0, 1.0, 0.0, -2.0])
    grad = gradient(logits, tokens, g, 0 * g, impl=impl)
    assert (grad[[0, 2]] == 0).all() and (grad[[1, 3]] != 0).any(-1).all()
    if impl == "cpu":  # the definition leaves this to autograd, which multiplies 0 by NaN
        logits[0] = NAN
        assert (gradient(logits, tokens, g, 0 * g, impl=impl)[0] == 0).all()


def test_gradient_of_a_row_sums_to_zero(impl: str) -> None:
    """Shift invariance seen from behind."""
    logits, tokens = inputs(5, 5000)
    grad = gradient(logits, tokens, torch.randn(5), torch.randn(5), impl=impl)
    assert grad.sum(-1).abs().max() < 1e-4


def test_backward_twice_through_a_retained_graph(impl: str) -> None:
    logits, tokens = inputs(3, 100)
    x = leaf(logits)
    out = fastrl.token_logprobs(x, tokens, entropy=True, impl=impl)
    assert out.entropy is not None
    loss = (out.logp + out.entropy).sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert same_bits(first, torch.autograd.grad(loss, x)[0])


def test_large_gradient_past_the_caches() -> None:
    """Above 16 MB the gradient is written with other instructions, from any alignment: the same bits as a small one."""
    vocabulary = 50257  # odd, so that every row starts at another offset within a line
    logits, tokens = inputs(90, vocabulary)
    g, h = torch.randn(90), torch.randn(90)
    for dtype in (torch.float32, torch.bfloat16):
        x = logits.to(dtype).repeat(1 if dtype == torch.float32 else 2, 1)
        repeat = len(x) // 90
        whole = gradient(x, tokens.repeat(repeat), g.repeat(repeat), h.repeat(repeat), impl="cpu")
        assert whole.numel() * whole.element_size() > 16 << 20
        for i in (0, 1, 2, 57, 89):
            one = slice(i, i + 1)
            assert same_bits(whole[one], gradient(x[one], tokens[one], g[one], h[one], impl="cpu"))


def test_gradcheck(impl: str) -> None:
    logits = torch.randn(3, 2, 9, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 9, (3, 2))
    for temperature in (0.7, torch.rand(3, 2, dtype=torch.float64) + 0.5):
        assert torch.autograd.gradcheck(
            lambda x, t=temperature: fastrl.token_logprobs(
                x, tokens, temperature=t, entropy=True, impl=impl
            ),
            (logits,),
        )


def test_same_bits_for_any_number_of_threads_and_alone() -> None:
    logits, tokens = inputs(7, 20000)
    x = leaf(logits)

    def run() -> Tensor:
        out = fastrl.token_logprobs(x, tokens, entropy=True, impl="cpu")
        assert out.entropy is not None
        grad = torch.autograd.grad((out.logp * 0.3 - out.entropy).sum(), x)[0]
        return torch.cat([out.logp, out.entropy, grad.flatten()]).detach()

    one = with_threads(1, run)
    assert same_bits(one, with_threads(2, run)) and same_bits(one, with_threads(5, run))
    assert same_bits(one, run())
    for i in range(7):
        alone = fastrl.token_logprobs(logits[i], tokens[i], entropy=True, impl="cpu")
        assert alone.entropy is not None
        assert same_bits(alone.logp, one[i]) and same_bits(alone.entropy, one[7 + i])


def test_logp_is_never_positive(impl: str) -> None:
    """Peaked rows of every sharpness, the target on the peak: logp <= 0 and entropy >= 0 whatever the rounding."""
    logits = torch.randn(2000, 50)
    tokens = logits.argmax(-1)
    logits *= torch.logspace(-2, 3, 2000)[:, None]
    for dtype in (torch.float32, torch.bfloat16):
        out = fastrl.token_logprobs(logits.to(dtype), tokens, entropy=True, impl=impl)
        assert out.entropy is not None
        assert (out.logp <= 0).all()
        assert (out.entropy >= -1e-6 if impl == "reference" else out.entropy >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES], ids=str)
def test_error_is_no_worse_than_eager(dtype: torch.dtype) -> None:
    """Against float64 from the same logits, beside what eager torch makes of them in float32 and in their own dtype."""
    logits, tokens = inputs(32, 50257, dtype)
    expected = reference(logits, tokens)
    got = fastrl.token_logprobs(logits, tokens, entropy=True, impl="cpu")

    def error(result: tuple[Tensor | None, ...]) -> list[float]:
        return [
            (x.double() - y).abs().max().item()
            for x, y in zip(result, expected)
            if x is not None and y is not None
        ]

    def eager(x: Tensor) -> tuple[Tensor, Tensor]:
        log_p = torch.log_softmax(x, -1)
        return log_p.gather(-1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    for mine, theirs in zip(error(got), error(eager(logits.float()))):
        assert mine <= theirs
    if dtype != torch.float32:
        for mine, theirs in zip(error(got), error(eager(logits))):
            assert mine <= theirs / 100


@pytest.mark.parametrize("capability", ["baseline", "avx2", "avx512"])
def test_capabilities_agree(capability: str) -> None:
    from fastrl import _C

    best = _C.build_info()["capability"]
    logits, tokens = inputs(4, 9001)
    expected = fastrl.token_logprobs(logits, tokens, entropy=True, impl="cpu")
    if not _C.set_capability(capability):
        pytest.skip(f"{capability} is not available on this machine")
    try:
        got = fastrl.token_logprobs(logits, tokens, entropy=True, impl="cpu")
    finally:
        _C.set_capability(best)
    for x, y in zip(got, expected):
        assert x is not None and y is not None
        torch.testing.assert_close(x, y, atol=2e-6, rtol=1e-6)


def test_inputs_are_left_alone(impl: str) -> None:
    logits, tokens = inputs(3, 5000)
    before = logits.clone(), tokens.clone()
    gradient(logits, tokens, torch.ones(3), torch.ones(3), impl=impl)
    assert same_bits(logits, before[0]) and same_bits(tokens, before[1])


def test_logits_changed_in_place_are_noticed() -> None:
    x = torch.randn(2, 10, requires_grad=True)
    logits = x * 1
    out = fastrl.token_logprobs(logits, torch.tensor([1, 2]), impl="cpu")
    logits += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.logp.sum().backward()


def test_no_graph_without_need(impl: str) -> None:
    logits, tokens = inputs(2, 8)
    with torch.no_grad():
        assert not fastrl.token_logprobs(leaf(logits), tokens, impl=impl).logp.requires_grad
    assert not fastrl.token_logprobs(logits, tokens, impl=impl).logp.requires_grad


def test_autocast_changes_nothing(impl: str) -> None:
    logits, tokens = inputs(3, 5000, torch.bfloat16)
    outside = fastrl.token_logprobs(logits, tokens, entropy=True, impl=impl)
    with torch.autocast(logits.device.type, torch.bfloat16):
        inside = fastrl.token_logprobs(logits, tokens, entropy=True, impl=impl)
    for x, y in zip(outside, inside):
        assert x is not None and y is not None
        assert same_bits(x, y)


def test_opcheck() -> None:
    logits, tokens = inputs(4, 20)
    temperatures = torch.rand(4) + 0.5
    torch.library.opcheck(token_logprobs_op["cpu"], (logits, tokens, temperatures, 1.0, True))
    torch.library.opcheck(
        token_logprobs_op["cpu"],
        (logits.view(2, 2, 20).bfloat16(), tokens.view(2, 2), None, 0.7, False),
    )
    statistics = token_logprobs_op["cpu"](logits, tokens, None, 0.7, True)[2]
    g, h = torch.randn(4), torch.randn(4)
    for upstream in ((g, h), (g, None), (None, h)):
        torch.library.opcheck(
            token_logprobs_backward_op["cpu"], (*upstream, logits, tokens, None, 0.7, statistics)
        )


def test_compile_fullgraph_with_dynamic_shapes() -> None:
    compiles = CompileCounter()

    def loss(logits: Tensor, tokens: Tensor) -> Tensor:
        out = fastrl.token_logprobs(logits[:, :-1], tokens, temperature=0.8, entropy=True)
        assert out.entropy is not None
        return out.logp.sum() + (out.entropy * out.entropy).sum()

    torch._dynamo.reset()
    counted = torch.compile(loss, fullgraph=True, dynamic=True, backend=compiles)
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 5, 30), (3, 4, 17), (4, 9, 55)):
        logits = torch.randn(shape, requires_grad=True)
        tokens = torch.randint(0, shape[-1], (shape[0], shape[1] - 1))
        counted(logits, tokens)
        got = torch.autograd.grad(compiled(logits, tokens), logits)[0]
        torch.testing.assert_close(got, torch.autograd.grad(loss(logits, tokens), logits)[0])
    assert compiles.frame_count == 1


def test_beyond_2_to_the_31_elements() -> None:
    """Shapes of outputs and gradients come out right in the fake kernels, where 32 bits would wrap.

    A real row that far away would need 4 GB; the offsets of the kernel are 64-bit before their first multiplication.
    """
    with FakeTensorMode():
        logits = torch.empty(8, 4096, 151936, dtype=torch.bfloat16, requires_grad=True)
        tokens = torch.empty(8, 4096, dtype=torch.long)
        assert logits.numel() > 2**31
        out = fastrl.token_logprobs(logits, tokens, entropy=True)
        assert out.entropy is not None and out.logp.shape == out.entropy.shape == (8, 4096)
        (out.logp + out.entropy).sum().backward()
        assert logits.grad is not None and logits.grad.shape == logits.shape
        assert logits.grad.dtype == torch.bfloat16


def test_errors_name_op_argument_expected_got_and_remedy(impl: str) -> None:
    logits, tokens = torch.zeros(2, 5, 7), torch.zeros(2, 5, dtype=torch.long)
    call = fastrl.token_logprobs
    far, ignored = tokens.clone(), tokens.clone()
    far[0, 1], ignored[1, 1] = 7, -100
    cases: list[tuple[str, Any]] = [
        (r"token_logprobs: tokens must have the shape of logits without its last dimension, \[2, 5\], got \[2, 4\]; to score the next token pass logits\[:, :-1\]", lambda: call(logits, tokens[:, 1:], impl=impl)),
        (r"token_logprobs: tokens must be in \[0, V\) = \[0, 7\), got 7; give ignored positions a valid id", lambda: call(logits, far, impl=impl)),
        (r"token_logprobs: tokens must be in \[0, V\) = \[0, 7\), got -100; .*clamp\(min=0\)", lambda: call(logits, ignored, impl=impl)),
        (r"token_logprobs: tokens must be integers, got torch.float32; pass tokens.long\(\)", lambda: call(logits, tokens.float(), impl=impl)),
        (r"token_logprobs: tokens must be integers, got torch.bool", lambda: call(logits, tokens.bool(), impl=impl)),
        (r"token_logprobs: logits must be float32.*got torch.int64; convert it", lambda: call(logits.long(), tokens, impl=impl)),
        (r"token_logprobs: logits must be \[\.\.\., V\] with V >= 1, got \[2, 0\]", lambda: call(logits[:, 0, :0], tokens[:, 0], impl=impl)),
        (r"token_logprobs: logits must be \[\.\.\., V\] with V >= 1, got \[\]", lambda: call(torch.zeros(()), tokens[0, 0], impl=impl)),
        (r"token_logprobs: temperature must be a finite number in \[1e-06, inf\], got 0", lambda: call(logits, tokens, temperature=0.0, impl=impl)),
        (r"token_logprobs: temperature must be a finite number", lambda: call(logits, tokens, temperature=NAN, impl=impl)),
        (r"token_logprobs: temperature must have the shape of tokens, \[2, 5\], got \[2\]", lambda: call(logits, tokens, temperature=torch.ones(2), impl=impl)),
        (r"token_logprobs: every temperature must be at least 1e-06, got 0; clamp it", lambda: call(logits, tokens, temperature=torch.zeros(2, 5), impl=impl)),
        (r"token_logprobs: temperature is a constant to the gradient", lambda: call(logits, tokens, temperature=torch.ones(2, 5, requires_grad=True), impl=impl)),
        (r"token_logprobs: impl must be one of auto, .*, got 'eager'", lambda: call(logits, tokens, impl="eager")),
    ]  # fmt: skip
    for message, bad in cases:
        with pytest.raises(ValueError, match=message):
            bad()
    with pytest.raises(TypeError, match=r"token_logprobs: logits must be a torch.Tensor, got list"):
        call([1.0], tokens)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"token_logprobs: tokens must be a torch.Tensor, got int"):
        call(logits, 3)  # type: ignore[arg-type]


def test_direct_calls_of_the_operator_are_checked() -> None:
    """Whoever goes past the Python checks gets an error, not a read out of bounds."""
    logits, tokens = inputs(3, 10)
    for bad in (tokens + 10, tokens - 10):
        with pytest.raises(RuntimeError, match=r"tokens must be in \[0, V\)"):
            token_logprobs_op["cpu"](logits, bad, None, 1.0, False)
    with pytest.raises(RuntimeError, match="tokens must have one element per row"):
        token_logprobs_op["cpu"](logits, tokens[:2], None, 1.0, False)
    with pytest.raises(RuntimeError, match="temperatures must have one element per row"):
        token_logprobs_op["cpu"](logits, tokens, torch.ones(2), 1.0, False)
    with pytest.raises(RuntimeError, match="statistics"):
        token_logprobs_backward_op["cpu"](
            *(torch.ones(3), None, logits, tokens, None, 1.0), torch.ones(3, 2)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_read_or_written_past_the_rows(dtype: torch.dtype) -> None:
    """NaN right before and behind the logits must not show, and a gradient must fill its rows exactly."""
    for vocabulary in (1, 7, 17, 63, 65, 130):
        guarded = torch.full((3, vocabulary + 40), NAN, dtype=dtype)
        guarded[:, 20:-20] = torch.randn(3, vocabulary)
        logits = guarded[:, 20:-20]
        tokens = torch.randint(0, vocabulary, (3,))
        out = fastrl.token_logprobs(logits, tokens, entropy=True, impl="cpu")
        assert out.entropy is not None
        assert out.logp.isfinite().all() and out.entropy.isfinite().all()
        assert gradient(logits, tokens, torch.ones(3), torch.ones(3), impl="cpu").isfinite().all()
