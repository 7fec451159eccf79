"""``fastrl.group_advantages``: hand-worked values, the rules of DESIGN section 4, and the kernels against the reference."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import fastrl
from fastrl.ops.group_advantages.op import BASELINES, SCALES, group_advantages_op
from tests.helpers import (
    DTYPES,
    SHAPES,
    assert_close,
    masks,
    poisoned,
    same_bits,
    strided,
    thinned,
    with_threads,
)

PROMPT = torch.tensor([0.9, 0.7, 0.2, 0.5])
INF, NAN = float("inf"), float("nan")


def one_group(rewards: Any, impl: str = "auto", **options: Any) -> Tensor:
    rewards = torch.as_tensor(rewards)
    return fastrl.group_advantages(
        rewards, torch.zeros(len(rewards), dtype=int), impl=impl, **options
    )


def reference(rewards: Tensor, groups: Tensor, **options: Any) -> Tensor:
    """The definition in float64."""
    return fastrl.group_advantages(rewards.double(), groups, impl="reference", **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scale": "none"}, (0.325, 0.125, -0.375, -0.075)),
        ({"ddof": 0, "eps": 1e-8}, (1.2568, 0.4834, -1.4501, -0.2900)),
        ({"ddof": 1, "eps": 1e-6}, (1.0884, 0.4186, -1.2558, -0.2512)),
        ({}, (1.0884, 0.4186, -1.2558, -0.2512)),
        ({"baseline": "leave_one_out", "scale": "none"}, (0.4333, 0.1667, -0.5, -0.1)),
        # mean 0.575: 0.325 / 0.575 and so on
        ({"scale": "mean", "eps": 0.0}, (0.5652, 0.2174, -0.6522, -0.1304)),
        ({"baseline": "none", "scale": "none"}, (0.9, 0.7, 0.2, 0.5)),
        # std 0.298608
        ({"baseline": "none", "eps": 0.0}, (3.0140, 2.3442, 0.6698, 1.6744)),
    ],
)  # fmt: skip
def test_hand_worked_values(
    impl: str, options: dict[str, Any], expected: tuple[float, ...]
) -> None:
    got = one_group(PROMPT, impl, **options)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(expected, abs=5e-5)


def test_hand_worked_length_weighted(impl: str) -> None:
    """Lengths 1 and 3: b = (1 * 1 + 3 * 0) / 4."""
    mask = torch.tensor([[0, 1, 0], [1, 1, 1]])
    got = one_group([1.0, 0.0], impl, baseline="length_weighted", scale="none", mask=mask)
    assert got.tolist() == [[0.0, 0.75, 0.0], [-0.25, -0.25, -0.25]]


def test_hand_worked_batch_std(impl: str) -> None:
    """Groups (0, 2) and (4, 6): batch variance (9 + 1 + 1 + 9) / 4 = 5 about the batch's mean, not the groups'."""
    got = fastrl.group_advantages(
        torch.tensor([0.0, 2.0, 4.0, 6.0]), torch.tensor([0, 0, 1, 1]),
        scale="batch_std", ddof=0, eps=0.0, impl=impl,
    )  # fmt: skip
    assert got.tolist() == pytest.approx([s / math.sqrt(5) for s in (-1, 1, -1, 1)])


def test_hand_worked_two_objectives(impl: str) -> None:
    """Each objective is normalised by itself: a reward a hundred times larger weighs no more."""
    rewards = torch.tensor([[0.0, 300.0], [1.0, 100.0]])
    got = one_group(rewards, impl, weights=[1.0, 0.25], eps=0.0)
    assert got.tolist() == pytest.approx(
        [(-1 + 0.25) * math.sqrt(0.5), (1 - 0.25) * math.sqrt(0.5)]
    )


def test_hand_worked_token_rewards(impl: str) -> None:
    """Scores 1 + 2 and 1 with the mask, 1 + 2 and 1 + 9 without."""
    rewards = torch.tensor([[1.0, 2.0], [1.0, 9.0]])
    mask = torch.tensor([[1, 1], [1, 0]])
    masked = one_group(rewards, impl, scale="none", mask=mask)
    assert masked.tolist() == [[1.0, 1.0], [-1.0, 0.0]]
    assert one_group(rewards, impl, scale="none").tolist() == [-3.5, 3.5]


@pytest.mark.parametrize("scale", SCALES)
def test_leave_one_out_is_the_score_over_the_mean_of_the_others(impl: str, scale: str) -> None:
    scores = torch.randn(7)
    others = torch.stack([(scores.sum() - s) / 6 for s in scores])
    centred = one_group(scores, impl, baseline="leave_one_out", scale="none")
    torch.testing.assert_close(centred, scores - others)
    by_mean = one_group(scores, impl, scale=scale)
    torch.testing.assert_close(
        one_group(scores, impl, baseline="leave_one_out", scale=scale), by_mean * 7 / 6
    )


def random_case(
    num_samples: int, dtype: torch.dtype, form: str
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Rewards in one of three forms with some not scored, ragged unsorted groups, and the options the form needs."""
    groups = torch.randint(0, max(1, num_samples // 3), (num_samples,)) * 10**12 - 5 * 10**12
    shape = {"scores": (num_samples,), "objectives": (num_samples, 3), "tokens": (num_samples, 37)}
    rewards = torch.randn(shape[form]).to(dtype)
    if form != "tokens":
        rewards[torch.rand(rewards.shape) < 0.1] = NAN
    options: dict[str, Any] = {"valid": torch.rand(num_samples) < 0.9}
    if form == "objectives":
        options["weights"] = [0.5, 2.0, -1.0]
    return rewards, groups, options


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["scores", "objectives", "tokens"])
def test_against_reference(impl: str, form: str, dtype: torch.dtype) -> None:
    for num_samples, (baseline, scale), ddof, singleton in zip(
        itertools.cycle((1, 2, 9, 20 if impl == "triton" else 50)),
        itertools.product(BASELINES, SCALES),
        itertools.cycle((0, 1, 1)),
        itertools.cycle(("zero", "raw", "raw", "zero", "raw")),
    ):
        rewards, groups, extra = random_case(num_samples, dtype, form)
        options = {
            "baseline": baseline,
            "scale": scale,
            "ddof": ddof,
            "eps": 1e-4,
            "singleton": singleton,
        }
        if scale == "mean":  # a mean near 0 makes the result as large as its rounding error
            rewards = rewards.abs()
        for name, mask in thinned(impl, masks((num_samples, 37)), every=2):
            if mask is None and baseline == "length_weighted":
                continue
            got = fastrl.group_advantages(rewards, groups, mask=mask, impl=impl, **options, **extra)
            expected = reference(rewards, groups, mask=mask, **options, **extra)
            assert got.shape == (rewards.shape[:1] if mask is None else mask.shape), name
            assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert_close(got, expected, dtype)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-2, 2), st.sampled_from([-1.0, 0.0, 0.1, 0.5, 1e4, NAN]), st.booleans()), max_size=40),
    st.sampled_from(["mean", "leave_one_out", "none"]),
    st.sampled_from(list(SCALES)),
    st.integers(0, 1),
    st.sampled_from(["zero", "raw"]),
    st.sampled_from([0.0, 1e-6]),
)  # fmt: skip
def test_any_groups_against_reference(
    samples: list[tuple[int, float, bool]], baseline: str, scale: str, ddof: int, singleton: str, eps: float,
) -> None:  # fmt: skip
    groups = torch.tensor([g for g, _, _ in samples], dtype=torch.int64)
    rewards = torch.tensor([r for _, r, _ in samples], dtype=torch.float64)
    valid = torch.tensor([v for _, _, v in samples], dtype=torch.bool)
    options = {
        "baseline": baseline,
        "scale": scale,
        "ddof": ddof,
        "singleton": singleton,
        "eps": eps,
    }
    got = fastrl.group_advantages(rewards, groups, valid=valid, **options)
    expected = reference(rewards, groups, valid=valid, **options)
    torch.testing.assert_close(got, expected, equal_nan=True, atol=1e-9, rtol=1e-9)


# ---- the rules of DESIGN section 4 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_rule_1_masked_tokens_have_no_influence(impl: str, poison: float) -> None:
    for shape in thinned(impl, SHAPES, every=2):
        rewards, groups = torch.randn(shape), torch.arange(shape[0]) % 2
        for name, mask in masks(shape):
            clean = fastrl.group_advantages(rewards, groups, mask=mask, impl=impl)
            got = fastrl.group_advantages(
                poisoned(rewards, mask, poison), groups, mask=mask, impl=impl
            )
            assert same_bits(got, clean), name
            if mask is not None:
                assert (got[mask == 0] == 0).all()


@pytest.mark.parametrize("poison", [NAN, INF, 1e30])
@pytest.mark.parametrize("scale", SCALES)
def test_rule_1_invalid_samples_have_no_influence(impl: str, scale: str, poison: float) -> None:
    rewards, groups = torch.rand(12), torch.arange(12) % 3
    valid = torch.ones(12, dtype=torch.int64)
    valid[[0, 4, 5]] = 0
    got = fastrl.group_advantages(
        torch.where(valid != 0, rewards, poison), groups, valid=valid, scale=scale, impl=impl
    )
    keep = valid != 0
    alone = fastrl.group_advantages(rewards[keep], groups[keep], scale=scale, impl=impl)
    assert same_bits(got[keep], alone)
    assert got[~keep].tolist() == [0.0] * 3
    for flags in (keep, keep.float(), torch.where(keep, -0.5, -0.0)):
        again = fastrl.group_advantages(rewards, groups, valid=flags, scale=scale, impl=impl)
        assert same_bits(again, got)


@pytest.mark.parametrize("scale", SCALES)
def test_nan_rewards_are_not_scored(impl: str, scale: str) -> None:
    rewards, groups = torch.rand(12), torch.arange(12) % 3
    scored = torch.rand(12) < 0.7
    got = fastrl.group_advantages(torch.where(scored, rewards, NAN), groups, scale=scale, impl=impl)
    assert same_bits(
        got, fastrl.group_advantages(rewards, groups, valid=scored, scale=scale, impl=impl)
    )
    assert (got[~scored] == 0).all()


def test_a_nan_objective_leaves_the_others(impl: str) -> None:
    rewards = torch.rand(4, 2)
    rewards[1, 0] = NAN
    first = one_group(rewards[:, 0], impl)
    second = one_group(rewards[:, 1], impl)
    got = one_group(rewards, impl, weights=torch.tensor([2.0, 3.0]))
    torch.testing.assert_close(got, 2 * first + 3 * second)
    assert got[1] == 3 * second[1]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("baseline", BASELINES)
def test_rule_2_empty(impl: str, baseline: str, scale: str) -> None:
    options: dict[str, Any] = {"baseline": baseline, "scale": scale, "impl": impl}
    for shape in ((0, 5), (3, 0), (0, 0)):
        groups, mask = torch.arange(shape[0]), torch.ones(shape)
        for rewards in (torch.zeros(shape[0]), torch.zeros(shape)):
            got = fastrl.group_advantages(rewards, groups, mask=mask, **options)
            assert got.shape == shape
    got = fastrl.group_advantages(
        torch.rand(4), torch.tensor([0, 0, 1, 1]), mask=torch.zeros(4, 7), **options
    )
    assert (got == 0).all()
    if baseline != "length_weighted":
        got = fastrl.group_advantages(torch.zeros(0), [], **options)
        assert got.shape == (0,)
        got = fastrl.group_advantages(
            torch.rand(4), torch.zeros(4, dtype=int), valid=torch.zeros(4), **options
        )
        assert got.tolist() == [0.0] * 4
        got = one_group(
            torch.zeros(4, 0), **options
        )  # token rewards of no tokens: every score is 0
        assert got.tolist() == [0.0] * 4
        got = one_group(torch.zeros(4, 0), weights=[], **options)
        assert got.tolist() == [0.0] * 4


# Without a baseline and a deviation nothing is compared: the reward itself is the advantage.
COMPARING = [
    (baseline, scale)
    for baseline, scale in itertools.product(BASELINES, SCALES)
    if baseline != "none" or scale not in ("mean", "none")
]


@pytest.mark.parametrize(("baseline", "scale"), COMPARING)
def test_rule_3_equal_rewards_give_exactly_zero(impl: str, baseline: str, scale: str) -> None:
    """Seven times 0.1 in float32 gives -7.4e-3 where the rounded mean is divided by the eps."""
    groups, mask = torch.arange(14) % 2, torch.ones(14, 3)
    call = partial(fastrl.group_advantages, groups=groups, mask=mask, impl=impl)
    cases = itertools.product((0.1, -0.3, 0.0, 1e4, 1e-30), DTYPES, (1e-6, 0.0))
    for value, dtype, eps in thinned(impl, cases):
        rewards = torch.full((14,), value, dtype=dtype)
        got = call(rewards, baseline=baseline, scale=scale, eps=eps)
        assert (got == 0).all(), (value, dtype, eps)


def test_without_a_baseline_equal_rewards_pass(impl: str) -> None:
    assert one_group([0.5] * 3, impl, baseline="none", scale="none").tolist() == [0.5] * 3
    assert one_group([0.5] * 3, impl, baseline="none", scale="mean", eps=0.0).tolist() == [1.0] * 3
    got = fastrl.group_advantages(
        torch.tensor([1.0, 1.0, 3.0, 3.0]), torch.tensor([0, 0, 1, 1]),
        baseline="none", scale="batch_std", ddof=0, eps=0.0, impl=impl,
    )  # fmt: skip
    assert got.tolist() == [1.0, 1.0, 3.0, 3.0]


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "none"])
def test_rule_3_a_group_of_one(impl: str, baseline: str) -> None:
    """Counted after removing what is not scored: the groups are (2), (3, NaN) and (5, 6)."""
    rewards, groups = torch.tensor([2.0, 3.0, NAN, 5.0, 6.0]), torch.tensor([7, 8, 8, 9, 9])

    def first_three(**options: Any) -> list[float]:
        got = fastrl.group_advantages(rewards, groups, baseline=baseline, impl=impl, **options)
        return got[:3].tolist()

    assert first_three() == [0.0, 0.0, 0.0]
    assert first_three(singleton="raw", scale="none") == [2.0, 3.0, 0.0]
    for scale in ("std", "batch_std", "mean"):
        got = first_three(singleton="raw", scale=scale, eps=0.25)
        assert got == pytest.approx([2 / 1.25, 3 / 1.25, 0.0])
    with pytest.raises(ValueError, match=r'singleton="error".*the group of sample 0; sample more'):
        first_three(singleton="error")
    last = torch.tensor([3, 4, 1, 2])
    with pytest.raises(ValueError, match="the group of sample 2"):
        fastrl.group_advantages(rewards[last], groups[last], singleton="error", impl=impl)
    two = fastrl.group_advantages(
        rewards[last], groups[last], valid=torch.tensor([1, 1, 0, 1]), singleton="error", impl=impl
    )
    assert (two != 0).tolist() == [True, True, False, False]
    pair = fastrl.group_advantages(rewards[3:], groups[3:], singleton="error", impl=impl)
    assert pair.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-5)
    assert fastrl.group_advantages(rewards[:0], groups[:0], singleton="error", impl=impl).shape == (
        0,
    )


@pytest.mark.parametrize("offset", [1e4, 1e6])
def test_rule_4_variance_survives_a_large_offset(impl: str, offset: float) -> None:
    """In float32 E[x^2] - E[x]^2 is all rounding error here."""
    steps = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    torch.testing.assert_close(one_group(steps + offset, impl), one_group(steps, impl))
    torch.testing.assert_close(
        one_group(steps + offset, impl, scale="batch_std"), one_group(steps, impl)
    )


@pytest.mark.parametrize("scale", ["std", "none"])
def test_rule_4_leave_one_out_with_equal_others(impl: str, scale: str) -> None:
    """One-pass variances of the others gave another trainer an advantage of -2075 here."""
    rewards = torch.tensor([0.0] + [0.95] * 7)
    got = one_group(rewards, impl, baseline="leave_one_out", scale=scale)
    others = 0.95 - 6 * 0.95 / 7
    std = 1.0 if scale == "none" else float(rewards.double().std()) + 1e-6
    assert got.tolist() == pytest.approx([-0.95 / std] + [others / std] * 7, rel=1e-6)


def test_rule_5_same_bits_for_any_number_of_threads() -> None:
    """Enough samples, groups and tokens for every parallel loop to be cut."""
    groups = torch.randint(0, 3000, (40000,))
    scores, mask = torch.randn(40000), torch.rand(40000, 20) < 0.7
    tokens = torch.randn(4000, 300)

    def results() -> Tensor:
        call = partial(fastrl.group_advantages, scores, groups, mask=mask)
        parts = (call(), call(scale="batch_std"), call(baseline="length_weighted"))
        return torch.cat(
            [*(x.flatten() for x in parts), fastrl.group_advantages(tokens, groups[:4000])]
        )

    assert same_bits(with_threads(1, results), with_threads(2, results))


@pytest.mark.parametrize("scale", ["std", "mean", "none"])
def test_rule_5_same_bits_for_a_group_alone_and_among_others(impl: str, scale: str) -> None:
    rewards, groups = torch.randn(60), torch.randint(0, 9, (60,))
    together = fastrl.group_advantages(rewards, groups, scale=scale, impl=impl)
    for g in range(9):
        alone = fastrl.group_advantages(
            rewards[groups == g], groups[groups == g], scale=scale, impl=impl
        )
        assert same_bits(together[groups == g], alone)


def test_rule_5_same_bits_for_any_padding(impl: str) -> None:
    """Token rewards and mask shifted along the row, as between left and right padding."""
    rewards, groups = torch.randn(6, 40), torch.tensor([0, 1, 0, 1, 1, 0])
    mask = torch.rand(6, 40) < 0.7
    narrow = fastrl.group_advantages(rewards, groups, mask=mask, impl=impl)
    for left, right in ((0, 25), (3, 0), (17, 8), (64, 64)):
        wide = fastrl.group_advantages(
            torch.nn.functional.pad(rewards, (left, right), value=NAN), groups,
            mask=torch.nn.functional.pad(mask, (left, right)), impl=impl,
        )  # fmt: skip
        if impl == "reference":
            torch.testing.assert_close(wide[:, left : left + 40], narrow)
        else:
            assert same_bits(wide[:, left : left + 40], narrow)


def test_permuting_samples_permutes_the_result(impl: str) -> None:
    rewards, groups = torch.randn(50), torch.randint(-4, 4, (50,))
    order = torch.randperm(50)
    for options in ({}, {"baseline": "leave_one_out"}, {"scale": "batch_std"}):
        got = fastrl.group_advantages(rewards[order], groups[order], impl=impl, **options)
        expected = fastrl.group_advantages(rewards, groups, impl=impl, **options)[order]
        torch.testing.assert_close(got, expected)


def test_only_equality_of_group_numbers_matters(impl: str) -> None:
    rewards, groups = torch.randn(40), torch.randint(0, 8, (40,))
    expected = fastrl.group_advantages(rewards, groups, impl=impl)
    names = torch.randperm(8)
    relabelled: list[Any] = [
        names[groups],
        groups - 100,
        groups * 10**15 - 2**60,
        -groups,
        torch.where(groups == 0, -(2**63), 2**63 - 1 - groups),
        groups.to(torch.int8),
        groups.to(torch.uint8),
        [f"uid-{g}" for g in groups.tolist()],
        groups.tolist(),
        groups.cpu().numpy(),
    ]
    for labels in relabelled:
        got = fastrl.group_advantages(rewards, labels, impl=impl)
        assert same_bits(got, expected)
    by_flag = fastrl.group_advantages(rewards, groups > 3, impl=impl)
    assert same_bits(by_flag, fastrl.group_advantages(rewards, (groups > 3).long(), impl=impl))


def test_rule_7_shapes_beyond_2_to_the_31() -> None:
    with FakeTensorMode():
        rewards, mask = torch.empty(2**16), torch.empty(2**16, 2**16, dtype=torch.bool)
        got = fastrl.group_advantages(rewards, torch.empty(2**16, dtype=torch.int64), mask=mask)
        assert got.shape == (2**16, 2**16)
        tokens = torch.empty(2**16, 2**16, dtype=torch.bfloat16)
        got = fastrl.group_advantages(tokens, torch.empty(2**16, dtype=torch.int32))
        assert got.shape == (2**16,)
        assert got.dtype == torch.float32


def test_rule_8_strides_do_not_matter_and_inputs_are_not_modified(impl: str) -> None:
    rewards, mask = torch.randn(6, 20), torch.rand(6, 20) < 0.7
    groups, valid = torch.tensor([0, 1, 0, 1, 1, 0]), torch.tensor([1, 1, 1, 0, 1, 1])
    inputs = (rewards, mask, groups, valid)
    before = [x.clone() for x in inputs]
    expected = fastrl.group_advantages(rewards, groups, valid=valid, mask=mask, impl=impl)
    weights = torch.rand(20)
    by_objective = fastrl.group_advantages(rewards, groups, weights=weights, impl=impl)
    layouts = itertools.product(strided(rewards), strided(mask))
    for odd_rewards, odd_mask in thinned(impl, layouts, every=2):
        got = fastrl.group_advantages(
            odd_rewards, groups.repeat_interleave(2)[::2], valid=valid.repeat_interleave(3)[::3],
            mask=odd_mask, impl=impl,
        )  # fmt: skip
        assert same_bits(got, expected)
        got = fastrl.group_advantages(
            odd_rewards, groups, weights=weights.repeat(2, 1).T[:, 0], impl=impl
        )
        assert same_bits(got, by_objective)
    column = torch.randn(6, 3)[:, 1]
    expanded = torch.tensor([[1, 0, 1]]).expand(6, 3)
    assert same_bits(
        fastrl.group_advantages(column, groups, mask=expanded, impl=impl),
        fastrl.group_advantages(column.clone(), groups, mask=expanded.clone(), impl=impl),
    )
    for x, y in zip(inputs, before):
        assert same_bits(x, y)


def test_rule_10_infinite_rewards_show(impl: str) -> None:
    rewards, groups = torch.tensor([1.0, INF, 3.0, 4.0, 5.0]), torch.tensor([0, 0, 0, 1, 1])
    for options in ({}, {"scale": "none"}, {"baseline": "leave_one_out"}, {"scale": "mean"}):
        got = fastrl.group_advantages(rewards, groups, impl=impl, **options)
        assert not got[:3].isfinite().any()
        assert got[3:].isfinite().all()
    got = fastrl.group_advantages(rewards, groups, baseline="none", scale="none", impl=impl)
    assert got.tolist() == rewards.tolist()
    got = fastrl.group_advantages(rewards, groups, scale="batch_std", impl=impl)
    assert not got.isfinite().any()
    assert not one_group([INF, INF], impl).isfinite().any()


def test_results_are_constants(impl: str) -> None:
    rewards = torch.randn(4, requires_grad=True)
    assert not one_group(rewards, impl).requires_grad
    weights = torch.ones(2, requires_grad=True)
    assert not one_group(torch.randn(4, 2), impl, weights=weights).requires_grad


def test_long_rows_of_every_mask_dtype(impl: str) -> None:
    scores, groups = torch.randn(4), torch.tensor([0, 0, 1, 1])
    mask = torch.rand(4, 1037) < 0.5
    expected = fastrl.group_advantages(scores, groups, mask=mask, impl=impl)
    assert torch.equal(expected != 0, mask)
    for dtype in (
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.half,
        torch.float,
        torch.double,
    ):
        flags = torch.where(mask, 3, 0).to(dtype)
        if dtype.is_floating_point:
            flags = -flags  # -0.0 is masked like 0.0
        got = fastrl.group_advantages(scores, groups, mask=flags, impl=impl)
        assert same_bits(got, expected)


# ---- the operator ---------------------------------------------------------------------------------------------------


def test_opcheck() -> None:
    groups = torch.tensor([5, -1, 5, -1])
    mask, valid = torch.rand(4, 9) < 0.5, torch.tensor([True, True, True, False])
    weights = torch.rand(3, dtype=torch.float64)
    for arguments in (
        (torch.randn(4), groups, None, None, None, 0, 0, 1, 1e-6, False),
        (torch.randn(4, 3), groups, valid, weights, mask, 2, 1, 0, 1e-6, True),
        (torch.randn(4, 9).double(), groups, valid, None, mask, 1, 2, 1, 0.0, False),
        (torch.randn(4, 9).bfloat16(), groups, None, None, None, 3, 3, 1, 0.0, False),
    ):
        torch.library.opcheck(group_advantages_op["cpu"], arguments)


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_compile_fullgraph_with_dynamic_shapes(implementation: str) -> None:
    compiles = CompileCounter()

    def both(rewards: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
        first = fastrl.group_advantages(rewards[:, 0], groups, mask=mask, impl=implementation)
        second = fastrl.group_advantages(
            rewards, groups, weights=[1.0, 2.0], scale="batch_std", impl=implementation
        )
        return first + second.unsqueeze(1)

    torch._dynamo.reset()
    counted = torch.compile(both, fullgraph=True, dynamic=True, backend=compiles)
    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_samples, length in ((8, 30), (6, 17), (12, 55)):
        rewards, groups = torch.randn(num_samples, 2), torch.arange(num_samples) % 3
        mask = torch.rand(num_samples, length) < 0.5
        counted(rewards, groups, mask)
        torch.testing.assert_close(compiled(rewards, groups, mask), both(rewards, groups, mask))
    assert compiles.frame_count == 1


def test_errors_name_op_argument_expected_got_and_remedy() -> None:
    r, g = torch.zeros(4), torch.zeros(4, dtype=torch.int64)
    cases: list[tuple[str, Any]] = [
        (r"group_advantages: rewards must be float32.*got torch.int64; convert it", lambda: fastrl.group_advantages(r.long(), g)),
        (r"group_advantages: rewards must be \[N\], or \[N, K\] with weights.*got \[1, 1, 4\]", lambda: fastrl.group_advantages(r[None, None], g)),
        (r"group_advantages: groups must have the shape of one group per sample, \[4\], got \[3\]", lambda: fastrl.group_advantages(r, g[:3])),
        (r"group_advantages: groups must have the shape of one group per sample, \[4\], got \[2\]", lambda: fastrl.group_advantages(r, ["a", "b"])),
        (r"group_advantages: groups must be integers or a sequence of labels, got a tensor of torch.float32; pass fastrl.group_ids", lambda: fastrl.group_advantages(r, r)),
        (r"group_advantages: baseline must be one of 'mean', .*got 'median'", lambda: fastrl.group_advantages(r, g, baseline="median")),
        (r"group_advantages: scale must be one of 'std', .*got 'var'", lambda: fastrl.group_advantages(r, g, scale="var")),
        (r"group_advantages: singleton must be one of 'zero', .*got 'nan'", lambda: fastrl.group_advantages(r, g, singleton="nan")),
        (r"group_advantages: ddof must be 0 \(population\) or 1 \(sample\), got 2", lambda: fastrl.group_advantages(r, g, ddof=2)),
        (r"group_advantages: eps must be a finite number in \[0, inf\], got -1", lambda: fastrl.group_advantages(r, g, eps=-1)),
        (r'group_advantages: baseline="length_weighted" needs mask \[N, T\] for the lengths, got None; pass', lambda: fastrl.group_advantages(r, g, baseline="length_weighted")),
        (r"group_advantages: valid must have the shape of groups, \[4\], got \[3\]", lambda: fastrl.group_advantages(r, g, valid=g[:3])),
        (r"group_advantages: mask must be \[N, T\] with N = 4, got \[4\]; .*valid=", lambda: fastrl.group_advantages(r, g, mask=g)),
        (r"group_advantages: mask must be \[N, T\] with N = 4, got \[3, 4\]", lambda: fastrl.group_advantages(r, g, mask=torch.ones(3, 4))),
        (r"group_advantages: mask must have the shape of the token rewards, \[4, 2\], got \[4, 3\]", lambda: fastrl.group_advantages(r[:, None].expand(4, 2), g, mask=torch.ones(4, 3))),
        (r"group_advantages: mask must be bool, integer or floating, got torch.complex64", lambda: fastrl.group_advantages(r, g, mask=torch.ones(4, 3, dtype=torch.complex64))),
        (r"group_advantages: with weights \[K\] rewards must be \[N, K\], got weights \[1\] and rewards \[4\]; give one weight", lambda: fastrl.group_advantages(r, g, weights=[1.0])),
        (r"got weights \[3\] and rewards \[4, 2\]", lambda: fastrl.group_advantages(r[:, None].expand(4, 2), g, weights=torch.ones(3))),
        (r"group_advantages: weights\[1\] must be a finite number", lambda: fastrl.group_advantages(r[:, None].expand(4, 2), g, weights=[1.0, INF])),
        (r"impl must be one of auto", lambda: fastrl.group_advantages(r, g, impl="fast")),
    ]  # fmt: skip
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match=r"rewards must be a torch.Tensor, got list"):
        fastrl.group_advantages([1.0], g)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"mask must be a torch.Tensor, got list"):
        fastrl.group_advantages(r, g, mask=[1])  # type: ignore[arg-type]


def test_direct_calls_of_the_operator_are_checked() -> None:
    r, g, m = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64), torch.ones(4, 2)
    numbers = (0, 0, 1, 1e-6, False)
    w = torch.ones(2, dtype=torch.float64)
    for arguments in (
        (r, g[:3], None, None, None, *numbers),
        (r, g.int(), None, None, None, *numbers),
        (r, g, g[:2], None, None, *numbers),
        (r, g, None, w[:1], None, *numbers),
        (r, g, None, w.float(), None, *numbers),
        (r[:, 0], g, None, w, None, *numbers),
        (r, g, None, None, m[:, :1], *numbers),
        (r, g, None, None, m[:2], *numbers),
        (r, g, None, None, None, 4, 0, 1, 1e-6, False),
        (r, g, None, None, None, 2, 0, 1, 1e-6, False),
        (r, g, None, None, None, 0, 0, 2, 1e-6, False),
    ):
        with pytest.raises(RuntimeError, match="fastrl: "):
            group_advantages_op["cpu"](*arguments)
