"""TRL's RLOO trainer against fastrl, and the drawing of tokens on the CPU."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl.integrations._sampling import FastSampling, multinomial
from fastrl.presets import trl as preset
from tests.integrations.test_trl import _OneProcess, fast, share_of_even_tokens, tiny_model

rloo = pytest.importorskip("trl.trainer.rloo_trainer", reason="trl is not installed")

ROWS, LENGTH = 6, 9


def loss_of(base: type, spread: float) -> tuple[Tensor, Tensor, dict[str, Any]]:
    torch.manual_seed(3)
    logps = -2 * torch.rand(ROWS, LENGTH)
    mask = (torch.arange(LENGTH) < torch.tensor([[9], [4], [1], [7], [0], [5]])).long()
    leaf = logps.clone().requires_grad_()
    entropies = torch.rand(ROWS, LENGTH)
    trainer = object.__new__(base)
    trainer.__dict__.update(
        model=SimpleNamespace(training=True),
        accelerator=_OneProcess(),
        aux_loss_enabled=False,
        epsilon_low=0.2,
        epsilon_high=0.28,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (leaf, entropies, None),
    )
    inputs = {
        "prompt_ids": torch.zeros(ROWS, 2, dtype=torch.long),
        "prompt_mask": torch.ones(ROWS, 2, dtype=torch.long),
        "completion_ids": torch.zeros(ROWS, LENGTH, dtype=torch.long),
        "completion_mask": mask,
        "old_logps": (logps * mask).sum(1) + spread * torch.randn(ROWS),
        "advantages": torch.tensor([1.0, -1.0, 0.5, 0.0, -0.3, 2.0]),
    }
    loss = trainer._compute_loss(None, inputs)  # type: ignore[attr-defined]
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad, dict(trainer._metrics["train"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0])
def test_rloo_loss_of_the_trainer(spread: float) -> None:
    """Loss, gradient and every metric under its name; rows of every length, an empty one included."""
    expected, got = loss_of(rloo.RLOOTrainer, spread), loss_of(fast.FastRLOOTrainer, spread)
    torch.testing.assert_close(got[0], expected[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(got[1], expected[1], atol=1e-6, rtol=3e-5)
    assert got[2].keys() == expected[2].keys()
    for key, values in expected[2].items():
        assert got[2][key] == pytest.approx(values, abs=2e-6), key


def test_rloo_by_hand() -> None:
    """Two tokens each, log-ratio log 2 and 0: with A = 1 the ratio 2 is clipped at 1.2, so -(1.2 + 1) / 2."""
    logps = torch.tensor([[-1.0, -1.0], [-0.5, 7.0]])
    old = torch.tensor([-2.0, -0.5]) - torch.tensor([2.0, 1.0]).log()
    mask = torch.tensor([[1, 1], [1, 0]])
    out = preset.rloo_loss(logps, old, torch.ones(2), mask)
    assert out.loss.item() == pytest.approx(-1.1)
    scores = preset.rloo_rewards(
        torch.tensor([[9.0, 0.0], [0.5, 0.5]]), torch.tensor([1.0, 2.0]), reward_clip_range=(-1, 4),
        beta=0.5, kl=torch.tensor([2.0, 0.0]),
    )  # fmt: skip
    assert scores.tolist() == [3.0, 1.5]


def unscored_sometimes(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [None if ids[0] % 5 == 0 else ids[0] / 32 for ids in completion_ids]


OPTIONS: dict[str, dict[str, Any]] = {
    "kl": {"beta": 0.05},
    "clipped": {"beta": 0.0, "reward_clip_range": (4.0, 12.0), "num_iterations": 2},
    "normalised": {"beta": 0.3, "normalize_advantages": True},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_rloo_steps_with_and_without(tmp_path: Path, option: str) -> None:
    """Same seeds: the same completions, advantages, losses and metric names; some samples have no score."""
    from datasets import Dataset

    logs, advantages = [], []
    for base in (rloo.RLOOTrainer, fast.FastRLOOTrainer):
        model, tokenizer = tiny_model(512, tmp_path / "model")
        config = rloo.RLOOConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], max_steps=4, logging_steps=1, seed=0,
            save_strategy="no", disable_tqdm=True, num_generations=4, per_device_train_batch_size=8, learning_rate=1e-3,
            max_completion_length=8, **OPTIONS[option],
        )  # fmt: skip
        seen: list[Tensor] = []

        class Recorded(base):  # type: ignore[misc, valid-type]
            def _compute_loss(self, model: Any, inputs: Any, seen: list[Tensor] = seen) -> Any:
                seen.append(inputs["advantages"])
                return super()._compute_loss(model, inputs)

        trainer = Recorded(
            model=model,
            processing_class=tokenizer,
            reward_funcs=[share_of_even_tokens, unscored_sometimes]
            if option == "kl"
            else unscored_sometimes,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(16)]}),
        )
        trainer.train()
        logs.append([row for row in trainer.state.log_history if "loss" in row])
        advantages.append(torch.stack(seen))
    torch.testing.assert_close(advantages[1], advantages[0], atol=2e-3, rtol=1e-3)
    assert float(advantages[0].abs().max()) > 0.1
    for theirs, ours in zip(*logs, strict=True):
        assert ours.keys() == theirs.keys()
        for key in theirs.keys() - {"step_time", "epoch"}:
            assert ours[key] == pytest.approx(theirs[key], rel=2e-3, abs=1e-3, nan_ok=True), key


@pytest.mark.parametrize("columns", [1, 2, 300, 49152])
def test_tokens_are_those_of_torch(columns: int) -> None:
    """Flat and peaked rows, zeros, ties: the same tokens, and the generator in the same state."""
    for seed, scale in enumerate((0.0, 1.0, 4.0, 20.0)):
        torch.manual_seed(seed)
        probabilities = (torch.randn(20, columns) * scale).softmax(-1)
        probabilities[probabilities < probabilities.median()] = 0
        state = torch.get_rng_state()
        expected = torch.multinomial(probabilities, 1)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        with FastSampling():
            got = torch.multinomial(probabilities, num_samples=1)
        assert torch.equal(got, expected)
        assert torch.equal(torch.get_rng_state(), after)


def test_sampling_leaves_other_calls_to_torch() -> None:
    rows = torch.full((3, 4), 0.25)
    generator = torch.Generator().manual_seed(0)
    expected = torch.multinomial(rows, 1, generator=generator)
    with FastSampling():
        again = torch.multinomial(rows, 1, generator=generator.manual_seed(0))
        assert torch.equal(again, expected)
        assert torch.multinomial(rows, 2, True).shape == (3, 2)
        assert torch.multinomial(rows[0], 1).shape == (1,)
        for broken in (torch.nan, torch.inf, -1.0):
            with pytest.raises(RuntimeError, match="probability tensor"):
                torch.multinomial(torch.tensor([[0.5, broken]]), 1)
    assert multinomial(torch.tensor([[0.0, 1.0]])).tolist() == [[1]]
