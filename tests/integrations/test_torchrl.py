"""torchrl 0.14.1: its value functionals, and its estimators over TensorDicts with and without fastrl."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl.errors import ArgumentError
from fastrl.integrations import report
from fastrl.integrations import torchrl as integration
from fastrl.presets import torchrl as preset
from tests.helpers import leaf

functional: Any = pytest.importorskip(
    "torchrl.objectives.value.functional", reason="torchrl is not installed"
)
# Time is the last dimension but one; -1 and 0 put it elsewhere.
SHAPES = [((9, 2), -2), ((3, 9, 1), -2), ((2, 3, 9, 2), -2), ((3, 2, 9), -1), ((9, 3, 2), 0)]
VECTORISED = [False, True]


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


def trajectory(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Values, next values that are no shift of them, rewards; ends, some of them terminal."""
    values, following, rewards = torch.randn(3, *shape, dtype=dtype)
    done = torch.rand(shape) < 0.25
    return values, following, rewards, done, done & (torch.rand(shape) < 0.5)


def test_by_hand() -> None:
    """The first step ends without being terminal: it bootstraps 10. The second is terminal: its next value is nothing."""
    values, following = torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0], [20.0]])
    rewards, done = torch.tensor([[0.0], [5.0]]), torch.tensor([[True], [True]])
    terminated = torch.tensor([[False], [True]])
    advantage, target = preset.generalized_advantage_estimate(
        0.5, 0.9, values, following, rewards, done, terminated
    )
    assert advantage.tolist() == [[4.0], [3.0]]
    assert target.tolist() == [[5.0], [5.0]]
    going = torch.tensor([[False], [True]])
    returns = preset.td_lambda_return_estimate(0.5, 0.5, following, rewards, going, going)
    assert returns.tolist() == [[0.5 * (0.5 * 10 + 0.5 * 5)], [5.0]]
    assert preset.reward2go(rewards, going, 0.5).tolist() == [[2.5], [5.0]]


@pytest.mark.parametrize(("shape", "time_dim"), SHAPES)
@pytest.mark.parametrize("vectorised", VECTORISED)
def test_torchrl_gae(shape: tuple[int, ...], time_dim: int, vectorised: bool) -> None:
    values, following, rewards, done, terminated = trajectory(shape)
    name = f"{'vec_' * vectorised}generalized_advantage_estimate"
    for ends in (terminated, None):
        arguments = (0.97, 0.9, values, following, rewards, done, ends)
        expected = getattr(functional, name)(*arguments, time_dim=time_dim)
        for ours, theirs in zip(getattr(preset, name)(*arguments, time_dim=time_dim), expected):
            close(ours, theirs)


@pytest.mark.parametrize(("shape", "time_dim"), SHAPES)
@pytest.mark.parametrize("vectorised", VECTORISED)
def test_torchrl_returns(shape: tuple[int, ...], time_dim: int, vectorised: bool) -> None:
    values, following, rewards, done, terminated = trajectory(shape)
    rest = (following, rewards, done, terminated)
    for kind, numbers in (("td1", (0.97,)), ("td_lambda", (0.97, 0.8))):
        name = f"{'vec_' * vectorised}{kind}_return_estimate"
        expected = getattr(functional, name)(*numbers, *rest, time_dim=time_dim)
        close(getattr(preset, name)(*numbers, *rest, time_dim=time_dim), expected)
        name = f"{'vec_' * vectorised}{kind}_advantage_estimate"
        expected = getattr(functional, name)(*numbers, values, *rest, time_dim=time_dim)
        close(getattr(preset, name)(*numbers, values, *rest, time_dim=time_dim), expected)
    close(
        preset.td0_advantage_estimate(0.97, values, *rest),
        functional.td0_advantage_estimate(0.97, values, *rest),
    )


def test_torchrl_returns_of_steps_that_are_terminal_alone() -> None:
    """``terminated`` without ``done``: TD(1) ends there, TD(lambda) goes on."""
    _, following, rewards, done, _ = trajectory((3, 9, 1))
    rest = (following, rewards, done, torch.rand(3, 9, 1) < 0.5)
    close(preset.td1_return_estimate(0.97, *rest), functional.td1_return_estimate(0.97, *rest))
    expected = functional.td_lambda_return_estimate(0.97, 0.8, *rest)
    close(preset.td_lambda_return_estimate(0.97, 0.8, *rest), expected)


@pytest.mark.parametrize(("shape", "time_dim"), SHAPES)
def test_torchrl_vtrace_and_reward_to_go(shape: tuple[int, ...], time_dim: int) -> None:
    values, following, rewards, done, terminated = trajectory(shape)
    log_pi, log_mu = torch.randn(2, *shape)
    for ends, rho in itertools.product((terminated, None), (1.0, 0.7)):
        arguments = (0.97, log_pi, log_mu, values, following, rewards, done, ends, rho, 0.9)
        expected = functional.vtrace_advantage_estimate(*arguments, time_dim=time_dim)
        for ours, theirs in zip(
            preset.vtrace_advantage_estimate(*arguments, time_dim=time_dim), expected
        ):
            close(ours, theirs)
    expected = functional.reward2go(rewards, done, 0.9, time_dim=time_dim)
    close(preset.reward2go(rewards, done, 0.9, time_dim=time_dim), expected)


def test_torchrl_gamma_of_each_step() -> None:
    values, following, rewards, done, terminated = trajectory((3, 9, 1), torch.float64)
    gamma, lmbda = torch.rand(2, 3, 9, 1, dtype=torch.float64)
    arguments = (gamma, lmbda, values, following, rewards, done, terminated)
    for ours, theirs in zip(
        preset.generalized_advantage_estimate(*arguments),
        functional.generalized_advantage_estimate(*arguments),
    ):
        assert ours.dtype == torch.float64
        close(ours, theirs)
    rest = (following, rewards, done, terminated)
    close(
        preset.td_lambda_return_estimate(gamma, lmbda, *rest),
        functional.td_lambda_return_estimate(gamma, lmbda, *rest),
    )


def test_torchrl_gradients() -> None:
    """``differentiable=True`` of its estimators: through values, next values and rewards."""
    values, following, rewards, done, terminated = trajectory((3, 9, 2))
    gradients = []
    for module in (functional, preset):
        inputs = [leaf(x) for x in (values, following, rewards)]
        out = module.generalized_advantage_estimate(0.97, 0.9, *inputs, done, terminated)
        returns = module.td_lambda_return_estimate(0.97, 0.9, *inputs[1:], done, terminated)
        (out[0].square().sum() + out[1].sin().sum() + returns.square().sum()).backward()
        gradients.append([x.grad for x in inputs])
    for ours, theirs in zip(gradients[1], gradients[0]):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.fixture
def installed() -> Iterator[None]:
    integration.install()
    yield
    integration.uninstall()


def actor_network() -> Any:
    """A normal distribution whose mean is linear in the observation."""
    from tensordict import nn

    linear = torch.nn.Linear(3, 1)
    return nn.ProbabilisticTensorDictSequential(
        nn.TensorDictModule(linear, in_keys=["observation"], out_keys=["loc"]),
        nn.ProbabilisticTensorDictModule(
            in_keys=["loc"],
            out_keys=["action"],
            distribution_class=lambda loc: torch.distributions.Independent(
                torch.distributions.Normal(loc, 1.0), 1
            ),
            return_log_prob=True,
        ),
    )


@pytest.mark.parametrize(
    "name", ["GAE", "TDLambdaEstimator", "TD1Estimator", "TD0Estimator", "VTrace"]
)
def test_torchrl_estimators(name: str) -> None:
    """Its estimator classes over a TensorDict, with and without the integration."""
    from tensordict import TensorDict
    from torchrl.objectives import value as estimators

    values, following, rewards, done, terminated = trajectory((4, 12, 1))
    data = TensorDict(
        {
            "state_value": values, "action_log_prob": torch.randn(4, 12),
            "next": {"state_value": following, "reward": rewards, "done": done, "terminated": terminated},
        },
        [4, 12],
    )  # fmt: skip
    options = {"gamma": 0.97} | (
        {} if name in ("TD0Estimator", "TD1Estimator", "VTrace") else {"lmbda": 0.9}
    )
    if name == "VTrace":
        options["actor_network"] = actor_network()
        data.update({"observation": torch.randn(4, 12, 3), "action": torch.randn(4, 12, 1)})
    results = []
    for ours in (False, True):
        if ours:
            integration.install()
        try:
            estimator = getattr(estimators, name)(value_network=None, **options)
            results.append(estimator(data.clone()))
        finally:
            integration.uninstall()
    for key in ("advantage", "value_target"):
        close(results[1][key], results[0][key])


def test_torchrl_install(installed: None) -> None:
    from torchrl.objectives.value import advantages

    integration.install()
    assert advantages.generalized_advantage_estimate is preset.generalized_advantage_estimate
    lines = [line for line in report() if line.startswith("torchrl")]
    assert "torchrl: torchrl.objectives.value.advantages.vtrace_advantage_estimate" in lines
    assert len(lines) == len(set(lines))
    integration.uninstall()
    assert advantages.generalized_advantage_estimate.__module__ == functional.__name__


def test_torchrl_gamma_that_stands_still(installed: None) -> None:
    """``rolling_gamma=False`` keeps torchrl's function, and the preset says so."""
    _, following, rewards, done, _ = trajectory((2, 5, 1))
    gamma = torch.rand(2, 5, 1)
    got = functional.td_lambda_return_estimate(gamma, 0.9, following, rewards, done, done, False)
    integration.uninstall()
    expected = functional.td_lambda_return_estimate(
        gamma, 0.9, following, rewards, done, done, False
    )
    assert torch.equal(got, expected)
    with pytest.raises(ArgumentError, match="rolling_gamma"):
        preset.td1_return_estimate(gamma, following, rewards, done, done, False)


def test_torchrl_shapes_are_checked() -> None:
    values, following, rewards, done, _ = trajectory((2, 5, 1))
    with pytest.raises(ArgumentError, match="one shape"):
        preset.generalized_advantage_estimate(0.9, 0.9, values[:1], following, rewards, done)
