"""SkyRL by its own functions, trainers that are not installed by the formulas of their sources."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastrl
from fastrl import surrogates as sur
from fastrl.integrations import skyrl as integration
from fastrl.presets import skyrl as skyrl_preset
from tests.helpers import leaf
from tests.integrations.peers import load
from tests.integrations.test_verl_groups import rollout
from tests.ops.losses import batch

SHAPE = (5, 30)


def close(got: Tensor, expected: Tensor, mask: Tensor | None = None) -> None:
    if mask is not None:
        expected = torch.where(mask != 0, expected, 0.0)
    torch.testing.assert_close(got, expected.to(got.dtype), atol=3e-5, rtol=3e-5)


@pytest.fixture(scope="module")
def skyrl() -> Any:
    root = "skyrl.backends.skyrl_train"
    bare = ("skyrl", "skyrl.backends", root, f"{root}.utils", "skyrl.train")
    return load(f"{root}.utils.ppo_utils", bare, ("skyrl.train.config",))


def test_skyrl_advantages(skyrl: Any) -> None:
    rewards, mask, labels = rollout()
    expected, _ = skyrl.compute_grpo_outcome_advantage(rewards, mask, labels)
    scores = rewards.sum(1)
    close(fastrl.group_advantages(scores, labels, mask=mask, singleton="raw"), expected)
    expected, _ = skyrl.compute_rloo_outcome_advantage(rewards, mask, labels)
    options: dict[str, Any] = {"baseline": "leave_one_out", "scale": "none"}
    close(fastrl.group_advantages(scores, labels, mask=mask, **options), expected)
    positive = rewards.abs()
    expected, _ = skyrl.compute_maxrl_advantage(positive, mask, labels)
    several = np.array([np.sum(labels == label) > 1 for label in labels])
    got = fastrl.group_advantages(positive.sum(1), labels, mask=mask, scale="mean")
    close(got[several], expected[several])


def test_skyrl_gae(skyrl: Any) -> None:
    """Right-aligned responses; the mask is no part of the recursion."""
    rewards, values = torch.randn(2, *SHAPE)
    mask = (torch.rand(SHAPE) < 0.7).float()
    expected, returns = skyrl.compute_gae_advantage_return(rewards, values, mask, 0.99, 0.95)
    got = fastrl.gae(rewards, values, mask, gamma=0.99, lam=0.95, holes="ignore")
    close(fastrl.whiten(got.advantages, mask), expected, mask)
    close(got.returns, returns, mask)


def skyrl_config(**options: Any) -> SimpleNamespace:
    correction = SimpleNamespace(
        tis_ratio_type=None, sequence_mask_metric=None, outlier_token_is_threshold_low=None,
        outlier_token_is_threshold_high=None, token_mask_is_threshold_low=None, token_mask_is_threshold_high=None,
    )  # fmt: skip
    return SimpleNamespace(
        eps_clip_low=0.2, eps_clip_high=0.3, clip_ratio_c=1.5, off_policy_correction=correction,
        loss_reduction="sequence_mean", sapo=SimpleNamespace(tau_pos=1.0, tau_neg=1.05),
        dppo=SimpleNamespace(dppo_type="binary_tv", delta_low=0.1, delta_high=0.2), **options,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["regular", "dual_clip", "sapo", "binary_tv", "binary_kl"])
def test_skyrl_losses(skyrl: Any, kind: str) -> None:
    """Sums: the divisor is already in the advantages there."""
    data, mask = batch(SHAPE), (torch.rand(SHAPE) < 0.7).float()
    cfg = skyrl_config(policy_loss_type=kind)
    data = data._replace(old_logp=data.old_logp.clamp(max=-0.01))  # a probability, for the KL
    theirs, ours = leaf(data.logp), leaf(data.logp)
    rest = (data.old_logp, data.advantages, mask)
    function = "ppo_policy_loss" if kind in ("regular", "dual_clip") else "dppo_policy_loss"
    function = "sapo_policy_loss" if kind == "sapo" else function
    if function == "dppo_policy_loss":
        cfg.dppo.dppo_type = kind
    expected, metrics = getattr(skyrl, function)(theirs, *rest[:2], cfg, mask)
    got, ours_metrics = getattr(skyrl_preset, function)(ours, *rest[:2], cfg, mask)
    assert float(ours_metrics["clip_ratio"]) == pytest.approx(metrics["clip_ratio"], abs=1e-6)
    torch.autograd.backward([got, expected])
    close(got.detach(), expected.detach())
    assert theirs.grad is not None
    close(ours.grad, theirs.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gae", "grpo", "rloo", "maxrl"])
def test_skyrl_registered_estimators(skyrl: Any, name: str) -> None:
    """Through the registry, after a trip through pickle as to a Ray worker."""
    import cloudpickle

    rewards, mask, labels = rollout()
    rewards = rewards.abs()
    arguments = {
        "token_level_rewards": rewards, "response_mask": mask, "index": labels, "values": torch.randn_like(rewards),
        "config": None, "gamma": 0.9, "lambd": 0.8, "grpo_norm_by_std": True,
    }  # fmt: skip
    expected = skyrl.AdvantageEstimatorRegistry._functions[name](**arguments)
    integration.install()
    try:
        registered = skyrl.AdvantageEstimatorRegistry._functions[f"fastrl_{name}"]
        got = cloudpickle.loads(cloudpickle.dumps(registered))(**arguments)
    finally:
        integration.uninstall()
    for ours, theirs in zip(got, expected):
        close(ours, theirs, mask)
    assert f"fastrl_{name}" not in skyrl.AdvantageEstimatorRegistry._functions


@pytest.mark.parametrize("name", ["regular", "dual_clip"])
def test_skyrl_registered_losses(skyrl: Any, name: str) -> None:
    data, mask = batch(SHAPE), (torch.rand(SHAPE) < 0.7).float()
    results = []
    for ours in (False, True):
        logp = leaf(data.logp)
        if ours:
            integration.install()
        try:
            loss = skyrl.PolicyLossRegistry._functions[name]
            value, metrics = loss(
                *(logp, data.old_logp, data.advantages), skyrl_config(policy_loss_type=name), mask
            )
        finally:
            integration.uninstall()
        value.backward()
        results.append((value.detach(), logp.grad, torch.tensor(float(metrics["clip_ratio"]))))
    for got, expected in zip(results[1], results[0]):
        close(got, expected)


HALF = math.sqrt(0.5)
R = torch.tensor([1.0, 0.0, 0.5, 0.5])
G = ["a", "a", "b", "b"]
FORMULAS: dict[str, tuple[Tensor, list[float]]] = {
    # slime: (r - mean) / (std + 1e-6), ddof 1
    "slime_grpo": (fastrl.group_advantages(R, G), [HALF, -HALF, 0, 0]),
    # ROLL: the same, agentic: 0 where the std is at most 1e-6
    "roll_grpo": (fastrl.group_advantages(R, G), [HALF, -HALF, 0, 0]),
    # RLinf: REINFORCE++ whitens with ddof 0 and max(var, 1e-8): mean 0.5, var 0.125
    "rlinf_reinpp": (
        fastrl.whiten(R, ddof=0, eps=1e-8, eps_mode="rsqrt_max"),
        [0.5 / math.sqrt(0.125), -0.5 / math.sqrt(0.125), 0, 0],
    ),
    # NeMo-RL: leave-one-out mean, no division
    "nemo_rl_loo": (fastrl.group_advantages(R, G, baseline="leave_one_out", scale="none"), [1, -1, 0, 0]),
    # prime-rl: r - mean; its MaxRL divides by the mean
    "prime_rl_grpo": (fastrl.group_advantages(R, G, scale="none"), [0.5, -0.5, 0, 0]),
    "prime_rl_max_rl": (fastrl.group_advantages(R, G, scale="mean", eps=0.0), [1, -1, 0, 0]),
    # open-instruct, "standard": ddof 0, eps 1e-8
    "open_instruct": (fastrl.group_advantages(R, G, ddof=0, eps=1e-8), [1, -1, 0, 0]),
    # torchforge: eps 1e-4
    "torchforge": (fastrl.group_advantages(R, G, eps=1e-4), [0.5 / (HALF + 1e-4), -0.5 / (HALF + 1e-4), 0, 0]),
    # slime's dual clip: A = -1, rho = 4, c = 3 bounds the loss at 3
    "slime_dual_clip": (
        fastrl.policy_loss(torch.tensor([[math.log(4.0)]]), torch.zeros(1, 1), torch.tensor([-1.0]), dual_clip=3.0, log_ratio_clamp=None).loss.reshape(1),
        [3.0],
    ),
    # ROLL's dual clip is 1 + 2 * 0.2
    "roll_dual_clip": (
        fastrl.policy_loss(torch.tensor([[math.log(4.0)]]), torch.zeros(1, 1), torch.tensor([-1.0]), dual_clip=1.4).loss.reshape(1),
        [1.4],
    ),
    # prime-rl: -A rho within |p - q| <= 0.2, plus 1e-3 d^2: p = 0.6, q = 0.5
    "prime_rl_loss": (
        (sur.dppo_loss(torch.tensor([[0.6]]).log(), torch.tensor([[0.5]]).log(), torch.tensor([1.0]), through_ratio=True).loss
         + 2e-3 * sur.kl_penalty(torch.tensor([0.6]).log(), torch.tensor([0.5]).log(), estimator="k2").sum()).reshape(1),
        [-1.2 + 1e-3 * math.log(1.2) ** 2],
    ),
    # NeMo-RL: KL k3 with the score-function term has the value of k3: exp(-0.5) - 1 + 0.5
    "nemo_rl_kl": (
        sur.kl_penalty(torch.tensor([-1.0]), torch.tensor([-1.5]), estimator="k3", gradient="score", input_clamp=20.0, clamp_value=10.0),
        [math.exp(-0.5) - 0.5],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name: str) -> None:
    got, expected = FORMULAS[name]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=got.dtype), atol=3e-6, rtol=3e-6)
