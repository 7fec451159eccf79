"""``fastrl.linear_policy_loss``: against ``policy_loss`` of a dense head in float64 for every kind of option, and the rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import fastrl
from fastrl.ops.linear_policy_loss.op import linear_policy_loss_op
from tests.helpers import leaf, pack, same_bits
from tests.ops.heads import (
    LIMITS,
    Head,
    assert_close,
    error,
    head,
    mask_on_a_device,
    peak_bytes,
    products,
)

SHAPE = (4, 6)


class Rollout:
    """What a loss reads beside the head, with ratios of the old policy to the logp of this very head."""

    def __init__(self, h: Head) -> None:
        logp = fastrl.linear_token_logprobs(*h[:3], **h.options(), impl="reference").logp.float()
        # Fixed distances from the policy: no ratio is near an edge of a clip.
        steps = torch.tensor([0.0, 0.35, -0.35, 0.1, -0.1, 0.6]).repeat(3)
        steps = steps[: logp.shape[-1]].expand(logp.shape)
        self.old_logp, self.ref_logp = logp - steps, logp - steps.flip(-1) - 0.05
        self.advantages = torch.linspace(-1.5, 2, logp.numel()).view(logp.shape)
        self.mask = torch.arange(logp.numel()).view(logp.shape) % 5 != 2


def run(h: Head, r: Any, mask: Tensor | None, scale: float = 1.0, **options: Any) -> list[Tensor]:
    """Loss, metrics, logp and the gradients of the head."""
    h = h.fresh()
    dtype = torch.float64 if h.hidden.dtype == torch.float64 else torch.float32
    ref = r.ref_logp.to(dtype) if options.get("kl") and "ref_hidden" not in options else None
    out = fastrl.linear_policy_loss(
        *h[:3],
        *(r.old_logp.to(dtype), r.advantages.to(dtype), mask),
        **({"ref_logp": ref} | h.options() | options),
    )
    gradients = torch.autograd.grad(out.loss * scale, h.leaves())
    return [out.loss.detach(), out.metrics, out.logp, *gradients]


def exact(h: Head, *arguments: Any, **options: Any) -> list[Tensor]:
    return run(h.fresh(torch.float64), *arguments, impl="reference", **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dual_clip_and_cap": {"dual_clip": 1.3, "ratio_cap": 1.5},
    "cispo": {"surrogate": "cispo", "clip_high": 0.3},
    "reinforce": {"surrogate": "reinforce"},
    "k3": {"kl": "k3", "kl_coef": 0.3},
    "k1_times_ratio": {"kl": "k1", "kl_grad": "ratio", "kl_coef": 0.3},
    "entropy": {"entropy_coef": 0.2, "temperature": 0.7},
    "entropy_shown": {"entropy": True},
    "sequence": {"ratio": "sequence", "kl": "k2", "kl_coef": 0.1, "entropy_coef": 0.1},
    "sequence_token": {"ratio": "sequence_token"},
    "token_sum": {"agg": "token_sum", "kl": "abs", "kl_coef": 0.2},
    "seq_mean_token_sum": {"agg": "seq_mean_token_sum", "entropy_coef": 0.2},
    "seq_mean_token_mean": {"agg": "seq_mean_token_mean", "kl": "k3", "kl_coef": 0.3},
    "norm": {"agg": "seq_mean_token_sum_norm"},
    "denom": {"denom": 37.5},
    "denom_tensor": {"agg": "seq_mean_token_mean", "denom": torch.tensor(9)},
    "cap_and_scale": {"softcap": 2.0, "logit_scale": 0.5, "vocab_size": 40},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_against_definition(name: str) -> None:
    options = OPTIONS[name]
    h = head(SHAPE, 9, 43, bias=True, rank=2)
    h.tokens.clamp_(max=39)
    r = Rollout(h)
    for mask in (r.mask, None, torch.zeros(SHAPE)):
        expected = exact(h, r, mask, scale=-2.0, **options)
        assert_close(run(h, r, mask, scale=-2.0, chunk=5, **options), expected, torch.float32, 5)
        with mask_on_a_device():
            got = run(h, r, mask, scale=-2.0, chunk=5, **options)
        assert_close(got, expected, torch.float32, 5)


@pytest.mark.parametrize("agg", ["token_mean", "seq_mean_token_mean"])
def test_packed_rows_and_one_advantage_per_sequence(agg: str) -> None:
    h = head(SHAPE, 9, 43)
    r = Rollout(h)
    r.advantages = torch.tensor([1.0, -0.5, 2.0, -1.0])
    lengths = [6, 0, 3, 5]
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    padded = run(h, r, mask, agg=agg)
    offsets = pack(h.tokens, lengths)[1]
    packed = h._replace(hidden=pack(h.hidden, lengths)[0], tokens=pack(h.tokens, lengths)[0])
    r.old_logp = pack(r.old_logp, lengths)[0]
    got = run(packed, r, None, agg=agg, cu_seqlens=offsets)
    assert_close([got[0], *got[4:]], [padded[0], *padded[4:]], torch.float32)
    torch.testing.assert_close(got[3], padded[3][mask])


@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    h = head(SHAPE, 9, 43, dtype)
    r = Rollout(h)
    got, expected = run(h, r, r.mask, chunk=7), exact(h, r, r.mask)
    assert error(got[2], expected[2]) <= LIMITS[dtype]
    assert all(x.dtype == dtype for x in got[3:])
    if dtype != torch.bfloat16:  # a logp rounded to bfloat16 may lie on the other side of a clip
        assert_close(got, expected, dtype, 5)


def test_the_reference_policy_as_states_and_weight() -> None:
    h, other = head(SHAPE, 9, 43), head(SHAPE, 5, 43, bias=True)
    r = Rollout(h)
    r.ref_logp = fastrl.linear_token_logprobs(
        other.hidden, other.weight, h.tokens, bias=other.bias
    ).logp
    options: dict[str, Any] = {"kl": "k3", "kl_coef": 0.3}
    expected = run(h, r, r.mask, **options)
    reference = leaf(other.weight)
    got = run(
        *(h, r, r.mask),
        **({"ref_hidden": other.hidden, "ref_weight": reference, "ref_bias": other.bias} | options),
    )
    assert_close(got, expected, torch.float32)
    assert reference.grad is None


def test_three_products_a_token_or_four_a_sequence() -> None:
    """Masked tokens cost none; sequence ratios compute the logits again."""
    h = head((4, 16), 8, 100)
    mask = torch.arange(64).view(4, 16) % 4 == 0
    logp = torch.zeros(4, 16)
    r = Rollout(h)
    forward, weight, states = (16, 8, 100), (100, 16, 8), (16, 100, 8)
    assert products(lambda: run(h, r, mask)) == [forward, weight, states]
    assert products(lambda: run(h, r, mask, ratio="sequence")) == [forward, forward, weight, states]
    with torch.no_grad():
        calls = products(lambda: fastrl.linear_policy_loss(*h[:3], logp, logp, mask))
    assert calls == [forward]


def test_logp_has_the_bits_of_the_other_op() -> None:
    """So the ratio of the first update is exactly 1."""
    h = head((4, 16), 8, 300, torch.bfloat16).fresh()
    old = fastrl.linear_token_logprobs(*h[:3], chunk=7).logp.detach()
    out = fastrl.linear_policy_loss(*h[:3], old, torch.randn(4), chunk=7, entropy=True)
    assert same_bits(out.logp, old) and not out.logp.requires_grad
    assert out.entropy is not None and not out.entropy.requires_grad
    named = out.named()
    assert named["ratio_min"] == named["ratio_max"] == 1 and named["approx_kl"] == 0


def test_micro_batches_add_up() -> None:
    """Reported of Liger-Kernel (#1082): another normaliser, gradients a hundred times too large."""
    h = head(SHAPE, 9, 43)
    r = Rollout(h)
    whole = run(h, r, r.mask, denom=int(r.mask.sum()))
    assert_close(run(h, r, r.mask), whole, torch.float32)
    total = torch.zeros_like(h.weight)
    for rows in (slice(0, 1), slice(1, 4)):
        part = Rollout(h)
        part.old_logp, part.advantages = r.old_logp[rows], r.advantages[rows]
        cut = h._replace(hidden=h.hidden[rows], tokens=h.tokens[rows])
        total += run(cut, part, r.mask[rows], denom=int(r.mask.sum()))[4]
    assert_close([total], [whole[4]], torch.float32)


def test_masked_positions_influence_nothing_and_valid_ones_are_counted() -> None:
    h = head(SHAPE, 9, 43)
    r = Rollout(h)
    expected = run(h, r, r.mask, kl="k3", kl_coef=0.1)
    for x in (h.hidden, r.old_logp, r.ref_logp, r.advantages):
        x[~r.mask] = float("nan")
    h.tokens[~r.mask] = -100
    got = run(h, r, r.mask, kl="k3", kl_coef=0.1)
    for x, y in zip(got, expected):
        assert same_bits(x, y)
    assert (got[3][~r.mask] == 0).all()
    r.old_logp[0, 0] = float("nan")
    bad = run(h, r, r.mask)
    names = dict(zip(fastrl.POLICY_METRICS, bad[1].tolist()))
    assert bad[0].isnan() and names["nonfinite"] == 1


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_empty(shape: tuple[int, int]) -> None:
    h = head(shape, 4, 7)
    loss, metrics, logp, *gradients = run(h, Rollout(h), None)
    assert loss == 0 and metrics[0] == 0 and logp.shape == shape
    assert all((x == 0).all() for x in gradients)


def test_backward_twice_and_second_derivatives() -> None:
    h = head(SHAPE, 9, 43).fresh()
    r = Rollout(h)
    loss = fastrl.linear_policy_loss(*h[:3], r.old_logp, r.advantages).loss
    once = torch.autograd.grad(loss, h.weight, retain_graph=True)[0].clone()
    torch.testing.assert_close(
        torch.autograd.grad(3 * loss, h.weight, retain_graph=True)[0], 3 * once
    )
    assert same_bits(torch.autograd.grad(loss, h.weight, retain_graph=True)[0], once)
    gradient = torch.autograd.grad(loss, h.hidden, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="linear_policy_loss: only first-order gradients"):
        gradient.square().sum().backward()


def test_peak_memory() -> None:
    h = head((2, 1024), 16, 8192).fresh()
    zeros = torch.zeros(2, 1024)
    chunk, weight = 128 * 8192 * 4, 8192 * 16 * 4

    def ours() -> object:
        out = fastrl.linear_policy_loss(*h[:3], zeros, zeros + 1, chunk=128, entropy=True)
        return torch.autograd.grad(out.loss, h.leaves())

    def eager() -> object:
        logp = fastrl.token_logprobs(h.hidden @ h.weight.t(), h.tokens).logp
        return torch.autograd.grad(fastrl.policy_loss(logp, zeros, zeros + 1).loss, h.leaves())

    peak = peak_bytes(ours)
    assert chunk < peak < 1.2 * (chunk + weight) + 500_000
    assert 8 * peak <= peak_bytes(eager)


def test_autocast_and_checkpoint() -> None:
    h = head(SHAPE, 9, 43).fresh()
    r = Rollout(h)

    def loss(hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return fastrl.linear_policy_loss(hidden, *h[1:3], r.old_logp, r.advantages).loss

    expected = torch.autograd.grad(loss(h.hidden), h.leaves(), retain_graph=True)
    assert all(x.dtype == torch.float32 for x in expected)
    got = torch.autograd.grad(checkpoint(loss, h.hidden, use_reentrant=False), h.leaves())
    for x, y in zip(got, expected):
        assert same_bits(x, y)


def test_compile_fullgraph_with_dynamic_shapes() -> None:
    compiles = CompileCounter()

    def loss(hidden: Tensor, weight: Tensor, tokens: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        return fastrl.linear_policy_loss(
            *(hidden, weight, tokens, old, old + 1, mask), entropy_coef=0.1, chunk=4
        ).loss

    torch._dynamo.reset()
    counted = torch.compile(loss, fullgraph=True, dynamic=True, backend=compiles)
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 5), (3, 4), (4, 9)):
        h = head(shape, 6, 30).fresh()
        arguments = (*h[:3], torch.randn(shape) - 3, torch.rand(shape) < 0.6)
        counted(*arguments)
        got = torch.autograd.grad(compiled(*arguments), h.leaves())
        for x, y in zip(got, torch.autograd.grad(loss(*arguments), h.leaves())):
            torch.testing.assert_close(x, y)
    assert compiles.frame_count == 1


def test_opcheck() -> None:
    h = head((5,), 4, 11)
    old = torch.randn(5)
    torch.library.opcheck(
        linear_policy_loss_op["cpu"],
        (
            *(*h[:3], None, None, None, torch.tensor([1, 0, 1, 1, 1]), None, None),
            *([1.0, 1.0, float("inf"), 1.0], [2, 0, 11], "", None, True),
            *(old, old, None, None, torch.tensor([0, 2, 5]), None, 0.0),
            *([0.2, 0.2, *[float("inf")] * 3, 0.0, 20.0, 10.0, 0.0], [0, 0, 0, 0, 0], True),
            [True, True, False, False, False],
        ),
    )


def test_errors_name_op_argument_expected_got_and_remedy() -> None:
    h = head((2, 5), 4, 7)
    old = torch.zeros(2, 5)
    call: Any = fastrl.linear_policy_loss
    cases: list[tuple[str, Any]] = [
        (r"old_logp must have the shape of logp, \[2, 5\], got \[2, 4\]", lambda: call(*h[:3], old[:, 1:], old)),
        (r"advantages must .*one element per sequence, \[2\], got \[3\]", lambda: call(*h[:3], old, old[0, :3])),
        (r"ref_logp must be given for kl='k3', got None", lambda: call(*h[:3], old, old, kl="k3")),
        (r"ref_hidden with ref_weight, got ref_hidden; pass one", lambda: call(*h[:3], old, old, kl="k3", ref_hidden=h.hidden)),
        (r"surrogate must be one of .*got 'ppo'", lambda: call(*h[:3], old, old, surrogate="ppo")),
        (r"dual_clip must be greater than 1 or None, got 0.5", lambda: call(*h[:3], old, old, dual_clip=0.5)),
        (r"tokens must be in \[0, V\)", lambda: call(*h[:2], h.tokens + 7, old, old)),
    ]  # fmt: skip
    for message, bad in cases:
        with pytest.raises(ValueError, match="linear_policy_loss: .*" + message):
            bad()
