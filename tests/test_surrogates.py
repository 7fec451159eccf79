"""Losses and corrections beyond policy_loss: numbers worked out by hand, NaN at masked positions, packed rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastrl
from fastrl import surrogates as sur
from tests.helpers import leaf, pack

NAN = float("nan")


def test_sapo_by_hand() -> None:
    """rho = 2: gates 4 sigmoid(1) for A > 0 and 4 / 1.05 sigmoid(1.05) for A < 0."""
    logp = torch.full((2, 1), math.log(2.0))
    out = sur.sapo_loss(logp, torch.zeros(2, 1), torch.tensor([1.0, -1.0]))
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    expected = (-4 * sigmoid(1.0) + 4 / 1.05 * sigmoid(1.05)) / 2
    assert float(out.loss) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_by_hand(divergence: str) -> None:
    """p from 0.5 to 0.6 stays, to 0.9 leaves; a move back towards the old policy always stays."""
    old = torch.full((1, 3), 0.5).log()
    logp = torch.tensor([[0.6, 0.9, 0.1]]).log()
    leaves = leaf(logp)
    out = sur.dppo_loss(leaves, old, torch.tensor([[1.0, 1.0, 1.0]]), divergence=divergence)
    out.loss.backward()
    assert leaves.grad is not None
    torch.testing.assert_close(leaves.grad, torch.tensor([[-1.2, 0.0, -0.2]]) / 3)
    assert int(out.metrics["clipped"]) == 1


def test_dro_equals_its_formula_with_and_without_weights() -> None:
    logp, old, advantages = torch.randn(3, 2, 5)
    mask = torch.tensor([[1, 1, 0, 1, 1], [0, 0, 0, 0, 0]])
    per_token = -advantages * logp + 0.15 * (logp - old).square()
    expected = float((per_token * mask).sum() / 4)
    for weights in (None, torch.ones(2, 5)):
        out = sur.dro_loss(logp, old, advantages, mask, beta=0.3, is_weights=weights)
        assert float(out.loss) == pytest.approx(expected, abs=1e-5)


def test_kl_gradients_by_hand() -> None:
    """x = 0.5: k1 has gradient 1, with k2's gradient 0.5, with the score function 1 + 0.5."""
    for gradient, expected in (("pathwise", 1.0), ("k2", 0.5), ("score", 1.5)):
        logp = leaf(torch.tensor([-1.0]))
        out = sur.kl_penalty(logp, torch.tensor([-1.5]), gradient=gradient)
        out.sum().backward()
        assert logp.grad is not None
        assert float(out.detach()) == 0.5
        assert float(logp.grad) == pytest.approx(expected)


def test_rollout_correction_by_hand() -> None:
    """Ratios 4 and 1/4 of two tokens: by sequence their product is 1."""
    logp, rollout = torch.tensor([[0.4, 0.1]]).log(), torch.tensor([[0.1, 0.4]]).log()
    token = sur.rollout_correction(logp, rollout, high=2.0)
    torch.testing.assert_close(token.weights, torch.tensor([[2.0, 0.25]]))
    assert float(token.metrics["fraction_high"]) == 0.5
    ice = sur.rollout_correction(logp, rollout, low=0.5, high=5.0, beyond="zero")
    torch.testing.assert_close(ice.weights, torch.tensor([[4.0, 0.0]]))
    for level in ("sequence", "geometric"):
        out = sur.rollout_correction(logp, rollout, level=level, high=2.0)
        torch.testing.assert_close(out.weights, torch.ones(1, 2))


def test_a_missing_log_probability_counts_as_ratio_one() -> None:
    """TRL #4159: the engine gave NaN."""
    logp, rollout = torch.tensor([[-1.0, -1.0]]), torch.tensor([[NAN, -1.0]])
    assert sur.rollout_correction(logp, rollout).weights.isnan().any()
    out = sur.rollout_correction(logp, rollout, missing_is_one=True)
    assert torch.equal(out.weights, torch.ones(1, 2))


def test_icepop_of_an_overflowing_ratio_is_zero_not_nan() -> None:
    """OpenRLHF #1314: infinity times 0."""
    out = sur.rollout_correction(
        *(torch.tensor([[0.0]]), torch.tensor([[-200.0]])),
        low=0.5,
        high=5.0,
        beyond="zero",
        log_clamp=None,
    )
    assert out.weights.item() == 0


def test_controllers_follow_the_law() -> None:
    controller = sur.AdaptiveKL(0.2, target=0.1, horizon=1000)
    controller.update(0.11, 100)
    assert controller.value == pytest.approx(0.2 * 1.01)
    controller.update(0.0, 1000)
    assert controller.value == pytest.approx(0.2 * 1.01 * 0.8)
    with pytest.raises(ValueError, match="target"):
        sur.AdaptiveKL(0.2, target=0.0, horizon=1)


LOSSES: dict[str, Callable[..., Any]] = {
    "sapo": sur.sapo_loss,
    "sapo_sequence": lambda *a, **k: sur.sapo_loss(*a, ratio="sequence", **k),
    "dppo_tv": sur.dppo_loss,
    "dppo_kl": lambda *a, **k: sur.dppo_loss(*a, divergence="kl", **k),
    "dppo_ratio": lambda *a, **k: sur.dppo_loss(*a, through_ratio=True, **k),
    "dro": lambda *a, **k: sur.dro_loss(*a, beta=0.1, **k),
    "gmpo": sur.gmpo_loss,
    "kl_cov": sur.kl_cov_loss,
    "clip_cov": lambda *a, **k: sur.clip_cov_loss(
        *a, generator=torch.Generator().manual_seed(0), fraction=0.1, cov_low=0.1, **k
    ),
}


@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_nan_at_masked_positions_changes_nothing(name: str, with_weights: bool) -> None:
    mask = torch.rand(4, 12) < 0.6
    mask[2] = False
    inputs = [-torch.rand(4, 12), -torch.rand(4, 12), torch.randn(4, 12), torch.rand(4, 12)]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        logp = leaf(tensors[0])
        loss = LOSSES[name](
            logp, *tensors[1:3], mask, is_weights=tensors[3] if with_weights else None
        ).loss
        loss.backward()
        assert logp.grad is not None
        return loss.detach(), logp.grad

    clean = run(*inputs)
    dirty = run(*(torch.where(mask, x, NAN) for x in inputs))
    assert clean[0].isfinite()
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])
    assert torch.count_nonzero(clean[1][~mask]) == 0


@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_batch_is_zero_with_a_graph(name: str) -> None:
    logp = leaf(torch.zeros(2, 3))
    loss = LOSSES[name](logp, torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 3)).loss
    loss.backward()
    assert loss.item() == 0
    assert logp.grad is not None and torch.count_nonzero(logp.grad) == 0


@pytest.mark.parametrize("name", ["sapo", "sapo_sequence", "dppo_tv", "dppo_kl", "dro"])
def test_packed_equals_padded(name: str) -> None:
    lengths = [5, 0, 7]
    mask = torch.arange(7) < torch.tensor(lengths).unsqueeze(1)
    logp, old, advantages = -torch.rand(3, 7), -torch.rand(3, 7), torch.randn(3, 7)
    packed = [pack(x, lengths) for x in (logp, old, advantages)]
    got = LOSSES[name](*(x for x, _ in packed), cu_seqlens=packed[0][1]).loss
    torch.testing.assert_close(got, LOSSES[name](logp, old, advantages, mask).loss)


def test_masks_by_hand() -> None:
    entropy = torch.tensor([[0.1, 0.9, NAN], [0.5, 0.3, 0.2]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    got = sur.high_entropy_mask(entropy, mask, fraction=0.25)
    assert got.tolist() == [[False, True, False], [True, False, False]]
    keep = sur.rejection_mask(
        *(torch.tensor([[0.0, 0.0], [0.0, 3.0]]), torch.zeros(2, 2)),
        statistic="k2",
        reduce="max",
        high=1.0,
    )
    assert keep.tolist() == [[True, True], [False, False]]


def test_vespo_runs_through_policy_loss() -> None:
    """On policy phi is 1 and the loss that of REINFORCE."""
    logp = leaf(-torch.rand(2, 4))
    advantages = torch.tensor([1.0, -1.0])
    phi = sur.vespo_weights(logp, logp.detach(), advantages)
    out = fastrl.policy_loss(logp, logp.detach(), advantages, surrogate="reinforce", is_weights=phi)
    plain = fastrl.policy_loss(logp, logp.detach(), advantages, surrogate="reinforce")
    torch.testing.assert_close(out.loss, plain.loss)
