"""``fastrl.policy_loss``: hand-worked values, equivalences, and every option of the kernels against the reference."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fastrl
from fastrl._losses import AGGREGATIONS
from fastrl.ops.policy_loss.op import KL_GRADS, KLS, RATIOS, SURROGATES
from tests.helpers import DTYPES, SHAPES, assert_close, leaf, masks
from tests.ops.losses import Batch, batch, metric, run_policy


def loss_and_grad(impl: str, logp: list[float], *rest: Any, **options: Any) -> tuple[float, list]:
    """One row; the loss and its gradient, rounded."""
    x = torch.tensor([logp], requires_grad=True)
    out = fastrl.policy_loss(x, *rest, impl=impl, **options)
    out.loss.backward()
    assert x.grad is not None
    return round(out.loss.item(), 6), [round(v, 6) for v in x.grad[0].tolist()]


LN2 = math.log(2)
ZERO = torch.zeros(1, 3)
# Ratios 2, 1 and 1/2 against an old policy of log-probability 0.
DOUBLE_SAME_HALF = [LN2, 0.0, -LN2]


def test_hand_worked_clip(impl: str) -> None:
    """A = 1: max(-2, -1.2) clipped, max(-1, -1), max(-1/2, -0.8): low ratios are not clipped when A > 0."""
    got = loss_and_grad(impl, DOUBLE_SAME_HALF, ZERO, torch.tensor([1.0]), agg="token_sum")
    assert got == (-1.2 - 1 - 0.5, [0.0, -1.0, -0.5])
    # A = -1: max(2, 1.2), 1, max(1/2, 0.8) clipped.
    got = loss_and_grad(impl, DOUBLE_SAME_HALF, ZERO, torch.tensor([-1.0]), agg="token_sum")
    assert got == (2 + 1 + 0.8, [2.0, 1.0, 0.0])


def test_hand_worked_asymmetric_clip_dual_clip_and_cap(impl: str) -> None:
    options = {"clip_low": 0.5, "clip_high": 0.25, "agg": "token_sum"}
    got = loss_and_grad(impl, DOUBLE_SAME_HALF, ZERO, torch.tensor([[1.0, 1.0, -1.0]]), **options)
    assert got == (-1.25 - 1 + 0.5, [0.0, -1.0, 0.5])  # 1/2 is the edge itself: it has the gradient
    got = loss_and_grad(
        impl, DOUBLE_SAME_HALF, ZERO, torch.tensor([-2.0]), dual_clip=1.5, agg="token_sum"
    )
    assert got == (3 + 2 + 1.6, [0.0, 2.0, 0.0])  # 2 * 2 is bounded by 1.5 * 2
    got = loss_and_grad(
        impl, DOUBLE_SAME_HALF, ZERO, torch.tensor([-1.0]), ratio_cap=1.5, agg="token_sum"
    )
    assert got == (1.5 + 1 + 0.8, [0.0, 1.0, 0.0])


def test_hand_worked_cap_below_the_edge_of_the_clip(impl: str) -> None:
    """rho 2 lies between the cap 1.5 and the edge 3: A < 0 takes L2 = 2, with its gradient, and A > 0 takes L1 = -1.5."""
    options = {"clip_high": 2.0, "ratio_cap": 1.5, "agg": "token_sum"}
    assert loss_and_grad(impl, [LN2], ZERO[:, :1], torch.tensor([-1.0]), **options) == (2.0, [2.0])
    assert loss_and_grad(impl, [LN2], ZERO[:, :1], torch.tensor([1.0]), **options) == (-1.5, [0.0])


def test_hand_worked_cispo_and_reinforce(impl: str) -> None:
    got = loss_and_grad(
        impl, DOUBLE_SAME_HALF, ZERO, torch.tensor([2.0]), surrogate="cispo", agg="token_sum"
    )
    assert got == (round(-2.4 * LN2 + 1.6 * LN2, 6), [-2.4, -2.0, -1.6])
    got = loss_and_grad(
        impl, DOUBLE_SAME_HALF, ZERO, torch.tensor([2.0]), surrogate="reinforce", agg="token_sum"
    )
    assert got == (0.0, [-2.0, -2.0, -2.0])


def test_hand_worked_sequence_ratios(impl: str) -> None:
    """Log-ratios ln 2 and 3 ln 2 have the mean 2 ln 2: every token has the ratio 4 and A -1 (no clip on that side)."""
    old, mask = torch.zeros(1, 3), torch.tensor([[1, 0, 1]])
    advantages = torch.tensor([[-1.0, 5.0, -3.0]])
    row = [LN2, 9.0, 3 * LN2]
    options = {"agg": "token_sum"}
    got = loss_and_grad(impl, row, old, advantages, mask, ratio="sequence", **options)
    assert got == (16.0, [8.0, 0.0, 8.0])  # the sum of both losses reaches each token by 1/2
    got = loss_and_grad(impl, row, old, advantages, mask, ratio="sequence_token", **options)
    assert got == (16.0, [4.0, 0.0, 12.0])
    got = loss_and_grad(
        impl, row, old, advantages, mask, ratio="sequence", log_ratio_clamp=LN2, **options
    )
    assert got == (
        8.0,
        [0.0, 0.0, 0.0],
    )  # exp(clamp(2 ln 2, +-ln 2)) = 2, beyond the clamp no gradient


@pytest.mark.parametrize(
    ("kl", "value", "slope"),
    [("k1", LN2, 1.0), ("k2", LN2**2 / 2, LN2), ("abs", LN2, 1.0), ("k3", 0.5 + LN2 - 1, 0.5)],
)
def test_hand_worked_kl(impl: str, kl: str, value: float, slope: float) -> None:
    """logp - ref_logp = ln 2, ratio 2, no advantage: the loss is 10 KL."""
    logp, old, ref = [0.0], torch.tensor([[-LN2]]), torch.tensor([[-LN2]])
    options = {"ref_logp": ref, "kl": kl, "kl_coef": 10.0}
    for kl_grad, loss, grad in (
        ("pathwise", value, slope),
        ("k2", value, LN2),
        ("ratio", 2 * value, 2 * slope + 2 * value),
    ):
        got = loss_and_grad(impl, logp, old, torch.tensor([0.0]), kl_grad=kl_grad, **options)
        assert got[0] == pytest.approx(10 * loss, abs=2e-5)
        assert got[1][0] == pytest.approx(10 * grad, abs=2e-5)


def test_hand_worked_kl_clamps(impl: str) -> None:
    """k3 ends at kl_clamp, its input at kl_input_clamp; beyond either the gradient is 0."""
    logp, old = [0.0, 0.0, 30.0], torch.zeros(1, 3)
    ref = torch.tensor([[2.5, 3.0, 0.0]])
    loss, grad = loss_and_grad(
        *(impl, logp, old, torch.tensor([0.0])),
        ref_logp=ref,
        kl="k3",
        kl_coef=1.0,
        agg="token_sum",
        kl_clamp=10.0,
    )
    assert loss == pytest.approx(math.exp(2.5) - 3.5 + 10 + 10, abs=1e-4)
    assert grad == pytest.approx([1 - math.exp(2.5), 0, 0], abs=1e-4)
    loss, grad = loss_and_grad(
        *(impl, logp, old, torch.tensor([0.0])),
        ref_logp=ref,
        kl="k3",
        kl_coef=1.0,
        agg="token_sum",
        kl_clamp=None,
        kl_input_clamp=2.75,
    )
    expected = math.exp(2.5) - 3.5 + math.exp(2.75) - 3.75 + math.exp(-2.75) + 1.75
    assert loss == pytest.approx(expected, abs=1e-4)
    assert grad == pytest.approx([1 - math.exp(2.5), 0, 0], abs=1e-4)
    free, grad = loss_and_grad(
        *(impl, logp, old, torch.tensor([0.0])),
        ref_logp=ref,
        kl="k3",
        kl_coef=1.0,
        agg="token_sum",
        kl_clamp=None,
        kl_input_clamp=None,
    )
    expected = math.exp(2.5) - 3.5 + math.exp(3.0) - 4 + 29
    assert free == pytest.approx(expected, abs=1e-4)
    assert grad == pytest.approx([1 - math.exp(2.5), 1 - math.exp(3.0), 1.0], abs=1e-4)


def test_hand_worked_entropy_and_is_weights(impl: str) -> None:
    entropy = torch.tensor([[3.0, 1.0]], requires_grad=True)
    logp = torch.zeros(1, 2, requires_grad=True)
    out = fastrl.policy_loss(
        *(logp, torch.zeros(1, 2), torch.tensor([1.0])),
        is_weights=torch.tensor([[0.5, 2.0]]),
        entropy=entropy,
        entropy_coef=0.1,
        impl=impl,
    )
    assert out.loss.item() == pytest.approx(-(0.5 + 2.0) / 2 - 0.1 * 2)
    out.loss.backward()
    assert logp.grad is not None and logp.grad.tolist() == [[-0.25, -1.0]]
    assert entropy.grad is not None
    assert entropy.grad[0].tolist() == pytest.approx([-0.05, -0.05])


def test_hand_worked_aggregations(impl: str) -> None:
    """Rows of 1, 3 and 0 valid tokens, each with loss 1 per token, in a width of 4."""
    logp, mask = (
        torch.zeros(3, 4),
        torch.tensor([[1, 0, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]]),
    )
    advantages = torch.tensor([-1.0, -2.0, -5.0])  # row sums 1 and 6
    expected = {
        "token_mean": (7 / 4, 7 / 10),
        "token_sum": (7.0, None),
        "seq_mean_token_sum": (7 / 2, 7 / 10),
        "seq_mean_token_mean": ((1 + 2) / 2, (1 + 2) / 10),
        "seq_mean_token_sum_norm": (7 / (2 * 4), 7 / 10),
    }
    for agg, (default, given) in expected.items():
        arguments = (logp, logp, advantages, mask)
        loss = fastrl.policy_loss(*arguments, agg=agg, impl=impl).loss.item()
        assert loss == pytest.approx(default)
        if given is not None:
            for denom in (10, 10.0, torch.tensor(10), torch.tensor([10.0])):
                out = fastrl.policy_loss(*arguments, agg=agg, denom=denom, impl=impl)
                assert out.loss.item() == pytest.approx(given)


def test_hand_worked_metrics(impl: str) -> None:
    """Ratios 2, 1/2, 4 and 1, one masked; dual clip 3."""
    logp = torch.tensor([[LN2, -LN2, 2 * LN2], [0.0, 7.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    advantages = torch.tensor([[1.0, -1.0, -1.0], [2.0, 9.0, 9.0]])
    entropy = torch.tensor([[1.0, 2.0, 3.0], [4.0, 100.0, 100.0]])
    out = fastrl.policy_loss(
        *(logp, torch.zeros(2, 3), advantages, mask),
        dual_clip=3.0,
        ref_logp=torch.zeros(2, 3),
        kl="k1",
        kl_coef=0.5,
        entropy=entropy,
        entropy_coef=0.25,
        impl=impl,
    )
    got = {name: round(value.item(), 5) for name, value in out.named().items()}
    assert got == {
        "tokens": 4,
        "sequences": 2,
        "nonfinite": 0,
        "clip_high": 1,  # ratio 2 with A > 0
        "clip_low": 1,  # ratio 1/2 with A < 0
        "clipped": 2,
        "dual_clip": 1,  # ratio 4 with A < 0
        "approx_kl": round(-2 * LN2, 5),
        "approx_kl3": round(2 + 0.5 + 4 + 1 - 4 - 2 * LN2, 5),
        "ref_kl": round(2 * LN2, 5),
        "entropy": 10,
        "ratio_sum": 7.5,
        "ratio_sq_sum": 21.25,
        "ratio_min": 0.5,
        "ratio_max": 4,
        "policy_term": round((-1.2 + 0.8 + 3 - 2) / 4, 5),
        "kl_term": round(2 * LN2 / 4, 5),
        "entropy_term": 2.5,
    }
    assert out.metrics.dtype == torch.float64
    assert not out.metrics.requires_grad
    assert out.loss.item() == pytest.approx(0.6 / 4 + 0.5 * LN2 / 2 - 0.25 * 2.5, abs=1e-6)


# ---- equivalences ---------------------------------------------------------------------------------------------------


def test_on_policy_all_ratios_and_surrogates_have_the_policy_gradient(impl: str) -> None:
    """At old_logp = logp every gradient is that of REINFORCE, but through the mean only for per-sequence advantages."""
    logp, mask = -torch.rand(3, 40), torch.rand(3, 40) < 0.7
    advantages = torch.randn(3)
    grads = []
    for ratio, surrogate in itertools.product(RATIOS, SURROGATES):
        x = leaf(logp)
        fastrl.policy_loss(
            x, logp, advantages, mask, ratio=ratio, surrogate=surrogate, impl=impl
        ).loss.backward()
        grads.append(x.grad)
    for grad in grads[1:]:
        assert_close(grad, grads[0], torch.float32)


def test_kl_ratio_weight_is_one_on_policy_and_adds_the_score_function(impl: str) -> None:
    """NeMo-RL multiplies by exp(logp - sg(logp)): kl_grad="ratio" with old_logp = logp."""
    logp, ref = -torch.rand(2, 30), -torch.rand(2, 30)
    x = leaf(logp)
    out = fastrl.policy_loss(
        *(x, logp, torch.zeros(2)), ref_logp=ref, kl="k3", kl_grad="ratio", kl_coef=1.0, impl=impl
    )
    out.loss.backward()
    y = ref - logp
    assert_close(x.grad, (y.exp() - y - 1 + 1 - y.exp()).double() / 60, torch.float32)


def test_advantages_per_sequence_equal_advantages_per_token(impl: str) -> None:
    data = batch((3, 70))
    mask = torch.rand(3, 70) < 0.7
    per_row, weights = torch.randn(3), torch.rand(3)
    for ratio in RATIOS:
        results = []
        for shape in ((3,), (3, 70)):
            options = {
                "ratio": ratio,
                "is_weights": weights.view(-1, *[1] * (len(shape) - 1)).expand(shape),
            }
            advantages = per_row.view(-1, *[1] * (len(shape) - 1)).expand(shape)
            results.append(run_policy(impl, data._replace(advantages=advantages), mask, **options))
            materialised = data._replace(advantages=advantages.contiguous())
            results.append(run_policy(impl, materialised, mask, **options))
        for other in results[1:]:
            for got, expected in zip(other, results[0]):
                assert_close(got, expected.double(), torch.float32)


def test_an_old_policy_far_away_is_clamped(impl: str) -> None:
    """Log-ratios of +-199: finite loss and gradient with the clamp, zero gradient beyond it, masked ones harmless."""
    old = torch.zeros(2, 40)
    logp = torch.zeros(2, 40)
    logp[0, :4] = torch.tensor([199.0, -199.0, 199.0, -199.0])
    advantages = torch.ones(2, 40)
    advantages[0, 2:4] = -1.0
    for mask in (None, torch.arange(80).view(2, 40) >= 4):
        x = leaf(logp)
        out = fastrl.policy_loss(x, old, advantages, mask, impl=impl)
        out.loss.backward()
        assert torch.isfinite(out.loss)
        assert torch.equal(x.grad[0, :4], torch.zeros(4))
        assert torch.isfinite(x.grad).all()
        highest = math.exp(20) if mask is None else 1.0
        assert metric(out, "ratio_max") == pytest.approx(highest, rel=1e-5)


def test_without_a_clamp_an_overflowing_ratio_is_still_clipped(impl: str) -> None:
    """exp(199) is inf in float32: the clipped branch keeps it out of the loss, and 0 * inf out of the gradient."""
    x = torch.tensor([[199.0, 0.0]], requires_grad=True)
    out = fastrl.policy_loss(
        *(x, torch.zeros(1, 2), torch.tensor([1.0])), log_ratio_clamp=None, impl=impl
    )
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-1.1)
    assert x.grad is not None and x.grad.tolist() == [[0.0, -0.5]]
    assert metric(out, "ratio_max") == math.inf


@pytest.mark.parametrize("ratio", RATIOS)
def test_without_a_clamp_masked_tokens_do_not_see_the_ratio_overflow(impl: str, ratio: str) -> None:
    """Zero advantage times the infinite ratio of the row would be NaN."""
    mask = torch.tensor([[1.0, 0.0, 1.0]])
    for advantage, loss in ((1.0, -1.2), (-1.0, math.inf)):
        x = torch.full((1, 3), 200.0, requires_grad=True)
        advantages = torch.tensor([[advantage, 1.0, advantage]])
        out = fastrl.policy_loss(
            *(x, torch.zeros(1, 3), advantages, mask), ratio=ratio, log_ratio_clamp=None, impl=impl
        )
        assert out.loss.item() == pytest.approx(loss)
        if advantage == 1:
            out.loss.backward()
            assert x.grad is not None and x.grad.tolist() == [[0.0, 0.0, 0.0]]


# ---- against the reference ------------------------------------------------------------------------------------------


def compare(
    impl: str, data: Batch, mask: Tensor | None, dtype: torch.dtype, **options: Any
) -> None:
    """Loss, metrics and gradients against the definition in float64."""
    loss, metrics, *grads = run_policy(impl, data, mask, **options)
    reference = run_policy("reference", data.double(), mask, **options)
    expected_loss, expected_metrics, *expected_grads = reference
    tokens = max(expected_metrics[0].item(), 1)
    scale = tokens if options["agg"] in ("token_sum", "seq_mean_token_sum") else 1
    assert_close(loss / scale, expected_loss / scale, dtype)
    # Sums over tokens as means; a cancelling sum of 500 terms has no relative accuracy of its own.
    extremes = {"ratio_min", "ratio_max"}
    for name, got, expected in zip(fastrl.POLICY_METRICS, metrics, expected_metrics):
        by = 1 if name in extremes else scale if name.endswith("_term") else tokens
        assert_close(got / by, expected / by, dtype)
    for got, expected in zip(grads, expected_grads):
        assert_close(got, expected, dtype, grad=True)


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("ratio", RATIOS)
def test_every_combination_of_options(impl: str, ratio: str, surrogate: str) -> None:
    """All KL estimators and gradients under each ratio and surrogate; the rest varied alongside."""
    dtypes, shapes = itertools.cycle(DTYPES), itertools.cycle(((3, 7), (5, 17), (2, 130)))
    aggs, picks = itertools.cycle(AGGREGATIONS), itertools.cycle(range(6))
    variants = itertools.cycle(
        [
            {},
            {"dual_clip": 1.5},
            {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3.0},
            {"ratio_cap": 1.5},
            {"ratio_cap": 1.1, "clip_high": 0.4, "dual_clip": 2.0},
            {"log_ratio_clamp": 0.4},
            {"log_ratio_clamp": None, "kl_clamp": None, "kl_input_clamp": None},
        ]
    )
    kls = [(None, "pathwise"), *itertools.product(KLS, KL_GRADS)]
    cases = list(itertools.product(kls, range(2)))
    if impl == "triton":  # slow to interpret: each ratio and surrogate with another ninth of them
        cases = cases[3 * RATIOS[ratio] + SURROGATES[surrogate] :: 9]
    for (kl, kl_grad), repeat in cases:
        dtype = next(dtypes)
        shape = next(shapes)
        data = batch(shape, dtype, is_weights=repeat == 0, entropy=repeat == 1)
        if repeat:
            data = data._replace(advantages=torch.randn(shape[0]).to(dtype))
        mask = list(masks(shape))[next(picks)][1]
        compare(
            *(impl, data, mask, dtype),
            ratio=ratio,
            surrogate=surrogate,
            kl=kl,
            kl_grad=kl_grad,
            kl_coef=0.3,
            entropy_coef=0.1,
            agg=next(aggs),
            **next(variants),
        )


@pytest.mark.parametrize("shape", [*SHAPES, (2, 4200)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_shape_mask_and_dtype(impl: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The usual options of a trainer; 4200 tokens are more than two chunks of the kernel."""
    data = batch(shape, dtype, is_weights=True, entropy=True)
    options = {"dual_clip": 3.0, "kl": "k3", "kl_coef": 0.1, "entropy_coef": 0.01}
    cases = list(zip(masks(shape), itertools.cycle(RATIOS)))
    if impl == "triton":  # slow to interpret: each dtype with another third of them
        cases = cases[DTYPES.index(dtype) % 3 :: 3]
    for (_, mask), ratio in cases:
        compare(impl, data, mask, dtype, ratio=ratio, agg="seq_mean_token_mean", **options)
        compare(impl, data, mask, dtype, ratio="token", agg="token_mean", **options)


def test_mixed_dtypes(impl: str) -> None:
    """Half-precision log-probabilities with float32 advantages, as under autocast; gradients keep their dtypes."""
    data = batch((3, 60), torch.bfloat16, entropy=True)
    data = data._replace(
        advantages=data.advantages.float(),
        entropy=None if data.entropy is None else data.entropy.float(),
    )
    mask = torch.rand(3, 60) < 0.7
    options = {"kl": "k3", "kl_coef": 0.1, "entropy_coef": 0.1, "agg": "token_mean"}
    compare(impl, data, mask, torch.bfloat16, **options)
    _, _, grad_logp, grad_entropy = run_policy(impl, data, mask, **options)
    assert grad_logp.dtype == torch.bfloat16
    assert grad_entropy.dtype == torch.float32
