"""NeMo-RL, whose package on the index is empty: numbers by hand, and doubles of its classes with their arguments.

The formulas are those of ``nemo_rl/algorithms/advantage_estimator.py``, ``algorithms/utils.py`` and
``algorithms/loss/loss_functions.py`` (git 7ea279ab, 00925dd1, 006907a9).
"""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl.errors import ArgumentError
from fastrl.integrations import _patch, report
from fastrl.integrations import nemo_rl as integration
from fastrl.presets import nemo_rl as preset
from tests.helpers import leaf
from tests.integrations import doubles

NAN = float("nan")
TWO = math.log(2)


def close(got: Tensor, expected: Any) -> None:
    torch.testing.assert_close(
        got, torch.as_tensor(expected, dtype=got.dtype), atol=3e-6, rtol=3e-6
    )


def estimator(name: str, **options: Any) -> Any:
    config = {
        "use_leave_one_out_baseline": True, "normalize_rewards": True, "reward_weights": None, "minus_baseline": True,
        "gae_lambda": 0.5, "gae_gamma": 1.0, "normalize_advantages": False, "gae_lambda_value": None,
        "gae_lambda_policy": None, "length_adaptive_alpha": 0.0,
    }  # fmt: skip
    loss = {
        "use_kl_in_reward": False,
        "reference_policy_kl_penalty": 0.5,
        "reference_policy_kl_type": "k1",
    }
    given = {key: options.pop(key) for key in list(options) if key in loss}
    return getattr(preset, name)(
        SimpleNamespace(**(config | options)), SimpleNamespace(**(loss | given))
    )


PROMPTS = torch.tensor([[5, 6], [5, 7], [5, 6], [5, 6], [5, 7]])
REWARDS = torch.tensor([1.0, 2.0, 0.0, 0.0, 4.0])
MASK = torch.tensor([[1, 1], [0, 1], [1, 0], [1, 1], [0, 0]])


def test_nemo_rl_grpo_by_hand() -> None:
    """Prompt 5 6 has 1 0 0: the others of the first are equal, so nothing is divided; those of the second differ by 1."""
    got = estimator("GRPOAdvantageEstimator").compute_advantage(PROMPTS, REWARDS, MASK)
    half = -0.5 / (math.sqrt(0.5) + 1e-6)
    close(got, [[1, 1], [0, -2], [half, 0], [half, half], [0, 0]])
    plain = estimator("GRPOAdvantageEstimator", normalize_rewards=False)
    close(plain.compute_advantage(PROMPTS, REWARDS, MASK)[:, 0], [1, 0, -0.5, -0.5, 0])
    mean = estimator("GRPOAdvantageEstimator", use_leave_one_out_baseline=False)
    first = (2 / 3) / (math.sqrt(1 / 3) + 1e-6)
    close(
        mean.compute_advantage(PROMPTS, REWARDS, MASK)[:, 0], [first, 0, -first / 2, -first / 2, 0]
    )


def test_grpo_with_invalid_samples() -> None:
    """One that is not valid votes in no baseline; a valid one alone gets 0."""
    valid = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    got = estimator("GRPOAdvantageEstimator").compute_advantage(
        PROMPTS, REWARDS, torch.ones(5, 1), valid
    )
    close(got[:, 0], [1, 0, -1, 0, 0])


def test_others_that_are_equal() -> None:
    """NeMo-RL #4158, #4161: rewards 0 and seven times 0.95 left a deviation of 4.6e-4 and an advantage of -2075."""
    rewards = torch.tensor([0.0] + [0.95] * 7)
    got = estimator("GRPOAdvantageEstimator").compute_advantage(
        torch.zeros(8), rewards, torch.ones(8, 1)
    )
    assert got[0, 0].item() == pytest.approx(-0.95)
    assert got[1:].abs().max() < 1
    flat = estimator("GRPOAdvantageEstimator").compute_advantage(torch.zeros(8), rewards[1:].mean().expand(8), torch.ones(8, 1))  # fmt: skip
    assert torch.count_nonzero(flat) == 0


def test_gdpo_by_hand() -> None:
    """Two rewards in one group of two: differences 1 and -2, weighted 1 and 0.25, then over the responses normalised."""
    batch = {
        "reward/b": torch.tensor([0.0, 2.0]),
        "reward/a": torch.tensor([1.0, 0.0]),
        "total_reward": None,
    }
    gdpo = estimator("GDPOAdvantageEstimator", reward_weights=[1.0, 0.25])
    got = gdpo.compute_advantage(torch.zeros(2), torch.zeros(2), torch.tensor([[1], [1]]), batch)
    close(got, [[math.sqrt(0.5)], [-math.sqrt(0.5)]])
    with pytest.raises(ArgumentError, match="two or more"):
        gdpo.compute_advantage(
            torch.zeros(2), torch.zeros(2), torch.ones(2, 1), {"reward/a": torch.zeros(2)}
        )


def test_reinforce_plus_plus_by_hand() -> None:
    """Rewards 1 and 0 less their mean, less half the KL; the KL at the masked token is NaN and stays there."""
    options = {
        "logprobs_policy": torch.tensor([[2.0, NAN], [0.0, 0.0]]),
        "logprobs_reference": torch.zeros(2, 2),
    }
    arguments = (torch.zeros(2), torch.tensor([1.0, 0.0]), torch.tensor([[1, 0], [1, 0]]))
    got = estimator("ReinforcePlusPlusAdvantageEstimator").compute_advantage(*arguments, **options)
    close(got, [[1, 0], [-1, 0]])
    with_kl = estimator(
        "ReinforcePlusPlusAdvantageEstimator", use_kl_in_reward=True, minus_baseline=False
    )
    assert with_kl.compute_advantage(*arguments, **options).tolist() == [[0, 0], [0, 0]]
    raw, nothing = estimator("RawRewardAdvantageEstimator").compute_advantage(*arguments)
    assert raw.tolist() == [[1, 0], [0, 0]] and nothing is None
    raw, _ = estimator("RawRewardAdvantageEstimator", normalize_advantages=True).compute_advantage(
        *arguments
    )
    close(raw, [[1, 0], [-1, 0]])


def test_nemo_rl_gae_by_hand() -> None:
    """The tool's token is no step; the reward lies on the last valid one. Returns with a lambda of their own."""
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]])
    values = torch.tensor([[0.5, NAN, 0.25, NAN], [NAN] * 4])
    arguments = (None, torch.tensor([1.0, 7.0]), mask, values)
    advantages, returns = estimator("GeneralizedAdvantageEstimator").compute_advantage(*arguments)
    close(advantages, [[-0.25 + 0.375, 0, 0.75, 0], [0, 0, 0, 0]])
    close(returns, [[0.625, 0, 1, 0], [0, 0, 0, 0]])
    decoupled = estimator(
        "GeneralizedAdvantageEstimator", gae_lambda_value=1.0, gae_lambda_policy=0.0
    )
    advantages, returns = decoupled.compute_advantage(*arguments)
    close(advantages[0], [-0.25, 0, 0.75, 0])
    close(returns[0], [1, 0, 1, 0])
    adaptive = estimator(
        "GeneralizedAdvantageEstimator", length_adaptive_alpha=1.0, normalize_advantages=True
    )
    advantages, _ = adaptive.compute_advantage(*arguments)
    close(advantages[0], [-math.sqrt(0.5), 0, math.sqrt(0.5), 0])
    logps = {
        "logprobs_policy": torch.tensor([[1.0, NAN, 0.0, 0.0]] * 2),
        "logprobs_reference": torch.zeros(2, 4),
    }
    penalised = estimator("GeneralizedAdvantageEstimator", use_kl_in_reward=True)
    close(penalised.compute_advantage(*arguments, **logps)[0][0], [0.125 - 0.5, 0, 0.75, 0])
    # k3 of a log-ratio of -5 is exp(5) - 6, clamped at 10.
    k3 = {"use_kl_in_reward": True, "reference_policy_kl_type": "k3"}
    logps["logprobs_policy"] = logps["logprobs_policy"] * -5
    got, _ = estimator("GeneralizedAdvantageEstimator", **k3).compute_advantage(*arguments, **logps)
    close(got[0], [0.125 - 5, 0, 0.75, 0])


def config(**options: Any) -> SimpleNamespace:
    defaults = {
        "disable_ppo_ratio": False, "token_level_loss": True, "sequence_level_importance_ratios": False,
        "ratio_clip_min": 0.2, "ratio_clip_max": 0.3, "ratio_clip_c": None, "reference_policy_kl_penalty": 0.0,
        "reference_policy_kl_type": "k3", "kl_input_clamp_value": 20.0, "kl_output_clamp_value": 10.0,
        "use_kl_in_reward": False, "use_importance_sampling_correction": False,
        "truncated_importance_sampling_type": None, "truncated_importance_sampling_ratio": None,
        "truncated_importance_sampling_ratio_min": None, "use_on_policy_kl_approximation": False,
        "force_on_policy_ratio": False, "use_cispo": False, "positive_example_nll_weight": 0.0,
    }  # fmt: skip
    return SimpleNamespace(**(defaults | options))


def batch(**more: Any) -> tuple[Tensor, dict[str, Any]]:
    """Ratios 2 and 1 at A = 1; 3 and a masked token at A = -1; a sample that is masked. The engine: half of prev, and 1."""
    prev = torch.tensor([[NAN, -1.0, -1.0], [NAN, -2.0, NAN], [NAN, NAN, NAN]])
    ratio = torch.tensor([[2.0, 1.0], [3.0, NAN], [NAN, NAN]])
    data = {
        "token_mask": torch.tensor([[0, 1, 1], [0, 1, 0], [0, 1, 1]]), "sample_mask": torch.tensor([1.0, 1.0, 0.0]),
        "advantages": torch.tensor([[NAN, 1.0, 1.0], [NAN, -1.0, NAN], [NAN, NAN, NAN]]), "prev_logprobs": prev,
        "generation_logprobs": prev - torch.tensor([[0.0, TWO, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        "reference_policy_logprobs": prev, "rewards": torch.tensor([1.0, 0.0, 1.0]),
    }  # fmt: skip
    return leaf(prev[:, 1:] + ratio.log()), data | more


def run(options: SimpleNamespace, **more: Any) -> tuple[float, dict[str, Any], Tensor]:
    """Called as by NeMo-RL's workers: by position, then with counts of the whole batch, here 3 tokens in 2 sequences."""
    curr, data = batch(**more)
    counts = (torch.tensor(2.0), torch.tensor(3.0))
    loss, metrics = preset.ClippedPGLossFn(options)(curr, data, *counts)
    (gradient,) = torch.autograd.grad(loss, curr)
    assert gradient.isfinite().all() and gradient[2].tolist() == [0, 0]
    assert all(isinstance(value, float) for value in metrics.values())
    return loss.item(), metrics, gradient


def test_nemo_rl_clipped_loss_by_hand() -> None:
    """NeMo-RL #4120: what is masked reaches neither the loss nor the gradient. (-1.3 - 1 + 3) / 3."""
    loss, metrics, gradient = run(config())
    assert loss == pytest.approx((-1.3 - 1 + 3) / 3, abs=1e-6)
    close(gradient, [[0, -1 / 3], [1, 0], [0, 0]])
    expected = {
        "probs_ratio": 2, "probs_ratio_min": 1, "probs_ratio_max": 3, "probs_ratio_clamped": 3.6 / 3,
        "probs_ratio_clamped_min": 1, "probs_ratio_clamped_max": 1.3, "num_valid_samples": 2, "kl_penalty": 0,
        "positive_nll_loss": 0, "token_mult_prob_error": 4 / 3, "sampling_importance_ratio": 4 / 3,
        "gen_kl_error": (2 - 1 - TWO) / 3, "policy_kl_error": (0.5 - 1 + TWO) / 3,
    }  # fmt: skip
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-6), name
    mixture = [r - math.log(r) - 1 for r in (4 / 3, 2 / 3)]
    assert metrics["js_divergence_error"] == pytest.approx(sum(mixture) / 2 / 3, abs=1e-6)
    logps = (-1 + TWO, -1.0, -2 + math.log(3))
    entropy = -(4 * logps[0] + logps[1] + 3 * logps[2]) / 3
    assert metrics["approx_entropy"] == pytest.approx(entropy, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ratio_clip_c": 2.0}, (-1.3 - 1 + 2) / 3),
        ({"token_level_loss": False}, (-2.3 / 2 + 3) / 2),
        ({"token_level_loss": False, "sequence_level_importance_ratios": True}, (-1.3 + 3) / 2),
        ({"disable_ppo_ratio": True}, (-(-1 + TWO) + 1 + (-2 + math.log(3))) / 3),
        ({"force_on_policy_ratio": True}, (-1 - 1 + 1) / 3),
        ({"use_cispo": True}, (-1.3 * (-1 + TWO) + 1 + 1.3 * (-2 + math.log(3))) / 3),
        ({"use_importance_sampling_correction": True}, (-1.3 * 2 - 1 + 3) / 3),
        ({"positive_example_nll_weight": 0.1}, (-1.3 - 1 + 3) / 3 + 0.1 * (2 - TWO) / 2),
    ],
)
def test_options_by_hand(options: dict[str, Any], expected: float) -> None:
    assert run(config(**options))[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "bounds", "weights", "outside"),
    [
        ("tis", (None, 1.5), (1.5, 1, 1), 1 / 3),
        ("icepop", (0.5, 1.5), (0, 1, 1), 1 / 3),
        ("seq-mask-tis", (0.9, 1.2), (0, 0, 1), 1 / 2),
    ],
)
def test_truncated_importance_sampling_by_hand(
    kind: str, bounds: Any, weights: Any, outside: float
) -> None:
    """The weight of the first token is 2; the geometric mean of its sequence is the root of 2."""
    loss, metrics, _ = run(
        config(
            use_importance_sampling_correction=True, truncated_importance_sampling_type=kind,
            truncated_importance_sampling_ratio_min=bounds[0], truncated_importance_sampling_ratio=bounds[1],
        )
    )  # fmt: skip
    assert loss == pytest.approx((-1.3 * weights[0] - weights[1] + 3 * weights[2]) / 3, abs=1e-6)
    assert metrics["is_oob_ratio"] == pytest.approx(outside)


def test_kl_by_hand() -> None:
    """NeMo-RL #2506: the gradient of k1 has the score-function term, log-ratio times d logp."""
    loss, metrics, gradient = run(
        config(reference_policy_kl_penalty=0.3, reference_policy_kl_type="k1")
    )
    kl = TWO + math.log(3)
    assert loss == pytest.approx((-1.3 - 1 + 3) / 3 + 0.3 * kl / 3, abs=1e-6)
    assert metrics["kl_penalty"] == pytest.approx(kl / 3, abs=1e-6)
    close(gradient[0], [0.1 * (1 + TWO), -1 / 3 + 0.1])
    loss, _, _ = run(
        config(
            reference_policy_kl_penalty=0.3,
            reference_policy_kl_type="k1",
            use_on_policy_kl_approximation=True,
        )
    )
    assert loss == pytest.approx(0.7 / 3 + 0.1 * (4 * TWO + 3 * math.log(3)), abs=1e-5)
    loss, _, _ = run(config(reference_policy_kl_penalty=0.3, use_kl_in_reward=True))
    assert loss == pytest.approx(0.7 / 3, abs=1e-6)


def test_ratios_of_sequences_by_hand() -> None:
    """Geometric means over the valid tokens: the root of 2 at two tokens, 3 at the one of the second sequence."""
    _, metrics, _ = run(config(token_level_loss=False, sequence_level_importance_ratios=True))
    assert metrics["probs_ratio"] == pytest.approx((2 * math.sqrt(2) + 3) / 3, abs=1e-6)
    assert metrics["probs_ratio_max"] == pytest.approx(3, abs=1e-6)


@pytest.mark.parametrize("by_token", [True, False])
def test_counts_of_the_whole_batch(by_token: bool) -> None:
    """A micro-batch of half the batch: the loss, and what is averaged over tokens, weigh half."""
    curr, data = batch()
    options = config(token_level_loss=by_token, reference_policy_kl_penalty=0.3)
    loss_fn = preset.ClippedPGLossFn(options)
    whole, of_whole = loss_fn(curr, data, torch.tensor(2.0), torch.tensor(3.0))
    half, of_half = loss_fn(curr, data, torch.tensor(4.0), torch.tensor(6.0))
    assert whole.item() != 0 and half.item() == pytest.approx(whole.item() / 2)
    for name in ("kl_penalty", "probs_ratio", "gen_kl_error", "sampling_importance_ratio"):
        assert of_whole[name] != 0 and of_half[name] == pytest.approx(of_whole[name] / 2), name


def test_tokens_that_the_sampler_had_filtered() -> None:
    """NeMo-RL #3551: they leave the actor's terms; the KL to the reference keeps its unfiltered log-probabilities."""
    curr, _ = batch()
    keep = torch.tensor([[1, 1], [0, 1], [1, 1]])
    unfiltered = torch.where(keep != 0, curr.detach(), -2.0)
    options = config(reference_policy_kl_penalty=0.3, reference_policy_kl_type="k2")
    loss, metrics, gradient = run(
        options, curr_logprobs_keep_mask=keep, curr_logprobs_unfiltered=unfiltered
    )
    assert loss == pytest.approx((-1.3 - 1) / 3 + 0.1 * TWO**2 / 2, abs=1e-6)
    assert gradient[1].tolist() == [0, 0] and metrics["probs_ratio_max"] == pytest.approx(2)


def test_empty_micro_batch() -> None:
    curr, data = batch(sample_mask=torch.zeros(3))
    loss, metrics = preset.ClippedPGLossFn(config())(
        curr, data, torch.tensor(2.0), torch.tensor(3.0)
    )
    loss.backward()
    assert loss.item() == 0 and curr.grad is not None and torch.count_nonzero(curr.grad) == 0
    assert metrics["probs_ratio_min"] == math.inf and metrics["probs_ratio_max"] == -math.inf


@pytest.mark.parametrize(
    ("clip", "expected"), [(None, (1 + 4 + 9) / 6), (0.5, (1 + 4 + 12.25) / 6)]
)
def test_nemo_rl_value_loss_by_hand(clip: float | None, expected: float) -> None:
    """Errors 1, 2 and 3 of three tokens; clipped about 0 the third prediction, 1 for a return of 4, is 0.5."""
    logits = leaf(torch.tensor([[[0.0], [1.0]], [[1.0], [NAN]], [[NAN], [NAN]]]))
    data = {
        "token_mask": torch.tensor([[1, 1], [1, 0], [1, 1]]), "sample_mask": torch.tensor([1.0, 1.0, 0.0]),
        "returns": torch.tensor([[1.0, -1.0], [4.0, NAN], [NAN, NAN]]),
        "values": torch.tensor([[0.0, 1.0], [0.0, NAN], [NAN, NAN]]),
    }  # fmt: skip
    loss_fn = preset.MseValueLossFn(SimpleNamespace(scale=2.0, cliprange=clip))
    loss, metrics = loss_fn(logits, data, torch.tensor(2.0), torch.tensor(3.0))
    assert loss.item() == pytest.approx(2 * expected)
    loss.backward()
    assert logits.grad is not None and logits.grad[2].flatten().tolist() == [0, 0]
    assert metrics == pytest.approx({
        "loss": 2 * expected, "vf_clipfrac": 1 / 3 if clip else 0, "returns_mean": 4 / 3, "values_mean": 2 / 3,
        "values_min": 0, "values_max": 1, "returns_sq_mean": 18 / 3, "residual_sq_mean": 14 / 3, "num_valid_samples": 3,
    })  # fmt: skip


def double() -> dict[str, dict[str, Any]]:
    """The arguments of the methods that are replaced; ``self`` gets its attributes from the configuration."""

    class GRPOAdvantageEstimator:
        def compute_advantage(self, prompt_ids, rewards, mask, valid_mask=None, **kwargs): ...

    class GDPOAdvantageEstimator:
        def compute_advantage(
            self, prompt_ids, rewards, mask, repeated_batch, valid_mask=None, **kwargs
        ): ...

    class ReinforcePlusPlusAdvantageEstimator:
        def compute_advantage(
            self,
            prompt_ids,
            rewards,
            mask,
            *,
            logprobs_policy=None,
            logprobs_reference=None,
            valid_mask=None,
            **kwargs,
        ): ...

    class RawRewardAdvantageEstimator:
        def compute_advantage(self, prompt_ids, rewards, mask, **kwargs): ...

    class GeneralizedAdvantageEstimator:
        def compute_advantage(
            self,
            prompt_ids,
            rewards,
            mask,
            values,
            *,
            logprobs_policy=None,
            logprobs_reference=None,
            **kwargs,
        ): ...

    class ClippedPGLossFn:
        def __init__(self, cfg: Any) -> None:
            vars(self).update(vars(cfg))
            self.loss_type = SimpleNamespace(name="TOKEN_LEVEL")

        def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
            return "theirs"

    class MseValueLossFn:
        def __call__(self, logits, data, global_valid_seqs, global_valid_toks): ...

    found = {key: value for key, value in locals().items() if isinstance(value, type)}
    losses = {key: found.pop(key) for key in ("ClippedPGLossFn", "MseValueLossFn")}
    return {
        "nemo_rl.algorithms.advantage_estimator": found,
        "nemo_rl.algorithms.loss.loss_functions": losses,
    }


def test_nemo_rl_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over doubles of its classes: by keyword as well, and back to its own loss for what is not covered."""
    with pytest.raises(_patch.VersionError, match="nemo_rl must be importable"):
        integration.install()
    doubles.package(monkeypatch, "nemo_rl", "", double())
    losses: Any = importlib.import_module("nemo_rl.algorithms.loss.loss_functions")
    estimators: Any = importlib.import_module("nemo_rl.algorithms.advantage_estimator")
    grpo = estimators.GRPOAdvantageEstimator
    before = grpo.compute_advantage, losses.ClippedPGLossFn.__call__
    integration.install()
    integration.install()
    try:
        worker = grpo()
        worker.use_leave_one_out_baseline, worker.normalize_rewards = True, False
        got = worker.compute_advantage(
            prompt_ids=PROMPTS, rewards=REWARDS, mask=MASK, repeated_batch={}
        )
        close(got[:, 0], [1, 0, -0.5, -0.5, 0])
        curr, data = batch()
        counts = {"global_valid_seqs": torch.tensor(2.0), "global_valid_toks": torch.tensor(3.0)}
        loss, _ = losses.ClippedPGLossFn(config())(curr, data=data, **counts)
        assert loss.item() == pytest.approx(0.7 / 3)
        both = losses.ClippedPGLossFn(config(disable_ppo_ratio=True, ratio_clip_c=3.0))
        assert both(next_token_logprobs=curr, data=data, **counts) == "theirs"
        lines = report()
        assert "nemo_rl: ClippedPGLossFn.__call__" in lines and len(lines) == 7
    finally:
        integration.uninstall()
    assert (grpo.compute_advantage, losses.ClippedPGLossFn.__call__) == before
    losses.MseValueLossFn.__call__ = lambda self, logits: None
    with pytest.raises(_patch.VersionError, match=r"__call__ must take .* got \(self, logits\)"):
        integration.install()
    assert grpo.compute_advantage is before[0]
