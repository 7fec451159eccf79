"""OpenRLHF's own losses, KL and estimators against fastrl: values, gradients and metrics."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl.integrations import openrlhf as integration
from fastrl.integrations import report
from fastrl.presets import openrlhf as preset
from tests.helpers import leaf
from tests.integrations.peers import load
from tests.ops.losses import batch

SHAPE = (5, 40)
_BARE = ("openrlhf", "openrlhf.models")
# Absent on a machine without a GPU; the functions under test use none of them.
_ABSENT = (
    "deepspeed",
    "flash_attn",
    "flash_attn.bert_padding",
    "flash_attn.utils",
    "flash_attn.utils.distributed",
)


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    return load("openrlhf.models.loss", _BARE, _ABSENT), load(
        "openrlhf.models.utils", _BARE, _ABSENT
    )


def mask() -> Tensor:
    torch.manual_seed(7)
    valid = (torch.rand(SHAPE) < 0.6).float()
    valid[:, 0] = 1
    return valid


COUNTS: tuple[dict[str, Any], ...] = (
    {},
    {"dp_size": 2, "batch_num_tokens": 90.0, "global_batch_size": 7.0},
)
CORRECTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"is_correction_level": "token"},
    {"is_correction_level": "token", "is_correction_mode": "clip"},
    {"is_correction_level": "seq", "is_correction_threshold": (0.9, 1.1)},
    {
        "is_correction_level": "token",
        "is_correction_gating": "tv",
        "is_correction_threshold": (0.0, 0.05),
    },
    {
        "is_correction_level": "seq",
        "is_correction_gating": "binary_kl",
        "is_correction_threshold": (0.0, 0.04),
    },
)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_policy_loss(models: tuple[Any, Any], kind: str, correction: dict[str, Any]) -> None:
    for dual, token_level, counts in itertools.product((None, 1.5), (True, False), COUNTS):
        options = {
            "policy_loss_type": kind,
            "dual_clip": dual,
            "token_level_loss": token_level,
            "clip_eps_high": 0.3,
        }
        data, valid = batch(SHAPE), mask()
        results = []
        for module in (preset, models[0]):
            logp = leaf(data.logp)
            out = module.PolicyLoss(**options, **correction)(
                *(logp, data.old_logp, data.advantages, valid),
                rollout_log_probs=data.ref_logp,
                **counts,
            )
            out[0].backward()
            results.append((*out, logp.grad))
        for got, expected in zip(*results):
            if expected is None:
                assert got is None
            else:
                torch.testing.assert_close(got.to(expected.dtype), expected, atol=2e-6, rtol=3e-5)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_loss(models: tuple[Any, Any], clip: float | None) -> None:
    values, old, returns = torch.randn(3, *SHAPE)
    for token_level, counts in itertools.product((True, False), COUNTS):
        results = []
        for module in (preset, models[0]):
            leaves = leaf(values)
            loss = module.ValueLoss(clip, token_level)(leaves, old, returns, mask(), **counts)
            loss.backward()
            results.append((loss.detach(), leaves.grad))
        for got, expected in zip(*results):
            torch.testing.assert_close(got, expected, atol=1e-6, rtol=2e-5)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl(models: tuple[Any, Any], estimator: str, unbiased: bool) -> None:
    logp, base, old = torch.randn(3, 200) * 3
    for before in (None, old):
        results = []
        for module in (preset, models[1]):
            leaves = leaf(logp)
            out = module.compute_approx_kl(leaves, base, before, estimator, unbiased)
            out.sum().backward()
            results.append((out.detach(), leaves.grad))
        for got, expected in zip(*results):
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


def _estimators() -> Any:
    """The class's two methods alone: its module imports vLLM and Ray."""
    import ast

    from tests.integrations.peers import _bare

    path = Path(_bare("openrlhf.trainer.ppo_utils").__path__[0]) / "experience_maker.py"
    names = ("get_advantages_and_returns", "get_cumulative_returns")
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    assert {node.name for node in functions} == set(names)
    space: dict[str, Any] = {"torch": torch, "Tuple": tuple}
    exec(compile(ast.Module(functions, []), str(path), "exec"), space)
    return type("ExperienceMaker", (), {name: space[name] for name in names})


def test_estimators_at_holes() -> None:
    """A masked token is a step without value and reward there."""
    rewards, values = torch.randn(2, *SHAPE)
    valid = mask()
    maker = _estimators()
    expected = maker().get_advantages_and_returns(values, rewards, valid, 0.9, 0.8)
    returns = maker().get_cumulative_returns(rewards, valid, 0.9)
    integration.install_experience_maker(maker)
    try:
        got = maker().get_advantages_and_returns(values, rewards, valid, 0.9, 0.8)
        got_returns = maker().get_cumulative_returns(rewards, valid, 0.9)
    finally:
        integration.uninstall()
    for ours, theirs in zip((*got, got_returns), (*expected, returns)):
        torch.testing.assert_close(ours, theirs * valid, atol=2e-5, rtol=2e-5)


def test_install(models: tuple[Any, Any]) -> None:
    integration.install()
    try:
        assert models[0].PolicyLoss is preset.PolicyLoss
        assert "openrlhf: openrlhf.models.utils.compute_approx_kl" in report()
    finally:
        integration.uninstall()
    assert models[0].PolicyLoss is not preset.PolicyLoss
