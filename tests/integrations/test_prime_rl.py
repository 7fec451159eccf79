"""prime-rl, which cannot be installed: numbers by hand, and functions called as it calls them.

The calls are those of ``compute_loss`` in ``src/prime_rl/trainer/rl/loss.py`` and of ``CustomAlgorithm`` in
``src/prime_rl/orchestrator/algo/custom.py`` (git 559b4477, 10d8af34); the two dataclasses below have the fields of theirs.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl.errors import ArgumentError
from fastrl.integrations import _patch, prime_rl, report
from fastrl.presets import prime_rl as preset
from tests.helpers import leaf
from tests.integrations import doubles

NAN = float("nan")


@dataclass
class LossInputs:
    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass
class AdvantageInputs:
    rollouts: list[dict[str, Any]]
    completion_lengths: list[int]

    def broadcast(self, values: list[float]) -> list[list[float]]:
        return [[float(v)] * n for v, n in zip(values, self.completion_lengths, strict=True)]


def imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def sequence(**more: Any) -> LossInputs:
    """Probabilities 0.6 | 0.9 | 0.1 | 0.8 | masked after 0.5 | 0.5 | 0.5 | 0.5; advantages 2, 1, -1, -1."""
    fields: dict[str, Any] = {
        "trainer_logprobs": leaf(torch.tensor([0.6, 0.9, 0.1, 0.8, NAN]).log()),
        "inference_logprobs": torch.full((5,), 0.5).log(),
        "ref_logprobs": torch.tensor([0.3, 0.5, 0.5, 0.5, NAN]).log(),
        "advantages": torch.tensor([2.0, 1.0, -1.0, -1.0, NAN]),
        "loss_mask": torch.tensor([True, True, True, True, False]),
    }
    return LossInputs(**(fields | more))


def test_prime_rl_loss_by_hand() -> None:
    """The second token rose by 0.4 at A > 0, the third fell by 0.4 at A < 0: both dropped. -2 * 1.2 + 1.6, and the KL."""
    inputs = sequence()
    result = imported("fastrl.integrations.prime_rl.default_loss_fn")(inputs, kl_tau=0.1)
    kl = sum(math.log(r) ** 2 for r in (1.2, 1.8, 0.2, 1.6))
    assert result.loss.item() == pytest.approx(-2.4 + 1.6 + 0.1 * kl, abs=1e-5)
    assert {key: round(float(value), 6) for key, value in result.metrics.items() if "kl" not in key} == {
        "is_masked": 0.5, "is_masked_low": 0.25, "is_masked_high": 0.25,
        "masked_advantage_positive": 0.5, "masked_advantage_negative": 0.5,
    }  # fmt: skip
    mismatch = [r - math.log(r) - 1 for r in (1.2, 1.8, 0.2, 1.6)]
    assert float(result.metrics["unmasked_mismatch_kl"]) == pytest.approx(
        (mismatch[0] + mismatch[3]) / 2, abs=1e-6
    )
    assert float(result.metrics["masked_mismatch_kl"]) == pytest.approx(
        (mismatch[1] + mismatch[2]) / 2, abs=1e-6
    )
    result.loss.backward()
    expected = [
        -2.4 + 0.2 * math.log(1.2),
        0.2 * math.log(1.8),
        0.2 * math.log(0.2),
        1.6 + 0.2 * math.log(1.6),
        0.0,
    ]
    assert inputs.trainer_logprobs.grad is not None
    torch.testing.assert_close(
        inputs.trainer_logprobs.grad, torch.tensor(expected), atol=1e-5, rtol=1e-5
    )


def test_weights_of_a_loss_by_hand() -> None:
    weights = torch.tensor([0.5, 1.0, 2.0, 0.0, NAN])
    result = preset.default_loss_fn(sequence(loss_weights=weights), adv_tau=2.0, kl_tau=0.1)
    kl = 0.5 * math.log(1.2) ** 2 + math.log(1.8) ** 2 + 2 * math.log(0.2) ** 2
    assert result.loss.item() == pytest.approx(0.5 * -4.8 + 0.1 * kl, abs=1e-5)


def test_reference_kl_by_hand() -> None:
    """The log-ratio to the reference, log 0.5 and log 0.625, is the signal; the advantage only picks the bound."""
    result = preset.ref_kl_loss_fn(sequence())
    kl = sum(math.log(r) ** 2 for r in (1.2, 1.8, 0.2, 1.6))
    expected = -(math.log(0.5) * 1.2 + math.log(0.625) * 1.6) + 1e-3 * kl
    assert result.loss.item() == pytest.approx(expected, abs=1e-5)
    mean = sum(math.log(r) for r in (0.5, 0.5 / 0.9, 5.0, 0.625)) / 4
    assert float(result.metrics["ref_kl"]) == pytest.approx(mean, abs=1e-6)
    with pytest.raises(ArgumentError, match="ref_logprobs"):
        preset.ref_kl_loss_fn(sequence(ref_logprobs=None))


def test_a_stale_token_stays_finite() -> None:
    """prime-rl #2972, #2084: exp of a log-ratio of 200 is infinite, and 0 times it NaN in loss and weights."""
    inputs = LossInputs(
        leaf(torch.zeros(1)),
        torch.full((1,), -200.0),
        None,
        torch.ones(1),
        torch.ones(1, dtype=torch.bool),
    )
    result = preset.default_loss_fn(inputs, kl_tau=0.0)
    result.loss.backward()
    assert result.loss.item() == 0 and inputs.trainer_logprobs.grad is not None
    assert inputs.trainer_logprobs.grad.item() == 0
    assert all(value.isfinite() for value in result.metrics.values())


def group(*rewards: float) -> AdvantageInputs:
    return AdvantageInputs(
        [{"reward": reward} for reward in rewards], [2] + [1] * (len(rewards) - 1)
    )


def test_prime_rl_advantages_by_hand() -> None:
    grpo = imported("fastrl.integrations.prime_rl.grpo")
    assert grpo(group(1.0, 0.0)) == [[0.5, 0.5], [-0.5]]
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert grpo(group(1.0, 0.0), scale="std")[1] == [pytest.approx(-half)]
    assert grpo(group(0.1, 0.1, 0.1)) == [[0.0, 0.0], [0.0], [0.0]]
    assert grpo(group(3.0)) == [[0.0, 0.0]]
    max_rl = imported("fastrl.integrations.prime_rl.max_rl")
    assert max_rl(group(1.0, 0.0, 0.5)) == [[1.0, 1.0], [-1.0], [0.0]]
    assert max_rl(group(-1.0, 0.5)) == [[0.0, 0.0], [0.0]]


def test_prime_rl_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a double of its module of losses, called with its own configuration."""
    with pytest.raises(_patch.VersionError, match="prime-rl must be installed"):
        prime_rl.install()
    theirs = {"default_loss_fn": object(), "ref_kl_loss_fn": object()}
    path = "prime_rl.trainer.rl.loss"
    doubles.package(monkeypatch, "prime-rl", "0.5.0", {path: dict(theirs)})
    loss: Any = importlib.import_module(path)
    prime_rl.install()
    prime_rl.install()
    try:
        config = SimpleNamespace(dppo_mask_low=0.2, dppo_mask_high=0.5, adv_tau=1.0, kl_tau=0.0)
        result = loss.default_loss_fn(sequence(), config)
        assert result.loss.item() == pytest.approx(-2.4 - 1.8 + 1.6, abs=1e-5)
        assert report() == [f"prime-rl: {path}.default_loss_fn", f"prime-rl: {path}.ref_kl_loss_fn"]
    finally:
        prime_rl.uninstall()
    assert loss.default_loss_fn is theirs["default_loss_fn"]
