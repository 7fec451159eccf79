"""verl's own code path with and without the plugin: compute_advantage over DataProto, ppo_loss over jagged batches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastrl.integrations import report
from fastrl.integrations import verl as integration
from fastrl.integrations._patch import VersionError
from tests.integrations.test_verl_losses import actor, config

ray_trainer = pytest.importorskip(
    "verl.trainer.ppo.ray_trainer", reason="verl is not installed: requirements/peers-no-deps.txt"
)
core_algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed")
losses = pytest.importorskip("verl.workers.utils.losses", reason="verl is not installed")
padding = pytest.importorskip("verl.workers.utils.padding", reason="verl is not installed")

from tensordict import TensorDict  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.trainer.config import AlgoConfig  # noqa: E402


@pytest.fixture
def installed() -> Iterator[None]:
    integration.install()
    yield
    integration.uninstall()


def rollout(name: str) -> Any:
    torch.manual_seed(1)
    rows, length = 12, 10
    mask = (torch.rand(rows, length) < 0.7).long()
    mask[:, 0] = 1
    logp = -torch.rand(rows, length)
    return DataProto.from_dict(
        tensors={
            "token_level_rewards": torch.randn(rows, length) * mask,
            "values": torch.randn(rows, length),
            "response_mask": mask,
            # verl passes these on to every estimator that finds them in the batch, and not all take them.
            **({"reward_baselines": torch.randn(rows)} if name == "remax" else {}),
            "old_log_probs": logp,
            "sum_pi_squared": logp.exp().square(),
            "prompts": torch.zeros(rows, 3),
            "attention_mask": torch.ones(rows, 3 + length, dtype=torch.long),
        },
        non_tensors={
            "uid": np.array(["a", "b", "c"] * 4, dtype=object),
            "accuracy": np.random.default_rng(0).random(rows),
        },
    )


@pytest.mark.parametrize("name", sorted(integration._ESTIMATORS))
def test_compute_advantage(name: str) -> None:
    """The driver's function with every estimator of verl: same advantages and returns at valid tokens."""
    options = {
        "gamma": 0.99,
        "lam": 0.95,
        "config": AlgoConfig(gamma=0.99, gdpo_reward_keys=["accuracy"]),
    }
    expected = ray_trainer.compute_advantage(rollout(name), name, **options).batch
    integration.install()
    try:
        got = ray_trainer.compute_advantage(rollout(name), name, **options).batch
    finally:
        integration.uninstall()
    valid = expected["response_mask"] != 0
    for key in ("advantages", "returns"):
        torch.testing.assert_close(
            got[key][valid], expected[key][valid].to(got[key].dtype), atol=3e-5, rtol=3e-5
        )
        assert torch.count_nonzero(got[key][~valid]) == 0


def jagged(lengths: Tensor, make: Any) -> Tensor:
    return torch.nested.nested_tensor([make(int(n)) for n in lengths], layout=torch.jagged)


def batch(counts: dict[str, Any]) -> tuple[TensorDict, dict[str, Tensor]]:
    torch.manual_seed(2)
    prompts, responses = torch.tensor([2, 4, 1, 3]), torch.tensor([5, 1, 7, 4])
    logp = [-2 * torch.rand(int(n)) for n in responses]

    def near(scale: float) -> Tensor:
        rows = [x + scale * torch.randn(len(x)) for x in logp]
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    data = TensorDict(
        {
            "prompts": jagged(prompts, lambda n: torch.zeros(n, dtype=torch.long)),
            "responses": jagged(responses, lambda n: torch.zeros(n, dtype=torch.long)),
            "response_mask": jagged(responses, lambda n: (torch.arange(n) % 4 != 2).long()),
            "old_log_probs": near(0.3),
            "ref_log_prob": near(0.3),
            "advantages": jagged(responses, torch.randn),
            "values": jagged(responses, torch.randn),
            "returns": jagged(responses, torch.randn),
        },
        batch_size=[4],
    )
    for key, value in counts.items():
        data.set_non_tensor(key, value)
    # What the model returns is over prompt and response, one position earlier.
    whole = [torch.cat([torch.randn(int(p) - 1), x, torch.randn(1)]) for p, x in zip(prompts, logp)]
    output = {
        "log_probs": torch.cat(whole),
        "entropy": torch.rand(int((prompts + responses).sum())),
        "values": torch.randn(int((prompts + responses).sum())),
    }
    return data, output


COUNTS = (
    {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None},
    {"dp_size": 2, "batch_num_tokens": 31, "global_batch_size": 9},
)


def run_ppo_loss(mode: str, agg: str, counts: dict[str, Any]) -> tuple[Any, ...]:
    data, output = batch(counts)
    output["log_probs"] = output["log_probs"].requires_grad_()
    output["entropy"] = output["entropy"].requires_grad_()
    cfg = actor(
        loss_agg_mode=agg, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="low_var_kl", entropy_coeff=0.01,
        policy_loss=config.PolicyLossConfig(loss_mode=mode, dro_beta=0.1),
    )  # fmt: skip
    torch.manual_seed(3)
    loss, metrics = losses.ppo_loss(cfg, output, data)
    loss.backward()
    flat = {k: v.aggregate() if hasattr(v, "aggregate") else v for k, v in metrics.items()}
    return loss.detach(), flat, output["log_probs"].grad, output["entropy"].grad


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("mode", integration._LOSSES)
def test_ppo_loss_over_jagged_batches(mode: str, agg: str, counts: dict[str, Any]) -> None:
    """Policy, KL and entropy through verl's worker function, jagged in, gradients at the model's outputs."""
    expected = run_ppo_loss(mode, agg, counts)
    integration.install()
    try:
        got = run_ppo_loss(mode, agg, counts)
    finally:
        integration.uninstall()
    torch.testing.assert_close(got[0], expected[0], atol=1e-5, rtol=2e-5)
    torch.testing.assert_close(got[2], expected[2], atol=2e-6, rtol=5e-5)
    torch.testing.assert_close(got[3], expected[3], atol=2e-6, rtol=5e-5)
    assert got[1].keys() == expected[1].keys()
    for key, value in expected[1].items():
        assert float(got[1][key]) == pytest.approx(float(value), abs=1e-5), key


@pytest.mark.parametrize("counts", COUNTS)
def test_value_loss_over_jagged_batches(counts: dict[str, Any]) -> None:
    cfg = SimpleNamespace(cliprange_value=0.3, loss_agg_mode="token-mean", loss_scale_factor=None)
    results = []
    for ours in (False, True):
        data, output = batch(counts)
        output["values"] = output["values"].requires_grad_()
        if ours:
            integration.install()
        try:
            loss, metrics = losses.value_loss(cfg, output, data)
        finally:
            integration.uninstall()
        loss.backward()
        results.append((loss.detach(), output["values"].grad, metrics["critic/vf_clipfrac"]))
    for got, expected in zip(results[1][:2], results[0][:2]):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=2e-5)
    assert results[1][2] == pytest.approx(results[0][2], abs=1e-6)


def test_padding_equals_verls_loop() -> None:
    data, output = batch(COUNTS[0])
    for values in (output["values"], torch.randn(len(output["values"]), 3)):
        ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
        got = integration.no_padding_2_padding(ours, data)
        expected = padding.no_padding_2_padding(theirs, data)
        assert torch.equal(got, expected)
        torch.autograd.backward([got.square().sum(), expected.square().sum()])
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.usefixtures("installed")
def test_report_names_what_was_replaced() -> None:
    lines = report()
    assert "verl: verl.trainer.ppo.core_algos.compute_gae_advantage_return" in lines
    assert "verl: verl registry: vanilla" in lines
    assert "verl: verl.workers.utils.losses.agg_loss" in lines
    integration.install()
    assert report() == lines


def test_uninstall_leaves_verl_as_it_was() -> None:
    before = core_algos.compute_gae_advantage_return, dict(core_algos.POLICY_LOSS_REGISTRY)
    integration.install()
    assert core_algos.compute_gae_advantage_return is not before[0]
    integration.uninstall()
    assert (core_algos.compute_gae_advantage_return, core_algos.POLICY_LOSS_REGISTRY) == before
    assert report() == []


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastrl.integrations._patch.metadata.version", lambda name: "0.8.0")
    with pytest.raises(VersionError, match=r"0\.9\.1.*got 0\.8\.0.*FASTRL_UNCHECKED_VERSIONS"):
        integration.install()
    monkeypatch.setenv("FASTRL_UNCHECKED_VERSIONS", "1")
    integration.install()
    integration.uninstall()


@pytest.mark.parametrize(("setting", "module"), [("1", "fastrl.presets"), ("0", "verl.trainer")])
def test_plugin_entry_point(setting: str, module: str) -> None:
    """A process that imports verl gets fastrl without being told, unless FASTRL_VERL=0."""
    if "fastrl" not in {point.name for point in entry_points(group="verl.plugins")}:
        pytest.skip("the installed fastrl has no entry point yet: pip install -e . again")
    script = (
        "import verl.trainer.ppo.core_algos as c; print(c.compute_gae_advantage_return.__module__)"
    )
    environment = os.environ | {"FASTRL_VERL": setting}
    out = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert out.stdout.splitlines()[-1].startswith(module)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vllm", "vllm"),
        ("sglang", "sglang"),
        ("trtllm", "pynvml"),
        ("hf", "not found"),
        ("naive", "not found"),
    ],
)
def test_what_stops_verls_trainer(name: str, reason: str) -> None:
    """Its full PPO trainer needs a rollout server; none of them is in an environment without a GPU."""
    import importlib.util

    from verl.workers.rollout.base import get_rollout_class

    if importlib.util.find_spec(reason) is not None:
        pytest.skip(f"{reason} is installed: this says why verl's trainer does not run without it")
    with pytest.raises((ImportError, ValueError, AssertionError), match=reason):
        get_rollout_class(name, "async")
