"""``fastrl.policy_loss``: the rules of DESIGN section 4, gradients and upstreams, compilation, error messages."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import fastrl
from fastrl._losses import AGGREGATIONS
from fastrl.ops.policy_loss.op import RATIOS, SURROGATES, policy_loss_op
from tests.helpers import (
    leaf,
    masks,
    pack,
    poisoned,
    same_bits,
    strided,
    uneven_lengths,
    with_threads,
)
from tests.ops.losses import Batch, batch, metric, run_policy

# Everything on: each input is read.
FULL: dict[str, Any] = {"kl": "k3", "kl_coef": 0.1, "entropy_coef": 0.01, "dual_clip": 3.0}


def full_batch(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Batch:
    return batch(shape, dtype, is_weights=True, entropy=True)


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert same_bits(x, y)


def assert_agree(impl: str, a: list[Tensor], b: list[Tensor]) -> None:
    """The same bits from a kernel; the reference sums in an order that torch picks by layout."""
    if impl == "reference":
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    else:
        assert_same(a, b)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_rule_1_masked_positions_have_no_influence(impl: str, poison: float) -> None:
    data = full_batch((3, 50))
    variants = [FULL, {"surrogate": "cispo"}, FULL | {"kl": "abs", "kl_grad": "ratio"}]
    if impl == "triton":  # slow to interpret
        variants = variants[2:]
    for (_, mask), ratio in itertools.product(masks((3, 50)), RATIOS):
        for options in variants:
            clean = run_policy(impl, data, mask, ratio=ratio, **options)
            dirty = data.map(lambda x: poisoned(x, mask, poison))  # noqa: B023
            assert_same(clean, run_policy(impl, dirty, mask, ratio=ratio, **options))


def test_rule_1_masked_gradients_are_exactly_zero(impl: str) -> None:
    mask = torch.rand(3, 50) < 0.6
    data = full_batch((3, 50)).map(lambda x: poisoned(x, mask))
    for ratio, surrogate in itertools.product(RATIOS, SURROGATES):
        _, _, *grads = run_policy(impl, data, mask, ratio=ratio, surrogate=surrogate, **FULL)
        for grad in grads:
            assert same_bits(grad[~mask], torch.zeros_like(grad[~mask]))
            assert torch.isfinite(grad).all()


@pytest.mark.parametrize("agg", AGGREGATIONS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_rule_2_empty(impl: str, ratio: str, agg: str) -> None:
    """No rows, no tokens, nothing valid, empty packed rows: loss 0 with a graph, gradients 0, counts 0."""
    for shape in ((0, 5), (3, 0), (0, 0), (2, 20)):
        mask = torch.zeros(shape) if shape == (2, 20) else None
        data = full_batch(shape).map(lambda x: torch.full_like(x, float("nan")))
        loss, metrics, *grads = run_policy(impl, data, mask, ratio=ratio, agg=agg, **FULL)
        assert loss.item() == 0
        assert [torch.count_nonzero(grad).item() for grad in grads] == [0, 0]
        assert grads[0].shape == shape
        got = dict(zip(fastrl.POLICY_METRICS, metrics.tolist()))
        assert got.pop("ratio_min") == got.pop("ratio_max") == 1
        assert set(got.values()) == {0}
    if agg != "seq_mean_token_sum_norm":
        x = torch.zeros(0, requires_grad=True)
        offsets = torch.tensor([0, 0, 0])
        out = fastrl.policy_loss(
            *(x, x.detach(), torch.zeros(2)), ratio=ratio, agg=agg, cu_seqlens=offsets, impl=impl
        )
        out.loss.backward()
        assert out.loss.item() == 0
        assert x.grad is not None and x.grad.shape == (0,)


def test_rule_2_a_row_without_valid_tokens_is_no_sequence(impl: str) -> None:
    data = full_batch((4, 30))
    mask = torch.ones(4, 30)
    mask[1:3] = 0
    kept = data.map(lambda x: x[[0, 3]])
    for ratio, agg in itertools.product(RATIOS, AGGREGATIONS):
        loss, metrics, *grads = run_policy(impl, data, mask, ratio=ratio, agg=agg, **FULL)
        alone = run_policy(impl, kept, None, ratio=ratio, agg=agg, **FULL)
        grads = [grad[[0, 3]] for grad in grads]
        torch.testing.assert_close([loss, metrics, *grads], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ratio", RATIOS)
def test_rule_5_same_bits_for_any_number_of_threads(ratio: str) -> None:
    """Many rows, and one row long enough to be split."""
    for shape in ((64, 700), (1, 50_000)):
        data, mask = full_batch(shape), torch.rand(shape) < 0.7
        one, two = (
            with_threads(n, lambda: run_policy("cpu", data, mask, ratio=ratio, **FULL))  # noqa: B023
            for n in (1, 2)
        )
        assert_same(one, two)


@pytest.mark.parametrize("agg", ["token_mean", "seq_mean_token_mean", "token_sum"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_rule_5_same_bits_padded_on_either_side_and_packed(impl: str, ratio: str, agg: str) -> None:
    """Rows with holes, one of them shorter, in one batch laid out in four ways; 2100 tokens are more than a chunk."""
    for length in (45, 2100):
        width = length + 38
        data = full_batch((3, length))
        mask = torch.rand(3, length) < 0.7
        mask[:, 0] = mask[:, -1] = True
        mask[1, -6:] = False
        options = {"ratio": ratio, "agg": agg, **FULL}
        results = [run_policy(impl, data, mask, **options)]

        pad = torch.full((3, width - length), float("nan"))
        for side in ("left", "right"):
            order = slice(None) if side == "right" else slice(None, None, -1)
            wide = data.map(lambda x: torch.cat([x, pad][order], 1))  # noqa: B023
            wide_mask = torch.cat([mask, torch.zeros(pad.shape, dtype=torch.bool)][order], 1)
            start = 0 if side == "right" else width - length
            loss, metrics, *grads = run_policy(impl, wide, wide_mask, **options)
            grads = [grad[:, start : start + length] for grad in grads]
            results.append([loss, metrics, *grads])

        packed = data.map(lambda x: pack(x, [length] * 3)[0])  # noqa: B023
        packed_mask, offsets = pack(mask, [length] * 3)
        for dtype in (torch.int32, torch.int64):
            loss, metrics, *grads = run_policy(
                impl, packed, packed_mask, cu_seqlens=offsets.to(dtype), **options
            )
            results.append([loss, metrics, *(grad.view(3, length) for grad in grads)])
        for other in results[1:]:
            assert_agree(impl, other, results[0])


@pytest.mark.parametrize("ratio", RATIOS)
def test_rule_5_same_bits_of_many_rows_of_uneven_lengths(impl: str, ratio: str) -> None:
    batches = list(uneven_lengths(impl))
    if impl == "triton":  # the value loss adds up many rows with the same function
        batches = batches[1:]
    for lengths, has_holes in itertools.product(batches, (False, True)):
        shape = (len(lengths), max(lengths))
        data = full_batch(shape)
        inside = torch.arange(shape[1]) < torch.tensor(lengths).unsqueeze(1)
        mask = inside & (torch.rand(shape) < 0.7) if has_holes else inside
        options = {"ratio": ratio, "agg": "seq_mean_token_mean", **FULL}
        padded = run_policy(impl, data, mask, **options)
        expected = run_policy("reference", data.double(), mask, **options)
        torch.testing.assert_close(
            [x.double() for x in padded], [x.double() for x in expected], atol=1e-4, rtol=1e-4
        )
        flat = data.map(lambda x: pack(x, lengths)[0])  # noqa: B023
        flat_mask, offsets = pack(mask, lengths)
        packed = run_policy(
            impl, flat, flat_mask if has_holes else None, cu_seqlens=offsets, **options
        )
        padded[2:] = [pack(grad, lengths)[0] for grad in padded[2:]]
        assert_agree(impl, packed, padded)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    density=st.floats(0, 1),
    seed=st.integers(0, 2**20),
    ratio=st.sampled_from(tuple(RATIOS)),
)
def test_rule_5_packed_equals_padded_for_any_lengths_and_mask(
    lengths: list[int], density: float, seed: int, ratio: str
) -> None:
    torch.manual_seed(seed)
    shape = (len(lengths), max(lengths))
    data = full_batch(shape)
    inside = torch.arange(shape[1]) < torch.tensor(lengths).unsqueeze(1)
    mask = (torch.rand(shape) < density) & inside
    options = {"ratio": ratio, "agg": "seq_mean_token_mean", **FULL}
    padded = run_policy("cpu", data, mask, **options)
    packed_mask, offsets = pack(mask, lengths)
    packed = run_policy(
        "cpu", data.map(lambda x: pack(x, lengths)[0]), packed_mask, cu_seqlens=offsets, **options
    )
    padded[2:] = [pack(grad, lengths)[0] for grad in padded[2:]]
    assert_same(padded, packed)


def test_rule_7_shapes_beyond_2_to_the_31() -> None:
    with FakeTensorMode():
        x = torch.empty(2**17, 2**15)
        numbers, choices = [0.2, 0.2, 3.0, 2.0, 20.0, 0.1, 20.0, 10.0, 0.1], [0, 0, 2, 0, 0]
        arguments = (x, x, x, None, None, x, None, None, None, 0.0, numbers, choices, True, False)
        assert policy_loss_op["cpu"](*arguments)[2].numel() == 2**32


def test_rule_8_strides_do_not_matter_and_inputs_are_not_modified(impl: str) -> None:
    data = full_batch((3, 40))
    mask = torch.rand(3, 40) < 0.7
    expected = run_policy(impl, data, mask, **FULL)
    layouts = [list(strided(x)) for x in data if x is not None]
    for *inputs, mask_layout in zip(*layouts, strided(mask)):
        before = [x.clone() for x in (*inputs, mask_layout)]
        assert_agree(impl, run_policy(impl, Batch(*inputs), mask_layout, **FULL), expected)
        assert all(same_bits(a, b) for a, b in zip(before, (*inputs, mask_layout)))


def test_rule_10_what_is_not_finite_at_a_valid_token_is_counted(impl: str) -> None:
    """Each input in turn; a NaN reaches the loss, an infinite log-ratio is clamped but counted all the same."""
    data = full_batch((2, 40))
    for field, value in itertools.product(data._fields, (float("nan"), float("inf"))):
        x = getattr(data, field).clone()
        x[0, 20] = x[1, 3] = value
        loss, metrics, *_ = run_policy(impl, data._replace(**{field: x}), None, **FULL)
        count = metrics[fastrl.POLICY_METRICS.index("nonfinite")]
        assert count == 2, (field, value)
        if value != value:
            assert torch.isnan(loss), field
    both = data._replace(
        old_logp=torch.full((2, 40), float("nan")), advantages=torch.full((2, 40), float("inf"))
    )
    out = run_policy(impl, both, None, **FULL)
    assert out[1][fastrl.POLICY_METRICS.index("nonfinite")] == 80  # a token counts once


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("surrogate", ["clip", "reinforce"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_gradcheck_in_double(impl: str, ratio: str, surrogate: str) -> None:
    """Numerical derivatives, where the loss is the integral of its gradient: not for cispo, sequence_token and k2."""
    data = full_batch((2, 9)).double()
    mask = torch.rand(2, 9) < 0.7
    kls = list(itertools.product(("k1", "k2", "k3", "abs"), ("pathwise", "ratio")))
    if impl == "triton":  # slow to interpret
        kls = [("k3", "ratio")]
    for kl, kl_grad in kls:

        def loss(logp: Tensor, entropy: Tensor) -> Tensor:
            return fastrl.policy_loss(
                *(logp, data.old_logp, data.advantages, mask),
                ratio=ratio,
                surrogate=surrogate,
                is_weights=data.is_weights,
                ref_logp=data.ref_logp,
                kl=kl,  # noqa: B023
                kl_grad=kl_grad,  # noqa: B023
                kl_coef=0.3,
                entropy=entropy,
                entropy_coef=0.1,
                impl=impl,
            ).loss

        assert data.entropy is not None
        assert torch.autograd.gradcheck(loss, (leaf(data.logp), leaf(data.entropy)))


def test_any_upstream_gradient(impl: str) -> None:
    """Scaled, negative, zero, a sum of several uses, and a second backward through a retained graph."""
    data, mask = full_batch((3, 50)), torch.rand(3, 50) < 0.7
    _, _, grad_logp, grad_entropy = run_policy(impl, data, mask, **FULL)

    def leaves() -> tuple[Tensor, Tensor, Tensor]:
        assert data.entropy is not None
        logp, entropy = leaf(data.logp), leaf(data.entropy)
        out = fastrl.policy_loss(
            *(logp, data.old_logp, data.advantages, mask),
            ref_logp=data.ref_logp,
            is_weights=data.is_weights,
            entropy=entropy,
            impl=impl,
            **FULL,
        )
        return logp, entropy, out.loss

    for scale in (3.0, -0.5, 0.0):
        logp, entropy, loss = leaves()
        (loss * scale).backward()
        torch.testing.assert_close(logp.grad, grad_logp * scale)
        torch.testing.assert_close(entropy.grad, grad_entropy * scale)
    logp, _, loss = leaves()
    (loss.expand(4) * torch.arange(4.0)).sum().backward()
    torch.testing.assert_close(logp.grad, grad_logp * 6)

    logp, _, loss = leaves()
    loss.backward(retain_graph=True)
    assert logp.grad is not None
    logp.grad.mul_(0)  # must not reach what the graph has saved
    loss.backward()
    torch.testing.assert_close(logp.grad, grad_logp)
    loss_first, loss_second = leaves(), leaves()
    torch.testing.assert_close(
        torch.autograd.grad(loss_first[2] + loss_second[2], loss_first[:1])[0], grad_logp
    )


def test_only_logp_and_entropy_have_gradients(impl: str) -> None:
    data = full_batch((2, 20)).map(leaf)
    out = fastrl.policy_loss(
        *(data.logp, data.old_logp, data.advantages),
        is_weights=data.is_weights,
        ref_logp=data.ref_logp,
        entropy=data.entropy,
        impl=impl,
        **FULL,
    )
    out.loss.backward()
    has_grad = {name for name, x in data._asdict().items() if x.grad is not None}
    assert has_grad == {"logp", "entropy"}
    assert not out.metrics.requires_grad


@pytest.mark.parametrize("which", ["logp", "entropy"])
def test_one_gradient_alone(impl: str, which: str) -> None:
    data, mask = full_batch((3, 50)), torch.rand(3, 50) < 0.7
    both = dict(zip(("logp", "entropy"), run_policy(impl, data, mask, **FULL)[2:]))
    inputs = {name: getattr(data, name).clone() for name in both}
    inputs[which].requires_grad_()
    out = fastrl.policy_loss(
        *(inputs["logp"], data.old_logp, data.advantages, mask),
        is_weights=data.is_weights,
        ref_logp=data.ref_logp,
        entropy=inputs["entropy"],
        impl=impl,
        **FULL,
    )
    out.loss.backward()
    torch.testing.assert_close(inputs[which].grad, both[which])


def test_no_graph_without_need(impl: str) -> None:
    data = full_batch((2, 20))
    expected = run_policy(impl, data, None, **FULL)
    with torch.no_grad():
        out = fastrl.policy_loss(
            *(leaf(data.logp), data.old_logp, data.advantages),
            is_weights=data.is_weights,
            ref_logp=data.ref_logp,
            entropy=data.entropy,
            impl=impl,
            **FULL,
        )
    assert not out.loss.requires_grad
    assert_same([out.loss, out.metrics], expected[:2])


@pytest.mark.parametrize("agg", [agg for agg in AGGREGATIONS if agg != "token_sum"])
def test_micro_batches_with_the_global_denominator_add_up(impl: str, agg: str) -> None:
    data, mask = full_batch((6, 50)), torch.rand(6, 50) < 0.6
    mask[4] = False
    tokens, sequences = int(mask.sum()), int(mask.any(1).sum())
    denom = {"token_mean": tokens, "seq_mean_token_sum_norm": sequences * 50}.get(agg, sequences)
    whole = run_policy(impl, data, mask, agg=agg, **FULL)
    parts = [
        run_policy(
            *(impl, data.map(lambda x: x[rows]), mask[rows]),  # noqa: B023
            agg=agg,
            denom=kind(denom),
            **FULL,
        )
        for rows, kind in ((slice(0, 2), int), (slice(2, 5), torch.tensor), (slice(5, 6), float))
    ]
    torch.testing.assert_close(sum(part[0] for part in parts), whole[0])
    terms = [fastrl.POLICY_METRICS.index(n) for n in ("policy_term", "kl_term", "entropy_term")]
    sums = [i for i, name in enumerate(fastrl.POLICY_METRICS) if "ratio_m" not in name]
    assert set(terms) < set(sums)
    torch.testing.assert_close(sum(part[1] for part in parts)[sums], whole[1][sums])
    for i in (2, 3):
        torch.testing.assert_close(torch.cat([part[i] for part in parts]), whole[i])


# ---- compilation, options -------------------------------------------------------------------------------------------


def test_opcheck() -> None:
    data, mask = full_batch((3, 20)), torch.rand(3, 20) < 0.5
    numbers = [0.2, 0.2, 3.0, float("inf"), 20.0, 0.1, 20.0, 10.0, 0.1]
    inputs = (data.logp, data.old_logp, data.advantages, mask, data.is_weights, data.ref_logp)
    for ratio in range(3):
        torch.library.opcheck(
            policy_loss_op["cpu"],
            (*inputs, data.entropy, None, None, 0.0, numbers, [ratio, 0, 2, 2, 3], True, True),
        )
    flat = [x.flatten() for x in inputs if x is not None]
    offsets, denom = torch.tensor([0, 20, 45, 60]), torch.tensor(7.0, dtype=torch.float64)
    torch.library.opcheck(
        policy_loss_op["cpu"],
        (*flat, None, offsets, denom, 0.0, numbers, [0, 1, 0, 0, 4], False, False),
    )


@pytest.mark.parametrize("which", ["auto", "reference"])
@pytest.mark.parametrize("count", [torch.tensor, int], ids=["tensor", "int"])
def test_compile_fullgraph_with_dynamic_lengths_and_denominators(which: str, count: Any) -> None:
    """One graph for any lengths and any global count, be that a number or a tensor."""
    compiles = CompileCounter()

    def loss(logp: Tensor, data: Batch, mask: Tensor, denom: Any) -> tuple[Tensor, Tensor]:
        out = fastrl.policy_loss(
            *(logp, data.old_logp, data.advantages, mask),
            ref_logp=data.ref_logp,
            is_weights=data.is_weights,
            entropy=data.entropy,
            denom=denom,
            impl=which,
            **FULL,
        )
        return out.loss * 2, out.metrics

    torch._dynamo.reset()
    counted = torch.compile(loss, fullgraph=True, dynamic=True, backend=compiles)
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 30), (3, 17), (4, 55)):
        data, mask = full_batch(shape), torch.rand(shape) < 0.5
        arguments = (leaf(data.logp), data, mask, count(int(mask.sum())))
        counted(*arguments)
        (got, got_metrics), (expected, metrics) = compiled(*arguments), loss(*arguments)
        torch.testing.assert_close(got_metrics, metrics)
        x, y = (torch.autograd.grad(value, arguments[0])[0] for value in (got, expected))
        torch.testing.assert_close(x, y)
    assert compiles.frame_count == 1


@pytest.mark.parametrize("which", ["auto", "reference"])
def test_compile_packed(which: str) -> None:
    data = full_batch((2, 30)).map(Tensor.flatten)
    offsets = torch.tensor([0, 20, 60])

    def loss(logp: Tensor) -> Tensor:
        return fastrl.policy_loss(
            *(logp, data.old_logp, data.advantages),
            ratio="sequence",
            agg="seq_mean_token_mean",
            cu_seqlens=offsets,
            impl=which,
        ).loss

    compiled, eager = leaf(data.logp), leaf(data.logp)
    torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")(compiled).backward()
    loss(eager).backward()
    torch.testing.assert_close(compiled.grad, eager.grad)


def test_compile_with_inductor_and_infinite_bounds() -> None:
    data = full_batch((2, 30))

    def loss(logp: Tensor) -> Tensor:
        return fastrl.policy_loss(
            *(logp, data.old_logp, data.advantages), ratio="sequence", log_ratio_clamp=None
        ).loss

    compiled, eager = leaf(data.logp), leaf(data.logp)
    torch.compile(loss, fullgraph=True)(compiled).backward()
    loss(eager).backward()
    torch.testing.assert_close(compiled.grad, eager.grad)


def test_autocast_changes_nothing(impl: str) -> None:
    data = full_batch((2, 30))
    expected = run_policy(impl, data, None, **FULL)
    with torch.autocast(data[0].device.type, dtype=torch.bfloat16):
        got = run_policy(impl, data, None, **FULL)
    assert_same(got, expected)


def test_errors_name_op_argument_expected_got_and_remedy() -> None:
    x = torch.zeros(2, 5)
    a = torch.zeros(2)

    def call(*arguments: Any, **options: Any) -> Any:
        return lambda: fastrl.policy_loss(*arguments, **options)

    cases = [
        (r"policy_loss: old_logp must have the shape of logp, \[2, 5\], got \[2, 4\]", call(x, x[:, :4], a)),
        (r"policy_loss: advantages must have the shape of logp, \[2, 5\], or one element per sequence, \[2\], got \[5\]", call(x, x, x[0])),
        (r"policy_loss: is_weights must have the shape of logp.*or one element per sequence", call(x, x, a, is_weights=x.T)),
        (r"policy_loss: logp must be \[B, T\], or \[N\] with cu_seqlens, got \[5\]", call(x[0], x[0], a)),
        (r"policy_loss: logp must be float32.*got torch.int64; convert it", call(x.long(), x, a)),
        (r"policy_loss: logp and advantages must both be float64 or neither.*convert one", call(x, x, a.double())),
        (r"policy_loss: mask must have the shape of logp", call(x, x, a, x[:, :4])),
        (r"policy_loss: ratio must be one of 'token', 'sequence', 'sequence_token', got 'gspo'", call(x, x, a, ratio="gspo")),
        (r"policy_loss: surrogate must be one of 'clip'", call(x, x, a, surrogate="ppo")),
        (r"policy_loss: kl must be one of 'k1', 'k2', 'k3', 'abs', got 'k3\+'", call(x, x, a, kl="k3+", ref_logp=x)),
        (r"policy_loss: kl_grad must be one of", call(x, x, a, kl_grad="score")),
        (r"policy_loss: ref_logp must be given for kl='k3', got None; pass it, or kl=None", call(x, x, a, kl="k3")),
        (r"policy_loss: clip_low must be a finite number in \[0, inf\], got -0.1", call(x, x, a, clip_low=-0.1)),
        (r"policy_loss: dual_clip must be greater than 1 or None, got 1.0", call(x, x, a, dual_clip=1.0)),
        (r"policy_loss: log_ratio_clamp must be greater than 0 or None, got 0", call(x, x, a, log_ratio_clamp=0)),
        (r"policy_loss: agg must be one of 'token_mean'.*got 'token-mean'", call(x, x, a, agg="token-mean")),
        (r"policy_loss: denom must be None for agg='token_sum'.*use agg='token_mean'", call(x, x, a, agg="token_sum", denom=3)),
        (r"policy_loss: denom must be greater than 0, got 0; pass max\(count, 1\)", call(x, x, a, denom=0)),
        (r"policy_loss: denom must be a number or a tensor with one element, got \[2\]", call(x, x, a, denom=a)),
        (r"policy_loss: denom must be given for agg='seq_mean_token_sum_norm' with cu_seqlens.*pass sequences", call(x[0], x[0], x[0], agg="seq_mean_token_sum_norm", cu_seqlens=torch.tensor([0, 5]))),
        (r"policy_loss: cu_seqlens must start at 0 and end at the number of tokens, 5", call(x[0], x[0], x[0], cu_seqlens=torch.tensor([0, 4]))),
        (r"policy_loss: impl='cuda' cannot run.*available on cpu: .*reference", call(x, x, a, impl="cuda")),
    ]  # fmt: skip
    for message, bad in cases:
        with pytest.raises(ValueError, match=message):
            bad()
    with pytest.raises(TypeError, match=r"policy_loss: old_logp must be a torch.Tensor, got list"):
        fastrl.policy_loss(x, [1.0], a)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"policy_loss: clip_high must be a number, got str"):
        fastrl.policy_loss(x, x, a, clip_high="0.2")  # type: ignore[arg-type]


def test_direct_calls_of_the_operator_are_checked() -> None:
    """The C++ side does not trust its caller."""
    x = torch.zeros(2, 5)
    numbers, choices = [0.2, 0.2, 3.0, 2.0, 20.0, 0.1, 20.0, 10.0, 0.1], [0, 0, 2, 0, 0]

    def call(**changes: Any) -> None:
        arguments = {
            "logp": x, "old_logp": x, "advantages": x, "mask": None, "is_weights": None, "ref_logp": None,
            "entropy": None, "cu_seqlens": None, "denom_tensor": None, "denom": 0.0, "numbers": numbers,
            "choices": choices, "grad_logp": True, "grad_entropy": False,
        }  # fmt: skip
        policy_loss_op["cpu"](*(arguments | changes).values())

    call()
    for changes, message in (
        ({"old_logp": x[:, :4]}, "old_logp has another shape"),
        ({"advantages": torch.zeros(3)}, "advantages has another shape"),
        ({"advantages": torch.zeros(2, 1).expand(2, 4)}, "advantages has another shape"),
        ({"ref_logp": x.double()}, "ref_logp .*float64 or neither"),
        ({"mask": x[:1]}, "mask has another shape"),
        ({"numbers": numbers[:3]}, "9 numbers"),
        ({"choices": [0, 9, 0, 0, 0]}, "out of range"),
        ({"choices": [0, 0, 0, 0, 7]}, "no such aggregation"),
        ({"grad_entropy": True}, "no entropy"),
        ({"denom_tensor": torch.zeros(2, dtype=torch.float64)}, "one float64 element"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "must be"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(**changes)


def test_named_gives_views(impl: str) -> None:
    x = torch.zeros(2, 5)
    out = fastrl.policy_loss(x, x, torch.zeros(2), impl=impl)
    named = out.named()
    assert tuple(named) == fastrl.POLICY_METRICS
    assert all(value.shape == () for value in named.values())
    assert metric(out, "tokens") == 10
