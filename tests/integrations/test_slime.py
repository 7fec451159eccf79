"""slime and miles, which cannot be installed: numbers by hand, and functions called as the trainers call them.

The calls are those of ``slime/backends/megatron_utils/loss.py`` and ``slime/ray/rollout.py`` (git 624b824a), and of
``miles/backends/training_utils/loss.py`` (miles-rl 0.0.2).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl.integrations import _patch, miles, report, slime
from fastrl.presets import slime as preset
from tests.helpers import leaf
from tests.integrations import doubles

NAN = float("nan")
HALF = math.sqrt(0.5)


def load_function(path: str) -> Any:
    """As both trainers: the module up to the last dot, then the attribute."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def close(got: Tensor | Sequence[float], expected: Tensor | Sequence[float]) -> None:
    torch.testing.assert_close(
        torch.as_tensor(got), torch.as_tensor(expected, dtype=torch.float32), atol=3e-6, rtol=3e-6
    )


def arguments(**options: Any) -> SimpleNamespace:
    defaults = {
        "advantage_estimator": "grpo", "kl_coef": 0.0, "kl_loss_type": "k1", "gamma": 1.0, "lambd": 1.0,
        "context_parallel_size": 1, "use_rollout_logprobs": False, "reward_key": None, "rewards_normalization": True,
        "grpo_std_normalization": True, "n_samples_per_prompt": 2, "tis_clip": 2.0, "tis_clip_low": 0.5,
    }  # fmt: skip
    return SimpleNamespace(**(defaults | options))


def advantages(trainer: str, args: Any, **rollout: Any) -> tuple[list[float], list[float]]:
    """The call of ``--custom-advantage-function-path``: after slime has put the KL into the rollout."""
    data: dict[str, Any] = {
        "rewards": [1.0, 2.0],
        "response_lengths": [4, 2],
        "total_lengths": [6, 5],
        "loss_masks": [torch.tensor([1, 0, 0, 1]), torch.tensor([1, 1])],
        "kl": [torch.zeros(4), torch.zeros(2)],
    }
    data |= rollout
    load_function(f"fastrl.integrations.{trainer}.compute_advantages_and_returns")(args, data)
    assert [len(x) for x in data["advantages"]] == data["response_lengths"]
    return torch.cat(data["advantages"]).tolist(), torch.cat(data["returns"]).tolist()


def test_slime_advantages_by_hand() -> None:
    """Gamma 0.9 and a reward of 1 at the end: 0.729 three steps before it in slime, 0.9 in miles, where two are no steps."""
    args = arguments(advantage_estimator="ppo", gamma=0.9)
    values = [torch.zeros(4), torch.zeros(2)]
    close(advantages("slime", args, values=values)[0], [0.729, 0, 0, 1, 1.8, 2])
    close(advantages("miles", args, values=values)[0], [0.9, 0, 0, 1, 1.8, 2])
    got, _ = advantages("slime", arguments())
    assert got == [1, 0, 0, 1, 2, 2]


def test_gae_by_hand() -> None:
    """Two responses end to end do not see one another: delta = 1 - 3 at the end of the first, lambda 1/2."""
    values, rewards = (
        [torch.tensor([1.0, 3.0]), torch.tensor([2.0])],
        [torch.tensor([0.0, 1.0]), torch.tensor([5.0])],
    )
    got, returns = preset.get_advantages_and_returns_batch(
        [3, 2], [2, 1], values, rewards, 1.0, 0.5
    )
    assert [x.tolist() for x in got] == [[2 - 1, -2], [3]]
    assert [x.tolist() for x in returns] == [[2, 1], [5]]


def test_a_last_token_that_is_masked() -> None:
    """miles #1827: the reward lies on the last trainable token; a response without one gives zeros. slime pays at the end."""
    args = arguments(advantage_estimator="ppo")
    masks = [torch.tensor([1, 1, 0, 0]), torch.tensor([0, 0])]
    data = {
        "loss_masks": masks,
        "values": [torch.full((4,), NAN).masked_fill(masks[0] == 1, 0.5), torch.zeros(2)],
    }
    assert advantages("miles", args, **data)[0] == [0.5, 0.5, 0, 0, 0, 0]
    data["values"] = [torch.zeros(4), torch.zeros(2)]
    assert advantages("slime", args, **data)[0] == [1, 1, 0, 0, 0, 0]


def test_kl_at_masked_tokens() -> None:
    """slime #1370: with mask 1 0 0 1 and KL 1 everywhere, -1 - 0.9^3 = -1.729 and not -3.439; miles: -1.9."""
    args = arguments(advantage_estimator="reinforce_plus_plus", kl_coef=1.0, gamma=0.9)
    data = {"kl": [torch.ones(4), torch.full((2,), NAN)], "rewards": [0.0, 0.0]}
    data["loss_masks"] = [torch.tensor([1, 0, 0, 1]), torch.tensor([0, 0])]
    close(advantages("slime", args, **data)[0], [-1.729, 0, 0, -1, 0, 0])
    close(advantages("miles", args, **data)[0], [-1.9, 0, 0, -1, 0, 0])


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    """The reward less its KL at each token; here the KL is k1 of the log-probabilities, as slime leaves it to us."""
    args = arguments(advantage_estimator="reinforce_plus_plus_baseline", kl_coef=0.5)
    log_probs = [torch.tensor([-1.0, NAN, NAN, -1.0]), torch.tensor([-1.0, -2.0])]
    data = {
        "log_probs": log_probs,
        "ref_log_probs": [torch.full((4,), -3.0), torch.full((2,), -1.0)],
    }
    data["kl"] = [a - b for a, b in zip(log_probs, data["ref_log_probs"])]
    expected = [0.0, 0, 0, 0.0, 2.0, 2.5]
    assert advantages("slime", args, **data)[0] == expected


def sample(reward: float, group: int | None) -> SimpleNamespace:
    """The fields of ``slime.utils.types.Sample`` that its reward post-processing reads."""
    return SimpleNamespace(group_index=group, get_reward_value=lambda args: reward)


def test_rewards_of_uneven_groups() -> None:
    """slime #1414, #1415: three equal rewards are 0, whatever the other group has; a group of one is 0."""
    post_process = load_function("fastrl.integrations.slime.post_process_rewards")
    samples = [
        sample(0.1, 7),
        sample(1.0, 3),
        sample(0.1, 7),
        sample(0.0, 3),
        sample(0.1, 7),
        sample(5.0, 9),
    ]
    raw, rewards = post_process(arguments(), samples)
    assert raw == [0.1, 1.0, 0.1, 0.0, 0.1, 5.0]
    close(rewards, [0, 0.5 / (HALF + 1e-6), 0, -0.5 / (HALF + 1e-6), 0, 0])
    _, rewards = post_process(
        arguments(advantage_estimator="reinforce_plus_plus_baseline"), samples
    )
    assert rewards == [0, 0.5, 0, -0.5, 0, 0]
    _, rewards = post_process(arguments(), [sample(1.0, None), sample(0.0, None)])
    close(rewards, [HALF, -HALF])
    assert post_process(arguments(advantage_estimator="ppo"), samples)[1] == raw


@pytest.mark.parametrize(
    ("path", "beyond"), [("vanilla_tis_function", 2.0), ("icepop_function", 0.0)]
)
def test_importance_weights_by_hand(path: str, beyond: float) -> None:
    """Weights 1, 3 and, at a masked token, NaN; called with the keywords of both trainers."""
    function = load_function(f"fastrl.integrations.slime.{path}")
    masks = [torch.tensor([1, 1]), torch.tensor([0])]
    pg_loss, kept, metrics = function(
        args=arguments(), pg_loss=torch.tensor([1.0, 1.0, NAN]), loss_masks=masks,
        train_log_probs=[torch.tensor([0.0, math.log(3.0)]), torch.tensor([NAN])],
        rollout_log_probs=[torch.zeros(2), torch.zeros(1)], total_lengths=[3, 2], response_lengths=[2, 1],
        parallel_state=None, max_seq_lens=None,
    )  # fmt: skip
    close(pg_loss, [1.0, beyond, 0.0])
    assert kept is masks
    close(metrics["tis"], [1.0, 3.0, 0.0])
    assert metrics["tis_clipfrac"].tolist() == [0, 1, 0]
    close(metrics["tis_abs"], [0.0, 2.0, 0.0])


def test_reducer_by_hand() -> None:
    reducer = load_function("fastrl.integrations.slime.get_pg_loss_reducer")
    masks = [torch.tensor([1, 0]), torch.tensor([1])]
    x = torch.tensor([2.0, NAN, 4.0])
    close(reducer([5, 3], [2, 1], masks, False)(x), 6 / 1000 * torch.ones(()))
    close(reducer([5, 3], [2, 1], masks, True)(x), torch.tensor(6.0))
    close(preset.dr_grpo_reducer(4)([5, 3], [2, 1], masks)(x), torch.tensor(1.5))


def sum_of_sample_mean(lengths: list[int], masks: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """slime's reducer for a context parallel size of 1."""

    def reduce(x: Tensor) -> Tensor:
        parts = zip(x.split(lengths), masks)
        return torch.stack(
            [(part * mask).sum() / mask.sum().clamp(min=1) for part, mask in parts]
        ).sum()

    return reduce


def loss_arguments(**options: Any) -> SimpleNamespace:
    defaults = {
        "eps_clip": 0.2, "eps_clip_high": 0.3, "eps_clip_c": None, "use_opsm": False, "opsm_delta": 0.1,
        "use_tis": False, "get_mismatch_metrics": False, "custom_tis_function_path": None, "entropy_coef": 0.0,
        "use_kl_loss": False, "use_unbiased_kl": False, "kl_loss_coef": 0.1, "rollout_temperature": 1.0,
        "calculate_per_token_loss": False, "rollout_top_p": 1.0, "tensor_model_parallel_size": 1,
    }  # fmt: skip
    return arguments(**(defaults | options))


def packed(old: Sequence[Sequence[float]], **more: Any) -> tuple[dict[str, Any], Tensor]:
    """Two sequences, of 2 + 2 and 1 + 2 tokens, under uniform logits over two words: each log-probability is -log 2."""
    batch = {
        "unconcat_tokens": [torch.tensor([0, 1, 0, 1]), torch.tensor([1, 1, 0])],
        "total_lengths": [4, 3], "response_lengths": [2, 2],
        "loss_masks": [torch.tensor([1, 1]), torch.tensor([1, 0])],
        "advantages": [torch.ones(2), -torch.ones(2)],
        "log_probs": [torch.tensor(row) - math.log(2) for row in old],
    }  # fmt: skip
    return batch | more, leaf(torch.zeros(1, 7, 2))


def run_loss(args: Any, batch: dict[str, Any], logits: Tensor) -> tuple[float, dict[str, float]]:
    """The call of ``--custom-loss-function-path``."""
    reducer = sum_of_sample_mean(batch["response_lengths"], batch["loss_masks"])
    function = load_function("fastrl.integrations.slime.policy_loss_function")
    loss, metrics = function(args, batch, logits, reducer)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.isfinite().all()
    run_loss.gradient = gradient  # type: ignore[attr-defined]
    return loss.item(), {key: float(value) for key, value in metrics.items()}


def test_slime_policy_loss_by_hand() -> None:
    """Ratios 1 and 2 (clipped to 1.3) at A = 1, ratio 3 at A = -1, and a masked token: -(1 + 1.3) / 2 + 3."""
    batch, logits = packed([[0.0, -math.log(2)], [-math.log(3), NAN]])
    loss, metrics = run_loss(loss_arguments(), batch, logits)
    assert loss == pytest.approx(-1.15 + 3)
    assert metrics["pg_clipfrac"] == pytest.approx(0.5)
    assert metrics["ppo_kl"] == pytest.approx(-math.log(2) / 2 - math.log(3))
    assert metrics["entropy_loss"] == pytest.approx(2 * math.log(2))
    # Logits of the token before each response token, d logp / d logits = one-hot - 1/2; the clipped token has none.
    expected = torch.zeros(1, 7, 2)
    expected[0, 1] = -torch.tensor([0.5, -0.5]) / 2
    expected[0, 4] = 3 * torch.tensor([-0.5, 0.5])
    close(run_loss.gradient, expected)  # type: ignore[attr-defined]
    loss, _ = run_loss(loss_arguments(eps_clip_c=2.0), batch, logits)
    assert loss == pytest.approx(-1.15 + 2)
    loss, metrics = run_loss(loss_arguments(advantage_estimator="gspo"), batch, logits)
    assert loss == pytest.approx(-1.3 + 3)
    loss, metrics = run_loss(loss_arguments(advantage_estimator="cispo"), batch, logits)
    assert loss == pytest.approx(math.log(2) * (1 + 1.3) / 2 - math.log(2) * 1.3)
    assert metrics["pg_clipfrac"] == pytest.approx(0.5 + 1)


def test_policy_loss_options_by_hand() -> None:
    old = [[0.0, 0.0], [-math.log(3), NAN]]
    rollout = [
        torch.tensor([0.0, -math.log(4)]) - math.log(2),
        torch.tensor([-math.log(3), NAN]) - math.log(2),
    ]
    ref = [torch.tensor([1.0, 0.0]) - math.log(2), torch.tensor([0.0, NAN]) - math.log(2)]
    batch, logits = packed(old, rollout_log_probs=rollout, ref_log_probs=ref)
    # The weight 4 of the second token is clamped to 2.
    loss, metrics = run_loss(loss_arguments(use_tis=True), batch, logits)
    assert loss == pytest.approx(-(1 + 2) / 2 + 3)
    assert metrics["tis"] == pytest.approx((1 + 4) / 2 + 1)
    assert metrics["tis_clipfrac"] == pytest.approx(0.5)
    assert metrics["ois"] == pytest.approx(1 + 3)
    assert metrics["train_rollout_logprob_abs_diff"] == pytest.approx(math.log(4) / 2)
    # The second response has A < 0 and mean KL -log 3, below the threshold; with -2 it is dropped.
    loss, metrics = run_loss(loss_arguments(use_opsm=True, opsm_delta=-2.0), batch, logits)
    assert loss == pytest.approx(-1)
    assert metrics["opsm_clipfrac"] == pytest.approx(1)
    loss, metrics = run_loss(loss_arguments(use_opsm=True), batch, logits)
    assert loss == pytest.approx(-1 + 3) and metrics["opsm_clipfrac"] == 0
    loss, metrics = run_loss(loss_arguments(use_kl_loss=True, entropy_coef=0.5), batch, logits)
    assert metrics["kl_loss"] == pytest.approx(-0.5)
    assert loss == pytest.approx(-1 + 3 - 0.05 - 0.5 * 2 * math.log(2))
    path = "fastrl.integrations.slime.get_pg_loss_reducer"
    loss, _ = run_loss(loss_arguments(custom_pg_loss_reducer_function_path=path), batch, logits)
    assert loss == pytest.approx((-2 + 3) / 1000)


def test_slime_unbiased_kl_by_hand() -> None:
    """The log-ratio -1 to the reference times the ratio 2 to the old policy, averaged over two tokens."""
    ref = [torch.tensor([1.0, 0.0]) - math.log(2), torch.tensor([0.0, NAN]) - math.log(2)]
    batch, logits = packed([[-math.log(2), 0.0], [0.0, NAN]], ref_log_probs=ref)
    _, metrics = run_loss(loss_arguments(use_kl_loss=True, use_unbiased_kl=True), batch, logits)
    assert metrics["kl_loss"] == pytest.approx(-1)


def test_slime_loss_at_a_temperature() -> None:
    """Logits log 4 and 0 at temperature 2: probabilities 2/3 and 1/3. The logits of a masked token may be anything."""
    batch, _ = packed([[0.0, 0.0], [0.0, NAN]])
    logits = torch.tensor([math.log(4), 0.0]).expand(1, 7, 2).clone()
    logits[0, 5] = NAN
    reducer = sum_of_sample_mean(batch["response_lengths"], batch["loss_masks"])
    arguments = loss_arguments(rollout_temperature=2.0)
    _, metrics = preset.policy_loss_function(arguments, batch, logits, reducer)
    entropy = math.log(3) - 2 / 3 * math.log(2)
    assert float(metrics["entropy_loss"]) == pytest.approx(2 * entropy)
    ratios = [math.log(2 * p) for p in (2 / 3, 1 / 3, 1 / 3)]
    assert float(metrics["ppo_kl"]) == pytest.approx(-(ratios[0] + ratios[1]) / 2 - ratios[2])


def test_slime_value_loss_by_hand() -> None:
    """Errors 1 and, clipped about 0 by 0.5, 3.5 of 4; a masked token; the values lie at the tokens before. Not halved."""
    batch, _ = packed([[0.0, 0.0], [0.0, 0.0]])
    batch |= {"values": [torch.zeros(2), torch.tensor([0.0, NAN])]}
    batch |= {"returns": [torch.tensor([1.0, 4.0]), torch.tensor([2.0, NAN])]}
    logits = leaf(torch.tensor([NAN, 0.0, 1.0, NAN, 0.25, NAN, NAN]).view(1, 7, 1))
    reducer = sum_of_sample_mean(batch["response_lengths"], batch["loss_masks"])
    loss, metrics = preset.value_loss_function(
        loss_arguments(value_clip=0.5), batch, logits, reducer
    )
    assert loss.item() == pytest.approx((1 + 3.5**2) / 2 + 1.75**2)
    assert float(metrics["value_clipfrac"]) == pytest.approx(0.5)
    (gradient,) = torch.autograd.grad(loss, logits)
    close(gradient.flatten(), [0, -1, 0, 0, -3.5, 0, 0])


@pytest.mark.parametrize(
    "options",
    [
        {"context_parallel_size": 2},
        {"tensor_model_parallel_size": 2},
        {"custom_tis_function_path": "mine.tis"},
    ],
)
def test_what_is_not_covered_says_so(options: dict[str, Any]) -> None:
    batch, logits = packed([[0.0, 0.0], [0.0, 0.0]])
    with pytest.raises(preset.NotCovered, match=next(iter(options))):
        run_loss(loss_arguments(**options), batch, logits)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "low_var_kl"])
def test_kl_by_hand(name: str) -> None:
    x = 1.5
    expected = {
        "k1": x,
        "k2": x * x / 2,
        "k3": math.exp(-x) - 1 + x,
        "low_var_kl": math.exp(-x) - 1 + x,
    }[name]
    close(preset.compute_approx_kl(torch.tensor([0.0]), torch.tensor([-x]), name), [expected])
    far = preset.compute_approx_kl(
        torch.tensor([0.0]), torch.tensor([5.0]), name, torch.tensor([2.0])
    )
    close(far, [{"k1": -10.0, "k2": 25.0, "k3": 2 * (math.exp(5) - 6), "low_var_kl": 10.0}[name]])


def test_slime_install_without_slime() -> None:
    with pytest.raises(_patch.VersionError, match=r"slime must be installed, in version 0\.4\.0"):
        slime.install()
    with pytest.raises(_patch.VersionError, match="miles-rl must be installed"):
        miles.install()


@pytest.mark.parametrize(
    ("trainer", "name", "version", "path"),
    [
        (slime, "slime", "0.4.0", "slime.backends.megatron_utils.loss"),
        (miles, "miles-rl", "0.0.2", "miles.backends.training_utils.loss"),
    ],
)
def test_slime_install(
    monkeypatch: pytest.MonkeyPatch, trainer: Any, name: str, version: str, path: str
) -> None:
    """Over a double of the module of losses: its names lead to fastrl, and with context parallelism back to itself."""
    size = [1]
    cp = SimpleNamespace(size=1)

    def get_advantages_and_returns_batch(*args: Any) -> str:
        return "theirs"

    def policy_loss_function(args: Any, batch: Any, logits: Any, reducer: Any) -> str:
        return "theirs"

    theirs = {
        "vanilla_tis_function": object(), "icepop_function": object(), "policy_loss_function": policy_loss_function,
        "value_loss_function": policy_loss_function,
        "get_advantages_and_returns_batch": get_advantages_and_returns_batch,
        "get_parallel_state": lambda: SimpleNamespace(cp=cp),
    }  # fmt: skip
    mpu = {"get_context_parallel_world_size": lambda: size[0]}
    doubles.package(monkeypatch, name, version, {path: dict(theirs), "megatron.core.mpu": mpu})
    loss: Any = importlib.import_module(path)
    trainer.install()
    trainer.install()
    try:
        assert loss.vanilla_tis_function is preset.vanilla_tis_function
        assert f"{name}: {path}.icepop_function" in report()
        one = ([3], [1], [torch.zeros(1)], [torch.ones(1)], 1.0, 1.0)
        assert loss.get_advantages_and_returns_batch(*one)[0][0].tolist() == [1]
        size[0] = cp.size = 2
        assert loss.get_advantages_and_returns_batch(*one) == "theirs"
        if trainer is slime:
            batch, logits = packed([[0.0, 0.0], [0.0, NAN]])
            reducer = sum_of_sample_mean(batch["response_lengths"], batch["loss_masks"])
            assert (
                loss.policy_loss_function(loss_arguments(), batch, logits, reducer)[0].item() == 0
            )
            split = loss_arguments(context_parallel_size=2)
            assert loss.policy_loss_function(split, batch, logits, reducer) == "theirs"
    finally:
        trainer.uninstall()
    assert all(getattr(loss, key) is value for key, value in theirs.items())
    monkeypatch.setattr(_patch.metadata, "version", lambda package: "9.9")
    with pytest.raises(_patch.VersionError, match=r"written against, got 9\.9"):
        trainer.install()
