"""ROLL, which is on no package index: numbers by hand, and its module of functions as a double with its arguments.

The formulas are those of ``roll/utils/functionals.py`` (git 090ac946).
"""

from __future__ import annotations

import importlib
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl.errors import ArgumentError
from fastrl.integrations import _patch, report
from fastrl.integrations import roll as integration
from fastrl.presets import roll as preset
from tests.helpers import leaf
from tests.integrations import doubles

NAN = float("nan")
HALF = math.sqrt(0.5)
# Deviation of the rewards 1 0 2 2, and ROLL's eps.
SPREAD = math.sqrt(2.75 / 3) + 1e-6


def close(got: Tensor, expected: Any) -> None:
    torch.testing.assert_close(
        got, torch.as_tensor(expected, dtype=got.dtype), atol=3e-6, rtol=3e-6
    )


def test_roll_estimators_by_hand() -> None:
    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 1.0]])
    advantages, returns = preset.compute_gae_advantage_return(
        rewards, values, torch.tensor(0.5), 1.0
    )
    close(advantages, [[0.0, 0.0]])
    close(returns, [[0.5, 1.0]])
    advantages, returns = preset.compute_reinforce_return(rewards, 0.5, 1.0)
    close(advantages, [[0.5, 1.0]])
    assert torch.equal(advantages, returns)


@pytest.mark.parametrize(
    ("mean", "std", "expected"),
    [
        ("group", "group", [HALF, -HALF, 0.0, 0.0]),
        ("group", "batch", [0.5 / SPREAD, -0.5 / SPREAD, 0.0, 0.0]),
        ("group", None, [0.5, -0.5, 0.0, 0.0]),
        ("batch", "batch", [-0.25 / SPREAD, -1.25 / SPREAD, 0.75 / SPREAD, 0.75 / SPREAD]),
        ("batch", None, [-0.25, -1.25, 0.75, 0.75]),
        (None, None, [1.0, 0.0, 2.0, 2.0]),
        ("running", "running", [0.0, -0.5, 0.5, 0.5]),
    ],
)
def test_roll_rewards_by_hand(mean: str | None, std: str | None, expected: list[float]) -> None:
    """Rewards 1 0 | 2 2. The batch has mean 1.25 and variance 2.75 / 3; running moments are of the caller's own."""
    rewards = torch.tensor([1.0, 0.0, 2.0, 2.0])
    seen = []
    running = SimpleNamespace(mean=1.0, std=2.0, update=seen.append)
    got = preset.reward_norm(rewards, 2, {"domain": running}, mean, std)
    close(got, expected)
    assert len(seen) == (mean == "running")


def test_rewards_without_a_deviation() -> None:
    """A group of one, where ROLL's deviation is NaN, gives 0; a running deviation of 0 divides by 1e-6."""
    rewards = torch.tensor([1.5, 0.5])
    for mean in (None, "batch", "group"):
        got = preset.reward_norm(rewards, 1, norm_mean_type=mean, norm_std_type="group")
        assert got.tolist() == [0, 0]
    still = SimpleNamespace(mean=1.0, std=0.0, update=lambda rewards: None)
    got = preset.reward_norm(rewards, 1, {"domain": still}, "running", "running")
    torch.testing.assert_close(got, torch.tensor([5e5, -5e5]))


def test_whitening_by_hand() -> None:
    """ROLL #475, #476: one valid token raised, or gave NaN."""
    x = torch.tensor([[1.0, 3.0, NAN]])
    close(preset.masked_whiten(x, torch.tensor([[1, 1, 0]])), [[-HALF, HALF, 0.0]])
    close(preset.masked_whiten(x, torch.tensor([[1, 0, 0]])), [[0.0, 0.0, 0.0]])


def test_kl_by_hand() -> None:
    logp, base, mask = (
        torch.tensor([[-1.0, NAN, 0.0]]),
        torch.tensor([[-1.5, 0.0, 5.0]]),
        torch.tensor([[1, 0, 1]]),
    )
    k3 = [[math.exp(-0.5) - 0.5, 0.0, 10.0]]
    for name, expected in (
        ("kl", [[0.5, 0, -5]]),
        ("abs", [[0.5, 0, 5]]),
        ("mse", [[0.125, 0, 12.5]]),
        ("k3", k3),
    ):
        close(preset.compute_approx_kl(logp, base, mask, name), expected)


def test_aggregation_by_hand() -> None:
    """Its mean over tokens does not look at the mask: 51.5 for the tokens 1 2 | 100 masked. Here it does."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    x = leaf(torch.tensor([[1.0, 2.0, 100.0], [4.0, 100.0, NAN], [NAN, NAN, NAN]]))
    for mode, expected in (
        ("token-mean", 7 / 3),
        ("seq-mean-token-sum", 7 / 3),
        ("seq-mean-token-mean", 5.5 / 3),
        ("seq-mean-token-sum-norm", 7 / 3),
    ):
        loss = preset.agg_loss(x, mask, mode)
        close(loss.detach(), expected)
        (gradient,) = torch.autograd.grad(loss, x)
        assert gradient.isfinite().all() and gradient[2].tolist() == [0, 0, 0]
        close(preset.agg_loss(x, mask, mode, weights=torch.tensor([1.0, 0.0, 5.0])).detach(), expected * {
            "seq-mean-token-mean": 1.5 / 5.5}.get(mode, 3 / 7))  # fmt: skip
        assert preset.agg_loss(x, torch.zeros_like(mask), mode).item() == 0
    close(preset.agg_loss(x[:2], mask[:2], "seq-mean-token-sum").detach(), 3.5)
    close(preset.agg_loss(x[:2], mask[:2], "seq-mean-token-sum-norm").detach(), 7 / 3)
    close(preset.agg_loss(x, mask, "token-mean", batch_num_tokens=14).detach(), 0.5)
    close(preset.agg_loss(x, mask, "seq-mean-token-mean", global_valid_samples=2).detach(), 2.75)
    with pytest.raises(ArgumentError, match="loss_agg_mode"):
        preset.agg_loss(x, mask, "mean")


def double() -> dict[str, Any]:
    """The arguments of ROLL's functions, in its order."""

    def compute_approx_kl(log_probs, log_probs_base, action_mask=None, kl_penalty="kl"): ...
    def compute_gae_advantage_return(token_level_rewards, values, gamma, lambd): ...
    def compute_reinforce_return(token_level_rewards, gamma, lambd): ...
    def masked_whiten(values, mask, shift_mean=True): ...
    def reward_norm(
        response_level_rewards,
        n_sample=-1,
        running_ctrl=None,
        norm_mean_type=None,
        norm_std_type=None,
    ): ...
    def agg_loss(
        loss_mat,
        loss_mask,
        loss_agg_mode,
        batch_num_tokens=None,
        global_valid_samples=None,
        weights=None,
    ): ...

    return {key: value for key, value in locals().items() if callable(value)}


def test_roll_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a double: also where a worker has taken a function by name; another signature is refused, and nothing changed."""
    with pytest.raises(_patch.VersionError, match="roll must be importable"):
        integration.install()
    theirs = double()
    worker = {"agg_loss": theirs["agg_loss"]}
    doubles.package(
        monkeypatch,
        "roll",
        "",
        {"roll.utils.functionals": dict(theirs), "roll.pipeline.base_worker": worker},
    )
    functionals: Any = importlib.import_module("roll.utils.functionals")
    integration.install()
    integration.install()
    try:
        assert functionals.reward_norm is preset.reward_norm
        assert sys.modules["roll.pipeline.base_worker"].agg_loss is preset.agg_loss
        lines = report()
        assert "roll: roll.pipeline.base_worker.agg_loss" in lines and len(lines) == len(set(lines))
    finally:
        integration.uninstall()
    assert functionals.reward_norm is theirs["reward_norm"]
    functionals.agg_loss = lambda loss_mat, loss_mask: None
    with pytest.raises(
        _patch.VersionError, match=r"agg_loss must take .* got \(loss_mat, loss_mask\)"
    ):
        integration.install()
    assert functionals.reward_norm is theirs["reward_norm"]
