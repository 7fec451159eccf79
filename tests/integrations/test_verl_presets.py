"""Every function of ``fastrl.presets.verl`` against verl's own: values, gradients, metrics, names and arguments."""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastrl.integrations import verl as integration
from fastrl.presets import verl as preset
from tests.helpers import leaf
from tests.integrations.test_verl_groups import rollout
from tests.integrations.test_verl_losses import AGGS, SHAPE, actor, config, response_mask
from tests.ops.losses import batch

core_algos = pytest.importorskip(
    "verl.trainer.ppo.core_algos", reason="verl is not installed: requirements/peers-no-deps.txt"
)
rollout_corr = pytest.importorskip(
    "verl.trainer.ppo.rollout_corr_helper", reason="verl is not installed"
)

AlgoConfig = pytest.importorskip("verl.trainer.config", reason="verl is not installed").AlgoConfig

OUTCOME = (
    "compute_grpo_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_opo_outcome_advantage",
    "compute_gpg_outcome_advantage",
)
LOSSES = (
    "vanilla",
    "gspo",
    "sapo",
    "cispo",
    "gpg",
    "dro",
    "dppo_tv",
    "dppo_kl",
    "geo_mean",
    "kl_cov",
    "clip_cov",
)


def assert_same(got: Any, expected: Any, mask: Tensor) -> None:
    """Advantages and returns at valid tokens; masked ones are 0 here."""
    for ours, theirs in zip(got, expected):
        torch.testing.assert_close(
            ours, torch.where(mask != 0, theirs, 0).to(ours.dtype), atol=3e-5, rtol=3e-5
        )


@pytest.mark.parametrize("name", sorted(set(preset.__all__) - {"compute_policy_loss_reinforce"}))
def test_signature_is_that_of_verl(name: str) -> None:
    """Every argument of verl's function is one of the preset's, by the same name, in the same order."""
    module = rollout_corr if "rollout" in name or "offpolicy" in name else core_algos
    if "logits" in name:
        module = importlib.import_module("verl.utils.torch_functional")
    theirs = inspect.signature(getattr(module, name)).parameters
    ours = inspect.signature(getattr(preset, name)).parameters
    assert list(ours) == list(theirs)
    for key, parameter in theirs.items():
        assert ours[key].default == parameter.default or key in ("gamma", "lam"), key


@pytest.mark.parametrize("name", OUTCOME)
def test_outcome_estimator(name: str) -> None:
    rewards, mask, labels = rollout()
    expected = getattr(core_algos, name)(rewards, mask, labels)
    assert_same(getattr(preset, name)(rewards, mask, labels), expected, mask)


def test_dr_grpo() -> None:
    rewards, mask, labels = rollout()
    expected = core_algos.compute_grpo_outcome_advantage(rewards, mask, labels, 1e-6, False)
    assert_same(
        preset.compute_grpo_outcome_advantage(rewards, mask, labels, 1e-6, False), expected, mask
    )


def test_grpo_counts_a_reward_at_a_masked_token_as_verl_does() -> None:
    """The score of a response is the sum of its whole row."""
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[1, 0], [1, 1]])
    expected = core_algos.compute_grpo_outcome_advantage(rewards, mask, ["a", "a"])
    assert_same(preset.compute_grpo_outcome_advantage(rewards, mask, ["a", "a"]), expected, mask)


@pytest.mark.parametrize("by_std", [True, False])
def test_pass_at_k(by_std: bool) -> None:
    rewards, mask, labels = rollout()
    several = np.array([np.sum(labels == label) > 1 for label in labels])
    rewards, mask, labels = rewards[several], mask[several], labels[several]
    config = {"norm_adv_by_std_in_grpo": by_std}
    expected = core_algos.compute_grpo_passk_outcome_advantage(rewards, mask, labels, config=config)
    got = preset.compute_grpo_passk_outcome_advantage(rewards, mask, labels, config=config)
    assert_same(got, expected, mask)
    for module in (core_algos, preset):
        with pytest.raises(ValueError):
            module.compute_grpo_passk_outcome_advantage(
                rewards[:1], mask[:1], labels[:1], config=config
            )


@pytest.mark.parametrize("weights", [None, [0.5, 2.0]])
def test_gdpo(weights: list[float] | None) -> None:
    _, mask, labels = rollout()
    mask[:] = 1
    num_samples, length = mask.shape
    objectives = torch.randn(num_samples, 2) * torch.tensor([1.0, 100.0])
    arguments: dict[str, Any] = {
        "config": {"gdpo_reward_keys": ["format", "accuracy"], "gdpo_reward_weights": weights},
        "non_tensor_batch": {"format": objectives[:, 0].numpy(), "accuracy": objectives[:, 1].numpy()},
        "batch": {
            "prompts": torch.zeros(num_samples, 3),
            "attention_mask": torch.ones(num_samples, 3 + length, dtype=torch.int64),
        },
    }  # fmt: skip
    rewards = torch.zeros(num_samples, length)
    expected = core_algos.compute_gdpo_outcome_advantage(rewards, mask, labels, **arguments)
    got = preset.compute_gdpo_outcome_advantage(rewards, mask, labels, **arguments)
    assert_same(got, expected, mask)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95)])
def test_gae(gamma: float, lam: float) -> None:
    rewards, mask, _ = rollout()
    values = torch.randn_like(rewards)
    expected = core_algos.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
    got = preset.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
    assert_same(got, expected, mask)


def test_reinforce_plus_plus_and_remax() -> None:
    rewards, mask, _ = rollout()
    algorithm = AlgoConfig(gamma=0.9)
    expected = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        rewards, mask, config=algorithm
    )
    got = preset.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config=algorithm)
    assert_same(got, expected, mask)
    baselines = torch.randn(len(rewards))
    expected = core_algos.compute_remax_outcome_advantage(rewards, baselines, mask)
    assert_same(preset.compute_remax_outcome_advantage(rewards, baselines, mask), expected, mask)


@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize("with_weights", [True, False])
@pytest.mark.parametrize("holes", [True, False])
def test_optimal_token_baseline(zero_tail: bool, with_weights: bool, holes: bool) -> None:
    rewards, mask, labels = rollout(length=11)
    if not holes:
        lengths = torch.randint(1, 12, (len(mask), 1))
        mask = (torch.arange(11) < lengths).long()
    mask[4] = 0
    rewards = rewards * mask
    logp = -torch.rand_like(rewards) - 0.1
    arguments = {
        "old_log_probs": logp,
        "sum_pi_squared": torch.rand_like(rewards) * 0.5 + logp.exp().square(),
        "rollout_is_weights": torch.rand_like(rewards) + 0.5 if with_weights else None,
        "handle_zero_tail": zero_tail,
    }
    for name in (
        "compute_optimal_token_baseline_advantage",
        "compute_multi_turn_optimal_token_baseline_advantage",
    ):
        expected = getattr(core_algos, name)(rewards, mask, labels, **arguments)
        got = getattr(preset, name)(rewards, mask, labels, **arguments)
        assert_same(got, expected, mask)


def run(
    loss: Callable[..., Any], mode: str, cfg: Any, weights: bool, mask: Tensor
) -> tuple[Any, ...]:
    torch.manual_seed(3)
    data = batch(SHAPE, is_weights=weights)
    logp = leaf(data.logp)
    torch.manual_seed(4)  # clip_cov draws
    value, metrics = loss(
        old_log_prob=data.old_logp,
        log_prob=logp,
        advantages=data.advantages,
        response_mask=mask,
        loss_agg_mode=mode,
        config=cfg,
        rollout_is_weights=data.is_weights,
    )
    value.backward()
    return value.detach(), metrics, logp.grad


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mode", AGGS)
def test_policy_loss(name: str, mode: str) -> None:
    """Values, gradients and metrics, with and without rollout weights, local and global counts."""
    mask = response_mask()
    info = {
        "dp_size": 2,
        "batch_num_tokens": 700,
        "global_batch_size": 12,
        "loss_scale_factor": 100,
    }
    ours, theirs = (
        getattr(preset, f"compute_policy_loss_{name}"),
        core_algos.get_policy_loss_fn(name),
    )
    for weights, is_global in itertools.product((False, True), (False, True)):
        cfg = actor(
            clip_ratio_low=0.15, clip_ratio_high=0.3, clip_ratio_c=1.5,
            global_batch_info=dict(info) if is_global else {},
            policy_loss=config.PolicyLossConfig(
                loss_mode=name, dro_beta=0.3, clip_cov_ratio=0.05, clip_cov_lb=0.1, kl_cov_ratio=0.1
            ),
        )  # fmt: skip
        expected = run(theirs, mode, cfg, weights, mask)
        got = run(ours, mode, cfg, weights, mask)
        torch.testing.assert_close(got[0], expected[0], atol=1e-5, rtol=2e-5)
        torch.testing.assert_close(got[2], expected[2], atol=2e-6, rtol=5e-5)
        assert got[1].keys() == expected[1].keys()
        for key, value in expected[1].items():
            assert float(got[1][key]) == pytest.approx(value, abs=2e-6), key


@pytest.mark.parametrize("mode", AGGS)
def test_agg_loss(mode: str) -> None:
    mask = response_mask()
    for info in (
        {},
        {"dp_size": 2, "batch_num_tokens": 70, "global_batch_size": 9, "loss_scale_factor": 7},
    ):
        matrix = torch.randn(SHAPE)
        ours, theirs = leaf(matrix), leaf(matrix)
        got = preset.agg_loss(ours, mask, mode, **info)
        expected = core_algos.agg_loss(theirs, mask, mode, **info)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=2e-5)
        torch.autograd.backward([got, expected])
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-7, rtol=2e-5)


@pytest.mark.parametrize("mode", AGGS)
def test_value_loss(mode: str) -> None:
    values, old, returns = torch.randn(3, *SHAPE)
    mask = response_mask()
    for info in (
        {},
        {"dp_size": 2, "batch_num_tokens": 70, "global_batch_size": 9, "loss_scale_factor": 7},
    ):
        ours, theirs = leaf(values), leaf(values)
        got = preset.compute_value_loss(ours, returns, old, mask, 0.3, mode, **info)
        expected = core_algos.compute_value_loss(theirs, returns, old, mask, 0.3, mode, **info)
        torch.testing.assert_close(got[0], expected[0], atol=1e-6, rtol=2e-5)
        assert float(got[1]) == pytest.approx(float(expected[1]), abs=1e-6)
        torch.autograd.backward([got[0], expected[0]])
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-7, rtol=2e-5)


@pytest.mark.parametrize(
    "kind", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k3+", "abs+", "k2+"]
)
def test_kl_penalty(kind: str) -> None:
    logp, ref = torch.randn(2, 400) * 3
    ours, theirs = leaf(logp), leaf(logp)
    got, expected = preset.kl_penalty(ours, ref, kind), core_algos.kl_penalty(theirs, ref, kind)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.autograd.backward([got.sum(), expected.sum()])
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", [2.0, "0.5_3.0"])
@pytest.mark.parametrize("normalise", [True, False])
def test_rollout_weights(level: str, threshold: float | str, normalise: bool) -> None:
    log_ratio, mask = torch.randn(6, 9), (torch.rand(6, 9) < 0.7).long()
    mask[2] = 0
    expected, metrics = rollout_corr.compute_rollout_correction_weights(
        log_ratio, mask, level, threshold, normalise
    )
    got, ours = preset.compute_rollout_correction_weights(
        log_ratio, mask, level, threshold, normalise
    )
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert ours.keys() == metrics.keys()
    for key, value in metrics.items():
        assert float(ours[key]) == pytest.approx(value, abs=2e-5, rel=2e-5), key


def test_off_policy_metrics() -> None:
    logp, rollout_logp = -3 * torch.rand(2, 6, 9)
    mask = (torch.rand(6, 9) < 0.7).long()
    mask[2] = 0
    for engine in (None, rollout_logp):
        expected = rollout_corr.compute_offpolicy_metrics(logp, engine, mask)
        got = preset.compute_offpolicy_metrics(logp, engine, mask)
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert float(got[key]) == pytest.approx(value, abs=1e-5, rel=1e-5), key


BYPASS: dict[str, dict[str, Any]] = {
    "ppo_clip": {},
    "ppo_rejection": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.6"},
    "reinforce": {"loss_type": "reinforce", "rollout_is": "token"},
    "reinforce_sequence": {
        "loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_threshold": "0.2_4.0",
        "rollout_is_batch_normalize": True, "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.5",
    },
}  # fmt: skip


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("option", BYPASS)
def test_bypass_mode(option: str, mode: str) -> None:
    """Loss, gradient and metrics; of the rejection's statistics those that the preset has."""
    from verl.workers.config import PolicyLossConfig

    mask = response_mask()
    cfg = actor(policy_loss=PolicyLossConfig(rollout_correction=BYPASS[option]))
    theirs = run(core_algos.get_policy_loss_fn("bypass_mode"), mode, cfg, False, mask)
    ours = run(preset.compute_policy_loss_bypass_mode, mode, cfg, False, mask)
    torch.testing.assert_close(ours[0], theirs[0], atol=3e-5, rtol=3e-5)
    torch.testing.assert_close(ours[2], theirs[2], atol=1e-6, rtol=5e-5)
    integration.install()
    try:
        plugged = run(core_algos.get_policy_loss_fn("bypass_mode"), mode, cfg, False, mask)
    finally:
        integration.uninstall()
    torch.testing.assert_close(plugged[0], theirs[0], atol=3e-5, rtol=3e-5)
    torch.testing.assert_close(plugged[2], theirs[2], atol=1e-6, rtol=5e-5)
    assert plugged[1].keys() == theirs[1].keys()
    for key, value in theirs[1].items():
        assert float(plugged[1][key]) == pytest.approx(float(value), abs=2e-5, rel=2e-5), key
    missing = set(theirs[1].keys() - ours[1].keys())
    assert all("rollout_rs" in key for key in missing)
    assert ours[1].keys() <= theirs[1].keys()
    for key, value in ours[1].items():
        assert float(value) == pytest.approx(float(theirs[1][key]), abs=2e-5, rel=2e-5), key


@pytest.mark.parametrize("option", sorted(rollout_corr.SUPPORTED_ROLLOUT_RS_OPTIONS))
def test_rejection(option: str) -> None:
    log_ratio, mask = torch.randn(40, 9) * 0.4, (torch.rand(40, 9) < 0.7).long()
    mask[2] = 0
    other = "token_k2" if option == "token_k3" else "token_k3"
    for threshold in ("0.7_1.5", "1.3") if option.endswith("k1") else ("0.2",):
        arguments = (log_ratio, mask, f"{option}, {other}", f"{threshold}, 0.9")
        expected, metrics = rollout_corr.compute_rollout_rejection_mask(*arguments)
        got, ours = preset.compute_rollout_rejection_mask(*arguments)
        assert torch.equal(got, expected)
        for key, value in ours.items():
            assert float(value) == pytest.approx(metrics[key], abs=1e-6), key
