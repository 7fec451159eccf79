"""OpenRLHF's own losses, KL and estimators against fastrl: values, gradients and metrics."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
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
_PARENTS = ("openrlhf.trainer", "openrlhf.trainer.ppo_utils")
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


ESTIMATORS = (
    "compute_advantages_and_returns",
    "get_advantages_and_returns",
    "get_cumulative_returns",
)


def _estimators(**names: Any) -> Any:
    """The methods of the class alone: its module imports vLLM and Ray."""
    import ast
    import itertools

    from tests.integrations.peers import _bare

    path = Path(_bare("openrlhf.trainer.ppo_utils").__path__[0]) / "experience_maker.py"
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name in ESTIMATORS
    ]
    assert {node.name for node in functions} == set(ESTIMATORS)
    space: dict[str, Any] = {"torch": torch, "Tuple": tuple, "List": list, "Experience": object}
    space |= {"itertools": itertools} | names
    exec(compile(ast.Module(functions, []), str(path), "exec"), space)
    return type("ExperienceMaker", (), {name: space[name] for name in ESTIMATORS})


def experiences() -> list[SimpleNamespace]:
    """Six samples of three prompts, shuffled over two experiences of different widths."""
    torch.manual_seed(11)
    made = []
    for index, width in (([4, 0, 3, 1], 9), ([5, 2], 6)):
        valid = (torch.rand(len(index), width) < 0.7).float()
        valid[:, -2] = 1
        made.append(
            SimpleNamespace(
                index=index,
                rewards=torch.randn(len(index)) * 3,
                kl=0.3 * torch.randn(len(index), width) * valid,
                action_mask=valid,
                values=torch.randn(len(index), width),
                info={},
            )
        )
    return made


@pytest.mark.parametrize("no_std", [False, True])
@pytest.mark.parametrize(
    "estimator",
    ["gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce"],
)
def test_group_baselines(models: tuple[Any, Any], estimator: str, no_std: bool) -> None:
    """The whole step from rewards to advantages, with OpenRLHF's own length penalties and reward shaping."""
    penalties = load("openrlhf.trainer.ppo_utils.length_penalty", (*_BARE, *_PARENTS), _ABSENT)
    warned: list[str] = []
    maker = _estimators(
        apply_length_penalties=penalties.apply_length_penalties,
        compute_reward=models[1].compute_reward,
        logger=SimpleNamespace(warning=warned.append),
    )

    def run() -> list[SimpleNamespace]:
        self = maker()
        args = SimpleNamespace(
            rollout=SimpleNamespace(n_samples_per_prompt=2),
            algo=SimpleNamespace(
                advantage=SimpleNamespace(
                    estimator=estimator, gamma=0.9, lambd=0.8, no_std_norm=no_std
                )
            ),
            reward=SimpleNamespace(
                clip_range=(-2.0, 2.0), overlong_buffer_len=None, stop_properly_penalty_coef=None
            ),
        )
        self.strategy = SimpleNamespace(args=args)
        self.advantage_estimator = estimator
        self.kl_ctl = SimpleNamespace(value=0.1)
        done = self.compute_advantages_and_returns(experiences())
        assert args.algo.advantage.gamma == (0.9 if estimator in ("gae", "reinforce") else 1.0)
        return list(done)

    expected = run()
    integration.install_experience_maker(maker)
    try:
        got = run()
    finally:
        integration.uninstall()
    assert len(warned) in (0, 2)
    for ours, theirs in zip(got, expected, strict=True):
        valid = theirs.action_mask
        for name in ("advantages", "returns"):
            mine, others = getattr(ours, name), getattr(theirs, name) * valid
            torch.testing.assert_close(mine * valid, others, atol=3e-5, rtol=3e-5)
        assert ours.info.keys() == theirs.info.keys() == {"group_reward_std", "return"}
        for key, value in theirs.info.items():
            torch.testing.assert_close(ours.info[key], value, atol=1e-5, rtol=1e-5)
        assert ours.kl is None


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs(models: tuple[Any, Any], temperature: float) -> None:
    """Values and gradients, and the entropy of the logits that were divided in place before."""
    torch.manual_seed(4)
    logits, labels = torch.randn(3, 5, 97) * 2, torch.randint(97, (3, 5))
    results = []
    for module in (preset, models[1]):
        leaves = leaf(logits)
        divided = leaves * 1
        logp = module.log_probs_from_logits(divided, labels, temperature)
        entropy = getattr(
            module.compute_entropy, "_torchdynamo_orig_callable", module.compute_entropy
        )(divided)
        (logp.sum() + (logp * entropy).sum()).backward()
        results.append((logp.detach(), entropy.detach(), divided.detach(), leaves.grad))
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


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
