"""RLinf 0.3.0: its advantages and losses, by function and through its registries with and without fastrl."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl.integrations import report
from fastrl.integrations import rlinf as integration
from fastrl.presets import rlinf as preset
from tests.helpers import leaf
from tests.integrations.peers import load
from tests.ops.losses import batch

NAN = float("nan")
SHAPE = (4, 11)


@pytest.fixture(scope="module")
def registry() -> Any:
    bare = ("rlinf", "rlinf.algorithms", "rlinf.utils")
    empty = ("rlinf.scheduler", "rlinf.utils.metric_utils")
    for name in ("advantages", "losses", "registry"):
        module = load(f"rlinf.algorithms.{name}", bare, empty)
    return module


@pytest.fixture
def rlinf(registry: Any) -> dict[str, Any]:
    """Its functions by name."""
    modules = ("algorithms.advantages", "algorithms.losses", "algorithms.utils", "utils.utils")
    return {
        key: value for name in modules for key, value in vars(sys.modules[f"rlinf.{name}"]).items()
    }


def close(got: Tensor, expected: Tensor, mask: Tensor | None = None) -> None:
    if mask is not None:
        expected = torch.where(mask != 0, expected, 0)
    torch.testing.assert_close(got, expected.to(got.dtype), atol=3e-5, rtol=3e-5)


def close_metrics(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert float(got[name]) == pytest.approx(float(value), abs=2e-6, rel=1e-4), name


def responses() -> Tensor:
    """``[B, T]`` bool: padding on the right and a hole."""
    mask = torch.arange(SHAPE[1]) < torch.tensor([11, 4, 7, 9]).unsqueeze(1)
    mask[0, 5] = False
    return mask


def test_by_hand() -> None:
    """Columns are rollouts. The first one ends after its first step, so the bootstrap 8 reaches only the second step."""
    rewards = torch.tensor([[1.0, 0.0], [2.0, 1.0]])
    values = torch.tensor([[0.5, 0.0], [1.0, 0.0], [8.0, 0.0]])
    dones = torch.tensor([[False, False], [True, False], [False, True]])
    advantages, returns = preset.compute_gae_advantages_and_returns(
        rewards, 0.5, 1.0, values, normalize_advantages=False, dones=dones
    )
    assert advantages.tolist() == [[0.5, 0.5], [5.0, 1.0]]
    assert returns is not None and returns.tolist() == [[1.0, 0.5], [6.0, 1.0]]
    mask = torch.tensor([[True, True], [True, False]])
    advantages, _ = preset.compute_grpo_advantages(torch.tensor([1.0, 0.0]), mask, 2)
    half = 0.5 / (0.5**0.5 + 1e-6)
    close(advantages, torch.tensor([[half, -half], [half, 0.0]]))


@pytest.mark.parametrize("critic", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_rlinf_gae(rlinf: dict[str, Any], critic: bool, normalize: bool) -> None:
    rewards, values = torch.randn(9, 5), torch.randn(10, 5)
    dones, mask = torch.rand(10, 5) < 0.2, torch.rand(9, 5) < 0.7
    arguments = {
        "rewards": rewards, "gamma": 0.97, "gae_lambda": 0.9, "values": values if critic else None, "dones": dones,
        "normalize_advantages": normalize, "normalize_returns": normalize, "loss_mask": mask, "task_type": "embodied",
    }  # fmt: skip
    expected = rlinf["compute_gae_advantages_and_returns"](**arguments)
    got = preset.compute_gae_advantages_and_returns(**arguments)
    for ours, theirs in zip(got, expected):
        close(ours, theirs, mask if normalize else None)  # type: ignore[arg-type]


def test_rlinf_groups(rlinf: dict[str, Any]) -> None:
    mask, rewards = torch.rand(7, 12) < 0.7, torch.randn(12)
    expected, _ = rlinf["compute_grpo_advantages"](rewards.view(-1, 4), mask, 4)
    close(preset.compute_grpo_advantages(rewards.view(-1, 4), mask, 4)[0], expected)
    of_trajectory = [0, 0, 1, 2, 3, 3, 3, 4, 5, 5, 6, 7]
    for mode in ("turn", "trajectory"):
        arguments = (rewards.view(-1, 1), mask, 4, of_trajectory, mode)
        expected, _ = rlinf["compute_grpo_dynamic_advantages"](*arguments)
        close(preset.compute_grpo_dynamic_advantages(*arguments)[0], expected)
    for normalize in (True, False):
        expected, _ = rlinf["compute_raw_advantages"](rewards, mask, normalize)
        close(preset.compute_raw_advantages(rewards, mask, normalize)[0], expected, mask)


@pytest.mark.parametrize("baseline", [True, False])
@pytest.mark.parametrize("kl", ["", "kl", "abs", "mse", "low_var_kl"])
def test_rlinf_reinforce_plus_plus(rlinf: dict[str, Any], baseline: bool, kl: str) -> None:
    """Its KL at masked tokens reaches earlier ones; here there is none. Its own branch for the baseline raises."""
    mask = responses().T
    logp, ref = torch.randn(2, *mask.shape)
    ref = torch.where(mask, ref, logp)
    options = {
        "kl_beta": 0.1 if kl else 0.0,
        "logprob": logp,
        "ref_logprob": ref,
        "kl_penalty_type": kl,
    }
    rewards = torch.randn(1, 4)
    pairs = rewards.view(2, 2)
    centred = (pairs - pairs.mean(1, keepdim=True)).view(1, 4) if baseline else rewards
    expected, _ = rlinf["compute_reinpp_advantages"](centred, mask, 2, **options)
    close(
        preset.compute_reinpp_advantages(rewards, mask, 2, baseline, **options)[0], expected, mask
    )


@pytest.mark.parametrize("kind", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"])
def test_rlinf_kl(rlinf: dict[str, Any], kind: str) -> None:
    logp, ref = torch.randn(2, 3, 9) * 4
    close(preset.kl_penalty(logp, ref, kind), rlinf["kl_penalty"](logp, ref, kind))


def test_rlinf_scores(rlinf: dict[str, Any]) -> None:
    rewards, dones = torch.randn(6, 4), torch.rand(7, 4) < 0.3
    options = {"batch_size": 4, "n_steps": 6, "group_size": 2}
    expected = rlinf["calculate_scores"](rewards, dones, **options)
    got = preset.calculate_scores(rewards, dones, **options)
    assert got.keys() == expected.keys()
    close(got["rewards"], expected["rewards"])


def actor_inputs(shape: tuple[int, ...], mask: Tensor | None) -> dict[str, Any]:
    """Log-probabilities of ``shape``; advantages and mask broadcast to it."""
    data = batch((shape[0], int(torch.Size(shape[1:]).numel())))
    advantages = data.advantages.view(shape)
    if mask is not None and mask.shape != shape:
        advantages = advantages[..., :1]
    return {
        "logprobs": data.logp.view(shape), "old_logprobs": data.old_logp.view(shape), "loss_mask": mask,
        "advantages": advantages, "clip_ratio_low": 0.2, "clip_ratio_high": 0.3,
    }  # fmt: skip


def both(
    rlinf: dict[str, Any], name: str, inputs: dict[str, Any], learns: str = "logprobs"
) -> None:
    """Loss, gradient and metrics of RLinf's function and of fastrl's."""
    results = []
    for function in (rlinf[name], getattr(preset, name)):
        x = leaf(inputs[learns])
        loss, metrics = function(**(inputs | {learns: x}))
        if loss.requires_grad:
            loss.backward()
        results.append((loss.detach(), x.grad, metrics))
    close(results[1][0], results[0][0])
    if results[0][1] is not None:
        close(results[1][1], results[0][1])
    close_metrics(results[1][2], results[0][2])


@pytest.mark.parametrize("agg", ["masked_mean", "seq_mean_token_sum", "seq_mean_token_mean"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_ratio_c": 1.5},
        {"clip_log_ratio_min": -0.3},
        {"clip_log_ratio_min": -0.5, "clip_log_ratio_max": 0.4, "clip_ratio_c": 3.0},
    ],
)
def test_rlinf_actor_loss(rlinf: dict[str, Any], agg: str, options: dict[str, Any]) -> None:
    """Responses, ``[B, T]``."""
    inputs = actor_inputs(SHAPE, responses()) | options | {"loss_agg_func": rlinf[agg]}
    both(rlinf, "compute_ppo_actor_loss", inputs)


@pytest.mark.parametrize("mask_shape", [(4, 3, 1), (4, 3, 2), None])
@pytest.mark.parametrize("steps", [None, 8])
def test_rlinf_actor_loss_of_chunks(
    rlinf: dict[str, Any], mask_shape: Any, steps: int | None
) -> None:
    """Actions of robots, ``[B, chunks, action]`` with a mask per chunk, weighted by the length of the episode."""
    mask = None if mask_shape is None else torch.rand(mask_shape) < 0.7
    inputs = actor_inputs((4, 3, 2), mask)
    if steps and mask is not None:
        inputs |= {"max_episode_steps": steps, "loss_mask_sum": torch.randint(1, 8, mask.shape)}
    both(rlinf, "compute_ppo_actor_loss", inputs)
    both(rlinf, "compute_ppo_actor_loss", inputs | {"critic_warmup": True})


@pytest.mark.parametrize("threshold", [None, 1.3])
@pytest.mark.parametrize("kind", ["proximal", "versions", "neither"])
def test_rlinf_decoupled_loss(rlinf: dict[str, Any], threshold: float | None, kind: str) -> None:
    inputs = actor_inputs(SHAPE, responses()) | {
        "clip_ratio_c": 1.5,
        "behave_weight_threshold": threshold,
    }
    if kind == "proximal":
        inputs["proximal_logprobs"] = inputs["old_logprobs"] + 0.3 * torch.randn(SHAPE)
    elif kind == "versions":
        inputs |= {"versions": torch.randint(-1, 6, SHAPE), "current_version": 5}
    both(rlinf, "compute_decoupled_ppo_actor_loss", inputs)


@pytest.mark.parametrize("masked", [True, False])
def test_rlinf_critic_loss(rlinf: dict[str, Any], masked: bool) -> None:
    values, returns, before = torch.randn(3, *SHAPE) * 4
    inputs = {
        "values": values, "returns": returns, "prev_values": before, "value_clip": 0.4, "huber_delta": 2.0,
        "loss_mask": responses() if masked else None,
    }  # fmt: skip
    both(rlinf, "compute_ppo_critic_loss", inputs, "values")


def test_rlinf_advantages_through_the_registry(registry: Any) -> None:
    """``calculate_adv_and_returns`` of reasoning tasks, with and without the integration."""
    common = {
        "task_type": "reasoning",
        "group_size": 2,
        "rewards": torch.randn(4),
        "loss_mask": responses(),
    }
    for kind in ("gae", "grpo", "reinpp", "raw"):
        options = (
            {"values": torch.randn(SHAPE), "gamma": 0.97, "gae_lambda": 0.9}
            if kind == "gae"
            else {}
        )
        results = []
        for ours in (False, True):
            if ours:
                integration.install()
            try:
                results.append(
                    registry.calculate_adv_and_returns(adv_type=kind, **common, **options)
                )
            finally:
                integration.uninstall()
        valid = common["loss_mask"]
        for got, expected in zip(results[1], results[0]):
            assert (got is None) == (expected is None)
            if got is not None:
                close(got * valid, expected * valid)  # type: ignore[operator]


@pytest.mark.parametrize("kind", ["actor", "actor_critic", "decoupled_actor_critic"])
def test_rlinf_losses_through_the_registry(registry: Any, kind: str) -> None:
    """``policy_loss``, with and without; the loss of a critic weighted by episode length stays RLinf's."""
    values, returns, before = torch.randn(3, *SHAPE)
    inputs = actor_inputs(SHAPE, responses()) | {
        "values": values, "returns": returns, "prev_values": before, "value_clip": 0.4, "huber_delta": 2.0,
        "task_type": "reasoning", "loss_type": kind,
    }  # fmt: skip
    by_length = {"max_episode_steps": 9, "loss_mask_sum": torch.randint(1, 8, SHAPE)}
    for more in ({}, by_length):
        results = []
        for ours in (False, True):
            if ours:
                integration.install()
            logp = leaf(inputs["logprobs"])
            try:
                loss, metrics = registry.policy_loss(**(inputs | more | {"logprobs": logp}))
            finally:
                integration.uninstall()
            loss.backward()
            results.append((loss.detach(), logp.grad, metrics))
        close(results[1][0], results[0][0])
        close(results[1][1], results[0][1])
        close_metrics(results[1][2], results[0][2])


def test_rlinf_nan_at_a_masked_position() -> None:
    mask = torch.tensor([[True, False]])
    logp, hole = leaf(torch.tensor([[0.1, NAN]])), torch.tensor([[0.0, NAN]])
    for loss, metrics in (
        preset.compute_ppo_actor_loss(logp, hole, 0.2, 0.2, hole, mask),
        preset.compute_decoupled_ppo_actor_loss(logp, hole, 0.2, 0.2, hole, hole, loss_mask=mask),
        preset.compute_ppo_critic_loss(logp, hole, hole, 0.2, 1.0, mask),
    ):
        (gradient,) = torch.autograd.grad(loss, logp)
        assert loss.isfinite() and gradient.isfinite().all() and gradient[0, 1] == 0
        del metrics[
            "critic/explained_variance" if "critic/value_loss" in metrics else "actor/policy_loss"
        ]
        metrics.pop("critic/value_clip_ratio", None)  # a mean over all positions, as RLinf's
        assert all(value.isfinite() for value in metrics.values())


def test_reward_of_a_row_behind_another() -> None:
    """Thread RLinf #1259 asks for masked statistics; a row's own last token carries its reward, whatever the others' is."""
    mask = torch.tensor([[True, False], [True, True], [False, True]])
    advantages, _ = preset.compute_reinpp_advantages(torch.tensor([1.0, 3.0]), mask, 1)
    assert advantages.tolist() == [[-1.0, 0.0], [-1.0, 1.0], [0.0, 1.0]]


def test_rlinf_install(registry: Any, rlinf: dict[str, Any]) -> None:
    before = dict(registry.ADV_REGISTRY), dict(registry.LOSS_REGISTRY)
    integration.install()
    integration.install()
    try:
        assert registry.get_adv_and_returns("grpo") is preset.compute_grpo_advantages
        lines = [line for line in report() if line.startswith("rlinf")]
        assert "rlinf: rlinf registry: actor_critic" in lines
        assert len(lines) == len(set(lines))
    finally:
        integration.uninstall()
    assert before == (registry.ADV_REGISTRY, registry.LOSS_REGISTRY)
