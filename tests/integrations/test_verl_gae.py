"""GAE and REINFORCE++ against verl's own functions, by options alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastrl
from tests.helpers import masks

core_algos = pytest.importorskip(
    "verl.trainer.ppo.core_algos", reason="verl is not installed: requirements/peers-no-deps.txt"
)


@pytest.fixture
def unwhitened(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl whitens inside its function; compare what goes in."""
    monkeypatch.setattr(core_algos.verl_F, "masked_whiten", lambda values, mask: values)


def rollout(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    return torch.randn(shape), torch.randn(shape)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.5, 0.0), (1.0, 0.95)])
@pytest.mark.usefixtures("unwhitened")
def test_gae_equals_verl_at_every_position(impl: str, gamma: float, lam: float) -> None:
    """Masked positions included: fill="carry" leaves there what verl leaves."""
    for shape in ((1, 1), (3, 17), (4, 100), (2, 257)):
        rewards, values = rollout(shape)
        for name, mask in masks(shape):
            valid = torch.ones(shape, dtype=torch.int64) if mask is None else (mask != 0).long()
            theirs = core_algos.compute_gae_advantage_return(rewards, values, valid, gamma, lam)
            ours = fastrl.gae(rewards, values, mask, gamma=gamma, lam=lam, fill="carry", impl=impl)
            for got, expected in zip(ours, theirs):
                torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5, msg=name)


def test_gae_and_whiten_equal_verl_on_valid_tokens(impl: str) -> None:
    rewards, values = rollout((5, 90))
    mask = (torch.rand(5, 90) < 0.6).long()
    expected, _ = core_algos.compute_gae_advantage_return(rewards, values, mask, 0.99, 0.95)
    advantages = fastrl.gae(rewards, values, mask, gamma=0.99, lam=0.95, impl=impl).advantages
    got = fastrl.whiten(advantages, mask, impl=impl)
    torch.testing.assert_close(got[mask != 0], expected[mask != 0], atol=2e-4, rtol=2e-4)
    assert torch.count_nonzero(got[mask == 0]) == 0


@pytest.mark.usefixtures("unwhitened")
def test_nan_in_a_hole_poisons_verl_but_not_fastrl(impl: str) -> None:
    """The one deviation: verl blends by multiplication, so a NaN left of which tokens are valid reaches them."""
    rewards, values = rollout((1, 6))
    mask = torch.tensor([[1, 1, 0, 0, 1, 1]])
    clean = fastrl.gae(rewards, values, mask, gamma=0.9, lam=0.9, impl=impl)
    values[0, 2] = float("nan")
    theirs, _ = core_algos.compute_gae_advantage_return(rewards, values, mask, 0.9, 0.9)
    assert torch.isnan(theirs[0, :2]).all()
    ours = fastrl.gae(rewards, values, mask, gamma=0.9, lam=0.9, impl=impl)
    assert torch.equal(ours.advantages, clean.advantages)


class _Config(dict[str, Any]):
    """verl reads its options as attributes."""

    __getattr__ = dict.__getitem__


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus(impl: str, gamma: float) -> None:
    rewards, mask = torch.randn(4, 80), (torch.rand(4, 80) < 0.6).long()
    expected_advantages, expected_returns = (
        core_algos.compute_reinforce_plus_plus_outcome_advantage(
            token_level_rewards=rewards, response_mask=mask, config=_Config(gamma=gamma)
        )
    )
    returns = fastrl.discounted_returns(rewards, mask, gamma=gamma, impl=impl)
    torch.testing.assert_close(returns, expected_returns, atol=2e-5, rtol=2e-5)
    whitened = fastrl.whiten(returns, mask, impl=impl)
    torch.testing.assert_close(whitened, expected_advantages, atol=2e-4, rtol=2e-4)


def test_gradients_equal_autograd_through_verls_recursion(
    impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl calls its loop under no_grad; without that, autograd through it is the oracle."""
    monkeypatch.setattr(core_algos.verl_F, "masked_whiten", lambda values, mask: values)
    monkeypatch.setattr(core_algos.torch, "no_grad", torch.enable_grad)
    mask = (torch.rand(3, 40) < 0.7).long()
    base, weights = rollout((3, 40)), torch.randn(2, 3, 40) * mask
    results = []
    for ours in (True, False):
        rewards, values = (x.clone().requires_grad_() for x in base)
        if ours:
            out = fastrl.gae(rewards, values, mask, gamma=0.9, lam=0.8, impl=impl)
        else:
            out = core_algos.compute_gae_advantage_return(rewards, values, mask, 0.9, 0.8)
        (torch.stack(tuple(out)) * weights).sum().backward()
        results.append((rewards.grad, values.grad))
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
