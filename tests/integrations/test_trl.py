"""TRL's own trainer against fastrl: every loss type in values, gradients and metrics, and ten steps of training."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl.presets import trl as preset

grpo = pytest.importorskip(
    "trl.trainer.grpo_trainer", reason="trl is not installed: requirements/peers-no-deps.txt"
)
fast = pytest.importorskip("fastrl.integrations.trl", reason="trl is not installed")

ROWS, LENGTH = 6, 9


class _OneProcess:
    """What the loss asks of accelerate, for one process."""

    num_processes, process_index, sync_gradients = 1, 0, True

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x

    pad_across_processes = staticmethod(lambda x, **_: x)


def trainer_of(base: type, logps: Tensor, entropies: Tensor, **options: Any) -> Any:
    """A trainer without model and data: the loss method of ``base`` over given log-probabilities."""
    args = SimpleNamespace(
        delta=None, use_bias_correction_kl=True, steps_per_generation=2, sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
    )  # fmt: skip
    trainer = object.__new__(base)
    defaults = {
        "loss_type": "dapo", "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.28, "beta": 0.0,
        "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False,
        "vllm_importance_sampling_correction": False, "aux_loss_enabled": False, "max_completion_length": 12,
        "current_gradient_accumulation_steps": 4, "use_adaptive_entropy": False, "entropy_coef": 0.0,
    }  # fmt: skip
    for key, value in (defaults | options).items():
        if hasattr(args, key):
            setattr(args, key, value)
        else:
            trainer.__dict__[key] = value
    trainer.__dict__.update(
        args=args,
        model=SimpleNamespace(training=True),
        accelerator=_OneProcess(),
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *a, **k: (logps, entropies, None),
    )
    return trainer


def inputs_of(options: dict[str, Any]) -> tuple[dict[str, Any], Tensor, Tensor]:
    torch.manual_seed(5)
    logps = -2 * torch.rand(ROWS, LENGTH)
    mask = (torch.arange(LENGTH) < torch.tensor([[9], [4], [1], [7], [9], [5]])).long()
    tools = torch.ones_like(mask)
    tools[0, 3:6] = 0
    inputs = {
        "prompt_ids": torch.zeros(ROWS, 2, dtype=torch.long),
        "prompt_mask": torch.ones(ROWS, 2, dtype=torch.long),
        "completion_ids": torch.zeros(ROWS, LENGTH, dtype=torch.long),
        "completion_mask": mask,
        "tool_mask": tools,
        "advantages": torch.tensor([1.0, -1.0, 0.5, 0.0, -0.3, 2.0]),
        "num_items_in_batch": torch.tensor(61),
        "old_per_token_logps": logps + 0.4 * torch.randn(ROWS, LENGTH),
        "ref_per_token_logps": logps + 0.4 * torch.randn(ROWS, LENGTH),
        "sampling_per_token_logps": logps + 0.4 * torch.randn(ROWS, LENGTH),
        "importance_sampling_ratio": (0.3 * torch.randn(ROWS, 1)).exp(),
    }
    return inputs, logps, torch.rand(ROWS, LENGTH)


def loss_of(
    base: type, options: dict[str, Any], per_token: bool
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    inputs, logps, entropies = inputs_of(options)
    if per_token:
        inputs["advantages"] = torch.randn(ROWS, LENGTH)
    leaf = logps.clone().requires_grad_()
    trainer = trainer_of(base, leaf, entropies, **options)
    loss = trainer._compute_loss(None, inputs)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad, dict(trainer._metrics["train"])


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence": {"importance_sampling_level": "sequence"},
    "kl": {"beta": 0.1},
    "kl_uncorrected": {"beta": 0.1, "use_bias_correction_kl": False},
    "kl_sequence": {"beta": 0.1, "importance_sampling_level": "sequence"},
    "delta": {"delta": 1.5},
    "off_policy_mask": {"off_policy_mask_threshold": 0.05},
    "top_entropy": {"top_entropy_quantile": 0.4},
    "vllm": {"use_vllm": True, "vllm_importance_sampling_correction": True, "beta": 0.1},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("loss_type", preset.LOSS_TYPES)
def test_loss_of_the_trainer(loss_type: str, option: str) -> None:
    """Loss, gradient and every metric under its name; tool masks and token advantages included."""
    options = OPTIONS[option] | {"loss_type": loss_type}
    if loss_type == "cispo":
        options["epsilon_high"] = 1.4
    for per_token in (False, True):
        expected = loss_of(grpo.GRPOTrainer, options, per_token)
        got = loss_of(fast.FastGRPOTrainer, options, per_token)
        torch.testing.assert_close(got[0], expected[0], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(got[1], expected[1], atol=1e-6, rtol=3e-5)
        assert got[2].keys() == expected[2].keys()
        for key, values in expected[2].items():
            assert got[2][key] == pytest.approx(values, abs=2e-6), key


def test_nan_at_a_padded_position_stays_there() -> None:
    """TRL multiplies by the mask: NaN in padding is NaN in its loss."""
    results = []
    for base in (grpo.GRPOTrainer, fast.FastGRPOTrainer):
        inputs, logps, entropies = inputs_of({})
        inputs["old_per_token_logps"][1, 8] = torch.nan
        results.append(trainer_of(base, logps, entropies)._compute_loss(None, inputs))
    assert torch.isnan(results[0])
    assert torch.isfinite(results[1])


def test_advantages_by_hand() -> None:
    """Two groups of two, two rewards; the last sample has no score."""
    nan = float("nan")
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.5, 1.0], [nan, nan]])
    weights = torch.tensor([1.0, 2.0])
    half = 0.5 / (0.5**0.5 + 1e-4)
    got = preset.grpo_advantages(rewards, weights, 2)
    torch.testing.assert_close(got, torch.tensor([half, -half, 0.0, 0.0]))
    got = preset.grpo_advantages(rewards, weights, 2, "none")
    torch.testing.assert_close(got, torch.tensor([0.5, -0.5, 0.0, 0.0]))
    got = preset.rloo_advantages(torch.tensor([3.0, 1.0, nan, 1.0]), 2)
    torch.testing.assert_close(got, torch.tensor([2.0, -2.0, 0.0, 0.0]))


def tiny_model(vocabulary: int, folder: Path) -> tuple[Any, Any]:
    """A Llama of two layers with random weights, and a tokenizer of whole words; nothing is downloaded.

    The model is loaded from a folder, from which TRL makes the reference model.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(60))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder), tokenizer


def share_of_even_tokens(
    completions: list[str], completion_ids: list[list[int]], **_: Any
) -> list[float]:
    return [sum(i % 2 == 0 for i in ids) / max(len(ids), 1) for ids in completion_ids]


def train(
    base: type, folder: Path, vocabulary: int, steps: int, **options: Any
) -> tuple[list[dict[str, float]], float, float]:
    """The log of every step, the median processor seconds of a step, and of a step without the sampling."""
    from datasets import Dataset

    model, tokenizer = tiny_model(vocabulary, folder / "model")
    config = grpo.GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], max_steps=steps, logging_steps=1, seed=0,
        save_strategy="no", disable_tqdm=True, learning_rate=1e-3, num_generations=4, **options,
    )  # fmt: skip
    trainer = base(
        model=model,
        processing_class=tokenizer,
        reward_funcs=share_of_even_tokens,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(16)]}),
    )
    seconds: dict[str, list[float]] = {"training_step": [], "_generate_and_score_completions": []}
    for name, times in seconds.items():
        setattr(trainer, name, timed(getattr(trainer, name), times))
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    # The first step warms up.
    whole, sampling = (sorted(times[1:])[len(times[1:]) // 2] for times in seconds.values())
    return rows, whole, whole - sampling


def timed(function: Any, times: list[float]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            times.append(time.process_time() - start)

    return call


def test_ten_steps_with_and_without(tmp_path: Path) -> None:
    """Same seeds: the same completions, rewards, losses and metric names in every step."""
    options = {
        "per_device_train_batch_size": 8,
        "max_completion_length": 8,
        "beta": 0.05,
        "num_iterations": 2,
    }
    expected, *_ = train(grpo.GRPOTrainer, tmp_path / "trl", 512, 10, **options)
    got, *_ = train(fast.FastGRPOTrainer, tmp_path / "fastrl", 512, 10, **options)
    assert len(got) == len(expected) == 10
    timings = {"step_time", "epoch"}
    for ours, theirs in zip(got, expected):
        assert ours.keys() == theirs.keys()
        for key in theirs.keys() - timings:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=2e-4), key
    assert any(row["reward_std"] > 0 for row in expected)


def profiled(base: type, last: int, table: list[str]) -> type:
    """The trainer, with the operators of its step ``last`` in ``table``."""

    class Profiled(base):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step != last - 1:
                return super().training_step(*args, **kwargs)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
                result = super().training_step(*args, **kwargs)
            rows = sorted(prof.key_averages(), key=lambda row: -row.self_cpu_time_total)
            total = sum(row.self_cpu_time_total for row in rows)
            table.extend(f"{row.self_cpu_time_total / total:.0%} {row.key}" for row in rows[:5])
            return result

    return Profiled


def test_time_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """6.6 M parameters, 49152 words: TRL spends most of such a step in its chunked log-probabilities, then in sampling."""
    options = {"per_device_train_batch_size": 32, "max_completion_length": 16}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds: dict[str, tuple[float, float]] = {}
    lines = [""]
    try:
        for name, base in (("TRL", grpo.GRPOTrainer), ("fastrl", fast.FastGRPOTrainer)):
            table: list[str] = []
            _, *times = train(profiled(base, 5, table), tmp_path / name, 49152, 5, **options)
            seconds[name] = (times[0], times[1])
            lines.append(
                f"GRPO step with {name}: {times[0]:.2f} s of one processor, {times[1]:.2f} s without sampling; "
                + ", ".join(table)
            )
    finally:
        torch.set_num_threads(threads)
    whole, learning = (theirs / ours for theirs, ours in zip(seconds["TRL"], seconds["fastrl"]))
    with capsys.disabled():
        sys.stdout.write("\n".join([*lines, f"{whole:.1f}x, {learning:.1f}x without sampling\n"]))
    assert whole > 2
    assert learning > 2
