"""PPO of stable-baselines3 on CartPole with and without fastrl, and its rollout buffer on random episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fastrl.integrations import report, stable_baselines3

sb3 = pytest.importorskip(
    "stable_baselines3", reason="stable-baselines3 is not installed: requirements/peers-no-deps.txt"
)
spaces = pytest.importorskip("gymnasium.spaces", reason="gymnasium is not installed")


@pytest.fixture
def installed() -> Any:
    def run(function: Any, ours: bool) -> Any:
        if ours:
            stable_baselines3.install()
        try:
            return function()
        finally:
            stable_baselines3.uninstall()

    return run


def test_rollout_buffer(installed: Any) -> None:
    """Episodes that end anywhere, an end at the last step, values to bootstrap from."""

    def fill() -> Any:
        rng = np.random.default_rng(0)
        buffer = sb3.common.buffers.RolloutBuffer(
            33, spaces.Box(-1, 1, (2,)), spaces.Discrete(2), gamma=0.97, gae_lambda=0.9, n_envs=4
        )
        for _ in range(33):
            buffer.add(
                rng.random((4, 2)),
                rng.integers(0, 2, (4, 1)),
                rng.standard_normal(4),
                rng.random(4) < 0.2,
                torch.from_numpy(rng.standard_normal(4)).float(),
                torch.zeros(4),
            )
        buffer.compute_returns_and_advantage(
            torch.tensor([0.5, -1.0, 2.0, 0.1]), np.array([0, 1, 0, 1])
        )
        return buffer.advantages, buffer.returns

    for got, expected in zip(installed(fill, True), installed(fill, False)):
        np.testing.assert_allclose(got, expected, atol=2e-5, rtol=2e-5)


def test_cartpole(installed: Any) -> None:
    """Both learn: episodes get longer, alike; the first update starts from the same advantages."""
    from examples.cartpole import learn

    def run() -> Any:
        return learn(4096)

    ours, theirs = installed(run, True), installed(run, False)
    assert ours.before == theirs.before
    assert ours.after > 1.5 * ours.before
    assert ours.after == pytest.approx(theirs.after, rel=0.2)


def test_report(installed: Any) -> None:
    lines = installed(report, True)
    assert lines == ["stable-baselines3: RolloutBuffer.compute_returns_and_advantage"]
    assert report() == []
