"""AReaL 1.0.4: its own functions, and its actor's advantages and loss with and without fastrl; padded and packed."""

from __future__ import annotations

import itertools
import logging
import math
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl.integrations import _patch, report
from fastrl.integrations import areal as integration
from fastrl.presets import areal as preset
from fastrl.presets._tokens import NotCovered
from tests.helpers import leaf
from tests.integrations.peers import load
from tests.ops.losses import batch

NAN = float("nan")
SHAPE = (5, 12)
LENGTHS = [12, 9, 1, 7, 4]
LEVELS = ("batch", "group", None)


@pytest.fixture(scope="module")
def actor() -> Any:
    """Its actor module, and with it the functions; engines, servers and logging to files are left out."""
    bare = ("areal", "areal.utils", "areal.trainer", "areal.trainer.ppo")
    empty = (
        *("areal.api", "areal.api.cli_args", "areal.utils.seqpack"),
        *(
            "areal.infra",
            "areal.infra.rpc",
            "areal.infra.rpc.serialization",
            "areal.infra.platforms",
        ),
        *("areal.experimental", "areal.experimental.training_service"),
        "areal.experimental.training_service.controller",
        "areal.experimental.training_service.controller.controller",
        *("torchdata", "torchdata.stateful_dataloader", "orjson", "einops"),
    )
    given = {"areal.utils.logging": logging}
    load("areal.trainer.ppo.critic", bare, empty, given)
    module = load("areal.trainer.ppo.actor", bare, empty, given)
    module.stats_tracker.current_platform = SimpleNamespace(is_initialized=lambda: False)
    return module


@pytest.fixture
def functional(actor: Any) -> Any:
    return sys.modules["areal.utils.functional"]


@pytest.fixture
def installed(actor: Any) -> Iterator[None]:
    integration.install()
    yield
    integration.uninstall()


def close(got: Tensor, expected: Tensor, mask: Tensor | None = None) -> None:
    if mask is not None:
        expected = torch.where(mask != 0, expected, 0)
    torch.testing.assert_close(got, expected.to(got.dtype), atol=3e-5, rtol=3e-5)


def layouts() -> Iterator[tuple[Any, Tensor, Tensor | None]]:
    """(padded to layout, a mask with holes and a row without a valid token, cu_seqlens)."""
    column = torch.arange(SHAPE[1])
    mask = (torch.rand(SHAPE) < 0.7) & (column < torch.tensor(LENGTHS).unsqueeze(1))
    mask[3] = False
    yield (lambda x: x), mask, None
    inside = column < torch.tensor(LENGTHS).unsqueeze(1)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    yield (lambda x: x[inside]), mask[inside], offsets


def rejection(**options: Any) -> SimpleNamespace:
    defaults = {
        "level": "token",
        "action": "mask",
        "metric": "ratio",
        "agg": "mean",
        "upper": 1.6,
        "lower": None,
    }
    return SimpleNamespace(**(defaults | options))


def test_actor_loss_by_hand() -> None:
    """Ratio 1.5 clipped to 1.2, weighted by exp(prox - old) = 2 and 1/2; the divisor counts the rejected token too."""
    logp = torch.tensor([[1.5, 1.1, 1.0]]).log()
    zero, old = torch.zeros(1, 3), torch.tensor([[0.5, 2.0, 0.1]]).log()
    ones, mask = torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool)
    loss, stat = preset.ppo_actor_loss_fn(
        *(logp, zero, old, ones, 0.2, mask), rejection_sampling=rejection(upper=5.0)
    )
    close(loss, torch.tensor(-(1.2 * 2 + 1.1 / 2) / 3))
    assert stat["clip_mask"].tolist() == [[True, False, False]]
    assert stat["behave_mask"].tolist() == [[True, True, False]]
    close(stat["filtered_fraction"], torch.tensor(1 / 3))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("dual", [None, 1.5])
@pytest.mark.parametrize(
    "config", [None, {}, {"level": "sequence", "action": "clamp", "lower": 0.9}]
)
def test_areal_actor_loss(functional: Any, level: str, dual: float | None, config: Any) -> None:
    for layout, mask, cu_seqlens in layouts():
        data = batch(SHAPE)
        proximal, behaviour, advantages = (
            layout(x) for x in (data.old_logp, data.ref_logp, data.advantages)
        )
        options = {
            "eps_clip_higher": 0.3, "c_clip": dual, "importance_sampling_level": level, "cu_seqlens": cu_seqlens,
            "rejection_sampling": None if config is None else rejection(**config),
        }  # fmt: skip
        theirs, ours = leaf(layout(data.logp)), leaf(layout(data.logp))
        arguments = (proximal, behaviour, advantages, 0.2, mask)
        expected, stat = functional.ppo_actor_loss_fn(theirs, *arguments, **options)
        got, ours_stat = preset.ppo_actor_loss_fn(ours, *arguments, **options)
        torch.autograd.backward([got, expected])
        close(got.detach(), expected.detach())
        close(ours.grad, theirs.grad)  # type: ignore[arg-type]
        assert ours_stat.keys() == stat.keys()
        kept = mask & stat.get("behave_mask", mask)
        for name, value in stat.items():
            if name == "filtered_fraction":
                close(ours_stat[name], torch.tensor(value))
            else:
                close(ours_stat[name] * kept, torch.where(kept, value, 0))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_areal_sapo(functional: Any, level: str) -> None:
    for layout, mask, cu_seqlens in layouts():
        data = batch(SHAPE)
        theirs, ours = leaf(layout(data.logp)), leaf(layout(data.logp))
        arguments = (
            layout(data.old_logp),
            layout(data.advantages),
            1.0,
            1.1,
            mask,
            level,
            cu_seqlens,
        )
        expected, stat = functional.sapo_loss_fn(theirs, *arguments)
        got, ours_stat = preset.sapo_loss_fn(ours, *arguments)
        torch.autograd.backward([got, expected])
        close(got.detach(), expected.detach())
        close(ours.grad, theirs.grad)  # type: ignore[arg-type]
        assert ours_stat.keys() == stat.keys()
        for name, value in stat.items():
            close(ours_stat[name], value, mask)


@pytest.mark.parametrize("kind", ["mse", "huber"])
def test_areal_critic(functional: Any, kind: str) -> None:
    for layout, mask, _ in layouts():
        values, old, target = (layout(x) for x in torch.randn(3, *SHAPE) * 12)
        for valid in (mask, None):
            theirs, ours = leaf(values), leaf(values)
            expected, stat = functional.ppo_critic_loss_fn(theirs, old, target, 0.5, valid, kind)
            got, ours_stat = preset.ppo_critic_loss_fn(ours, old, target, 0.5, valid, kind)
            torch.autograd.backward([got, expected])
            close(got.detach(), expected.detach())
            close(ours.grad, theirs.grad)  # type: ignore[arg-type]
            assert torch.equal(ours_stat["clip_mask"], stat["clip_mask"])
            close(ours_stat["loss"], stat["loss"], valid)
    loss, _ = preset.ppo_critic_loss_fn(ours, old, target, 0.5, torch.zeros_like(mask), kind)
    assert loss.item() == 0  # NaN in AReaL


@pytest.mark.parametrize("metric", ["ratio", "kl_k1", "kl_k2", "kl_k3"])
@pytest.mark.parametrize("action", ["mask", "clamp"])
def test_areal_rejection(functional: Any, metric: str, action: str) -> None:
    """Also where both policies give a token probability 0, or one does."""
    for layout, mask, cu_seqlens in layouts():
        data = batch(SHAPE)
        proximal, old = data.old_logp.clone(), data.ref_logp.clone()
        proximal[0, :2] = old[0, 1:3] = -math.inf
        proximal, old = layout(proximal), layout(old)
        for level, agg, lower in itertools.product(
            ("token", "sequence"), ("sum", "mean", "max"), (None, 0.4)
        ):
            config = rejection(
                level=level, action=action, metric=metric, agg=agg, lower=lower, upper=1.2
            )
            expected = functional.apply_rejection_sampling(proximal, old, mask, cu_seqlens, config)
            got = preset.apply_rejection_sampling(proximal, old, mask, cu_seqlens, config)
            assert torch.equal(got.loss_mask, expected.loss_mask)
            close(got.behave_imp_weight, expected.behave_imp_weight)
            assert float(got.filtered_fraction) == pytest.approx(expected.filtered_fraction)


@pytest.mark.parametrize("mean_level", LEVELS)
@pytest.mark.parametrize("std_level", LEVELS)
@pytest.mark.parametrize("leave1out", [False, True])
def test_areal_normalization(actor: Any, mean_level: Any, std_level: Any, leave1out: bool) -> None:
    """Rewards per row and advantages per token; groups of one, equal groups, groups without a valid token."""
    mask = (torch.rand(6, 9) < 0.6).float()
    mask[2:4] = 0
    mask[5] = 0
    mask[5, 3] = 1
    rewards = torch.tensor([0.5, 2.0, 1.0, 1.0, -3.0, 0.25])
    for size, unbiased, x in itertools.product(
        (1, 2, 3), (True, False), (rewards, torch.randn(6, 9))
    ):
        config = SimpleNamespace(
            mean_level=mean_level, std_level=std_level, mean_leave1out=leave1out, std_unbiased=unbiased,
            group_size=size, eps=1e-5,
        )  # fmt: skip
        for valid in (None,) if x.dim() == 1 else (None, mask):
            expected = actor.Normalization(config)(x, valid)
            close(preset.Normalization(config)(x, valid), expected, valid)


def test_areal_masked_normalization(functional: Any) -> None:
    x, mask = torch.randn(4, 7) * 3 + 1, torch.rand(4, 7) < 0.7
    mask[:, 0] = mask[:, 1] = True
    for dim, unbiased, valid in itertools.product(
        (None, (1,), (0, 1), (-1,)), (True, False), (None, mask)
    ):
        expected = functional.masked_normalization(x, valid, dim, unbiased)
        close(preset.masked_normalization(x, valid, dim, unbiased), expected, valid)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_areal_kl(actor: Any, kind: str) -> None:
    logp, ref = torch.randn(2, 3, 9) * 3
    for clamp in (True, False):
        close(preset.KLEstimator(kind, clamp)(logp, ref), actor.KLEstimator(kind, clamp)(logp, ref))


def test_rows_behind_the_last_full_group() -> None:
    """Threads AReaL #1454 and #1563: a trailing short group was divided by eps and gave 1e5 times its reward."""
    config = SimpleNamespace(
        mean_level="group", std_level="group", mean_leave1out=False, std_unbiased=True, group_size=2, eps=1e-5
    )  # fmt: skip
    got = preset.Normalization(config)(torch.tensor([1.0, 3.0, 1.0]))
    close(got, torch.tensor([-1.0, 1.0, 0.0]) / (2**0.5 + 1e-5))


def actor_config(**options: Any) -> SimpleNamespace:
    defaults = {
        "reward_bias": 0.1, "reward_scaling": 2.0, "reward_clip": 3.0, "kl_ctl": 0.1, "kl_estimator": "k3",
        "adv_norm": None, "reward_norm": None, "discount": 0.97, "gae_lambda": 0.9, "mask_no_eos_with_zero": False,
        "temperature": 1.0, "m2_threshold": None, "use_decoupled_loss": True, "recompute_logprob": True,
        "prox_logp_method": "recompute", "rejection_sampling": None, "eps_clip": 0.2,
        "overlong_reward_penalty": False, "overlong_tokens": 3, "overlong_penalty_factor": 0.5, "max_new_tokens": 8,
    }  # fmt: skip
    return SimpleNamespace(**(defaults | options))


NORM = SimpleNamespace(
    mean_level="batch",
    std_level="batch",
    mean_leave1out=False,
    std_unbiased=True,
    group_size=1,
    eps=1e-5,
)
REWARD_NORM = SimpleNamespace(
    **(vars(NORM) | {"mean_level": "group", "std_level": "group", "group_size": 3})
)


def rollout(with_critic: bool) -> dict[str, Any]:
    """Six rows whose prompts, tool outputs and padding are masked; one fills its width, one is only padding."""
    lengths = torch.tensor([11, 8, 5, 10, 7, 2])
    column = torch.arange(11)
    attention = column < lengths.unsqueeze(1)
    mask = attention & (column >= 2) & (torch.rand(6, 11) < 0.8)
    data: dict[str, Any] = {
        "input_ids": torch.zeros(6, 11, dtype=torch.long), "attention_mask": attention.long(),
        "loss_mask": mask.long(), "logprobs": -torch.rand(6, 11), "prox_logp": -torch.rand(6, 11),
        "ref_logp": -torch.rand(6, 11), "rewards": torch.randn(6),
    }  # fmt: skip
    if with_critic:
        data["values"] = torch.randn(6, 11)
    return data


def cloned(data: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() for key, value in data.items()}


@pytest.mark.parametrize("with_critic", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"adv_norm": NORM, "reward_norm": REWARD_NORM, "mask_no_eos_with_zero": True},
        {"use_decoupled_loss": False, "overlong_reward_penalty": True},
        {"use_decoupled_loss": False, "recompute_logprob": False, "adv_norm": NORM},
    ],
)
def test_areal_advantages_of_the_actor(
    actor: Any, with_critic: bool, options: dict[str, Any]
) -> None:
    """``PPOActor._compute_advantages`` with and without the integration, and every key that it leaves."""
    data = rollout(with_critic)
    results = []
    for ours in (False, True):
        if ours:
            integration.install()
        try:
            worker = actor.PPOActor(actor_config(**options), engine=None)
            results.append(worker._compute_advantages(cloned(data)))
        finally:
            integration.uninstall()
    expected, got = results
    assert got.keys() == expected.keys()
    valid = expected["loss_mask"]
    for name, value in expected.items():
        if value.shape == valid.shape and name not in ("input_ids", "attention_mask", "values"):
            if name == "prox_logp" and not options.get("use_decoupled_loss", True):
                close(got[name], value)
            close(got[name] * valid, value * valid)
        else:
            close(got[name], value)


def test_areal_nan_in_a_rollout(actor: Any, installed: None) -> None:
    """What a critic says of prompts, tool output and padding reaches no advantage; AReaL's recursion multiplies it by 0."""
    data, poisoned = rollout(True), rollout(True)
    valid = data["loss_mask"].roll(-1, -1) != 0
    poisoned |= cloned(data)
    # The last column is bootstrapped where a row fills its width.
    valid[:, -1] = True
    poisoned["values"] = torch.where(valid, data["values"], NAN)
    poisoned["ref_logp"] = torch.where(valid, data["ref_logp"], NAN)
    poisoned["logprobs"] = torch.where(valid.roll(1, -1), data["logprobs"], NAN)
    worker = actor.PPOActor(actor_config(adv_norm=NORM), engine=None)
    expected, got = (worker._compute_advantages(x) for x in (data, poisoned))
    for name in ("advantages", "returns", "kl_rewards", "tot_rewards", "logprobs"):
        assert torch.equal(got[name], expected[name]), name
        assert got[name].isfinite().all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"c_clip": 1.5, "m2_threshold": 0.05},
        {"rejection_sampling": rejection()},
        {"use_sapo_loss": True},
    ],
)
def test_areal_loss_of_the_trainer(actor: Any, options: dict[str, Any]) -> None:
    """``grpo_loss_fn`` over a packed micro-batch: loss, gradient, and everything that its tracker exports."""
    results = []
    layout, mask, cu_seqlens = list(layouts())[1]
    data = batch(SHAPE)
    inputs = {
        "logprobs": layout(data.ref_logp), "advantages": layout(data.advantages), "loss_mask": mask.float(),
        "prox_logp": layout(data.old_logp), "cu_seqlens": cu_seqlens,
    }  # fmt: skip
    arguments = {"eps_clip": 0.2, "eps_clip_higher": None, "c_clip": None} | options
    for ours in (False, True):
        if ours:
            integration.install()
        logp = leaf(layout(data.logp))
        try:
            loss = actor.grpo_loss_fn(logp, torch.rand_like(logp), dict(inputs), **arguments)
        finally:
            integration.uninstall()
        loss.backward()
        metrics = actor.stats_tracker.export()
        results.append(
            (loss.detach(), logp.grad, {k: v for k, v in metrics.items() if "entropy" not in k})
        )
    (expected, gradient, metrics), (got, ours_gradient, ours_metrics) = results
    close(got, expected)
    close(ours_gradient, gradient)
    assert metrics.keys() == ours_metrics.keys()
    for name, value in metrics.items():
        assert ours_metrics[name] == pytest.approx(value, abs=1e-5, rel=1e-4), name


def test_areal_nan_at_a_masked_position(installed: None, functional: Any) -> None:
    """Threads AReaL #1346, OpenRLHF #1240: it reaches neither the loss, nor the gradient, nor what is logged."""
    mask = torch.tensor([[True, False]])
    logp = leaf(torch.tensor([[0.1, NAN]]))
    for level in ("token", "sequence"):
        loss, stat = functional.ppo_actor_loss_fn(
            logp, *(torch.tensor([[0.0, NAN]]),) * 3, 0.2, mask, rejection_sampling=rejection(), importance_sampling_level=level
        )  # fmt: skip
        (gradient,) = torch.autograd.grad(loss, logp)
        assert gradient[0, 1] == 0 and gradient.isfinite().all() and loss.isfinite()
        assert all(value.float().isfinite().all() for value in stat.values())


def test_areal_logprobs(functional: Any) -> None:
    logits, labels = torch.randn(40, 97) * 3, torch.randint(0, 97, (40,))
    theirs, ours = leaf(logits), leaf(logits)
    with torch.compiler.set_stance("force_eager"):
        expected, entropy = functional.gather_logprobs_entropy(theirs, labels, 0.7, chunk_size=16)
        alone = functional.gather_logprobs(theirs, labels, 0.7)
    integration.install()
    try:
        got, ours_entropy = functional.gather_logprobs_entropy(ours, labels, 0.7, chunk_size=16)
        close(functional.gather_logprobs(ours, labels, 0.7).detach(), alone.detach())
    finally:
        integration.uninstall()
    torch.autograd.backward(
        [(got + ours_entropy).square().sum(), (expected + entropy).square().sum()]
    )
    close(got.detach(), expected.detach())
    close(ours_entropy.detach(), entropy.detach())
    close(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_areal_vocabulary_over_ranks(monkeypatch: pytest.MonkeyPatch, functional: Any) -> None:
    """The preset refuses it, and the integration then calls AReaL's own function, here one that only says so."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    arguments = (torch.zeros(1, 3), torch.zeros(1, dtype=torch.long), 1.0, object())
    with pytest.raises(NotCovered, match="2 ranks"):
        preset.gather_logprobs(*arguments)  # type: ignore[arg-type]
    both = _patch.or_theirs(preset.gather_logprobs, lambda *args: "theirs")
    assert both(*arguments) == "theirs"
    assert both(*arguments[:2]).tolist() == [pytest.approx(-math.log(3))]


def test_areal_install(actor: Any, functional: Any) -> None:
    """Names that its modules took from one another lead to fastrl too, and back."""
    critic: Any = sys.modules["areal.trainer.ppo.critic"]
    before = actor.ppo_actor_loss_fn, actor.PPOActor._compute_advantages
    integration.install()
    integration.install()
    try:
        assert actor.ppo_actor_loss_fn is functional.ppo_actor_loss_fn is preset.ppo_actor_loss_fn
        assert critic.ppo_critic_loss_fn is preset.ppo_critic_loss_fn
        assert actor.Normalization is preset.Normalization
        lines = report()
        assert "areal: areal.trainer.ppo.actor.ppo_actor_loss_fn" in lines
        assert len(lines) == len(set(lines))
    finally:
        integration.uninstall()
    assert (actor.ppo_actor_loss_fn, actor.PPOActor._compute_advantages) == before
    assert not [line for line in report() if line.startswith("areal")]


def test_areal_in_another_version(monkeypatch: pytest.MonkeyPatch, actor: Any) -> None:
    monkeypatch.setattr(_patch.metadata, "version", lambda package: "1.1.0")
    with pytest.raises(_patch.VersionError, match=r"areal must be 1\.0\.4.*got 1\.1\.0"):
        integration.install()
    monkeypatch.setenv("FASTRL_UNCHECKED_VERSIONS", "1")
    integration.install()
    integration.uninstall()
