"""Everything in SkyRL's registries against fastrl, through the registries: values, gradients and metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl.integrations import report
from fastrl.integrations import skyrl as integration
from fastrl.presets import skyrl as preset
from tests.helpers import leaf
from tests.integrations.peers import load
from tests.integrations.test_verl_groups import rollout
from tests.ops.losses import batch

SHAPE = (6, 40)
ROOT = "skyrl.backends.skyrl_train"
BARE = ("skyrl", "skyrl.backends", ROOT, f"{ROOT}.utils", "skyrl.train")


@pytest.fixture(scope="module")
def skyrl() -> Any:
    return load(f"{ROOT}.utils.ppo_utils", BARE, ("skyrl.train.config",))


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected.to(got.dtype), atol=3e-5, rtol=5e-5)


CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "token_tis": {"tis_ratio_type": "token"},
    "sequence_tis": {"tis_ratio_type": "sequence"},
    "geometric_mask": {"sequence_mask_metric": "geometric", "geo_mask_low": 0.9, "geo_mask_high": 1.1},
    "product_mask": {"sequence_mask_metric": "product", "tis_ratio_type": "token"},
    "outliers": {"outlier_token_is_threshold_low": 0.6, "outlier_token_is_threshold_high": 3.0},
    "token_mask": {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.3},
}  # fmt: skip


def config_of(name: str, correction: str = "none", **options: Any) -> SimpleNamespace:
    off_policy = {
        "tis_ratio_type": None, "token_tis_ratio_clip_high": 1.5, "sequence_tis_ratio_clip_high": 2.0,
        "sequence_mask_metric": None, "geo_mask_high": 1.01, "geo_mask_low": 0.99, "product_mask_high": 2.0,
        "product_mask_low": 0.5, "outlier_token_is_threshold_low": None, "outlier_token_is_threshold_high": None,
        "token_mask_is_threshold_low": None, "token_mask_is_threshold_high": None,
    }  # fmt: skip
    return SimpleNamespace(
        policy_loss_type=name, eps_clip_low=0.2, eps_clip_high=0.3, clip_ratio_c=1.5, loss_reduction="sequence_mean",
        off_policy_correction=SimpleNamespace(**(off_policy | CORRECTIONS[correction])),
        sapo=SimpleNamespace(tau_pos=1.0, tau_neg=1.05),
        dppo=SimpleNamespace(dppo_type="binary_tv", delta_low=0.1, delta_high=0.2),
        cispo=SimpleNamespace(
            cispo_anchor=options.get("anchor", "old"), cispo_eps_clip_low=0.3, cispo_eps_clip_high=0.5
        ),
        clip_cov=SimpleNamespace(clip_ratio=0.1, clip_cov_lb=0.1, clip_cov_ub=5.0),
        kl_cov=SimpleNamespace(kl_cov_frac=0.2, ppo_kl_coef=0.7),
    )  # fmt: skip


def results(skyrl: Any, name: str, config: Any, with_rollout: bool) -> list[tuple[Any, ...]]:
    """(loss, gradient, metrics) of SkyRL and of fastrl, which takes a trip through pickle as to a Ray worker."""
    import cloudpickle

    torch.manual_seed(2)
    data, mask = batch(SHAPE), (torch.rand(SHAPE) < 0.7).float()
    mask[:, 0] = 1
    old = data.old_logp.clamp(max=-0.01)
    rollout_logp = (old + 0.2 * torch.randn(SHAPE)).clamp(max=-0.01) if with_rollout else None
    out = []
    for ours in (False, True):
        logp = leaf(data.logp)
        if ours:
            integration.install()
        try:
            loss = skyrl.PolicyLossRegistry._functions[name]
            loss = cloudpickle.loads(cloudpickle.dumps(loss)) if ours else loss
            torch.manual_seed(9)
            value, metrics = loss(logp, old, data.advantages, config, mask, rollout_logp)
        finally:
            integration.uninstall()
        value.backward()
        assert logp.grad is not None
        out.append(
            (value.detach(), logp.grad, {key: float(number) for key, number in metrics.items()})
        )
    return out


def compare(expected: tuple[Any, ...], got: tuple[Any, ...]) -> None:
    close(got[0], expected[0])
    close(got[1], expected[1])
    assert got[2] == pytest.approx(expected[2], abs=2e-6, rel=1e-5)


LOSSES = (
    *("regular", "dual_clip", "gspo", "cispo", "rollout_is", "clip_cov", "kl_cov", "sapo"),
    *("cross_entropy", "importance_sampling", "dppo"),
)


def test_every_loss_and_estimator_of_the_registries(skyrl: Any) -> None:
    losses, estimators = (
        skyrl.PolicyLossRegistry._functions,
        skyrl.AdvantageEstimatorRegistry._functions,
    )
    assert set(losses) == set(LOSSES)
    theirs = dict(losses)
    names = set(estimators)
    integration.install()
    try:
        assert {f"fastrl_{name}" for name in names} <= set(estimators)
        assert all(losses[name] is not theirs[name] for name in LOSSES)
        assert len([line for line in report() if line.startswith("skyrl")]) >= 18
    finally:
        integration.uninstall()
    assert losses == theirs and set(estimators) == names


@pytest.mark.parametrize("name", LOSSES)
def test_skyrl_loss_of_the_registry(skyrl: Any, name: str) -> None:
    compare(*results(skyrl, name, config_of(name), with_rollout=name == "rollout_is"))


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize(
    "name", ["regular", "dual_clip", "gspo", "cispo", "rollout_is", "sapo", "dppo"]
)
def test_skyrl_off_policy_correction(skyrl: Any, name: str, correction: str) -> None:
    compare(*results(skyrl, name, config_of(name, correction), with_rollout=True))


def test_skyrl_cispo_against_the_rollout(skyrl: Any) -> None:
    compare(*results(skyrl, "cispo", config_of("cispo", anchor="rollout"), with_rollout=True))


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_skyrl_reinforce_plus_plus(skyrl: Any, gamma: float) -> None:
    """The return starts anew behind a masked token, whose own reward still counts before it."""
    rewards, mask, _ = rollout()
    mask = mask.clone()
    expected, returns = skyrl.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma)
    got, got_returns = preset.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma)
    close(got_returns, torch.where(mask != 0, returns, 0.0))
    close(got, expected)
    by_hand = preset.compute_reinforce_plus_plus_outcome_advantage(
        torch.tensor([[0.0, 0.0, 2.0, 0.0, 4.0]]), torch.tensor([[1, 1, 0, 1, 1]]), 0.5
    )
    assert by_hand[1].tolist() == [[0.5, 1.0, 0.0, 2.0, 4.0]]


@pytest.mark.parametrize("clip", [None, 0.2])
def test_skyrl_value_loss(skyrl: Any, clip: float | None) -> None:
    """A row without a valid token counts in the mean over rows."""
    values, old, returns = torch.randn(3, *SHAPE)
    mask = (torch.rand(SHAPE) < 0.7).float()
    mask[2] = 0
    outputs = []
    for function in (skyrl.ppo_critic_loss, preset.ppo_critic_loss):
        leaves = leaf(values)
        loss, fraction = function(leaves, old, returns, SimpleNamespace(value_clip=clip), mask)
        loss.backward()
        outputs.append((loss.detach(), leaves.grad, fraction))
    close(outputs[1][0], outputs[0][0])
    close(outputs[1][1], outputs[0][1])
    assert outputs[1][2] == pytest.approx(outputs[0][2])


def test_skyrl_log_probs(skyrl: Any) -> None:
    tensors = load(f"{ROOT}.utils.torch_utils", BARE, ())
    logits, labels = 2 * torch.randn(3, 5, 97), torch.randint(97, (3, 5))
    outputs = []
    for ours in (False, True):
        if ours:
            integration.install()
        try:
            leaves = leaf(logits)
            logp = tensors.logprobs_from_logits(leaves, labels)
        finally:
            integration.uninstall()
        (logp * labels).sum().backward()
        outputs.append((logp.detach(), leaves.grad))
    for got, expected in zip(outputs[1], outputs[0]):
        close(got, expected)
