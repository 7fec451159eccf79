"""What the head costs a step of the trainer: one update of GRPO with all logits of a micro-batch and without them.

The model has the width and the vocabulary of SmolLM2-135M, four of its thirty layers, and random weights, on which
neither time nor memory depends. Sampling and the optimiser are left out: the head changes nothing there.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.memory import peak_bytes
from benchmarks.registry import FASTRL, Case, Prepared, Provider, Results, _prepared
from fastrl.envs import Trajectory
from fastrl.train import config as configs
from fastrl.train.batch import Batch, make_batch, plan_updates
from fastrl.train.config import Config
from fastrl.train.grpo import GRPO
from fastrl.train.metrics import StepMetrics, Timer
from fastrl.train.models import Policy

# Gradients of bfloat16 products through all layers, against float64.
TOLERANCE = 5e-2


class Size(NamedTuple):
    """A rollout and the model that is trained on it."""

    prompts: int
    samples: int
    prompt_tokens: int
    completion_tokens: int
    layers: int
    width: int
    classes: int


SIZES = {
    "full": Size(16, 8, 16, 16, 4, 576, 49152),
    "quick": Size(4, 4, 8, 8, 2, 576, 49152),
    "tiny": Size(2, 2, 4, 4, 1, 64, 96),
}


class Phases(NamedTuple):
    """Seconds of the parts of an update, and the most bytes that were allocated at one time during it."""

    old_logp: float
    loss: float
    backward: float
    peak_bytes: int

    @property
    def total(self) -> float:
        return self.old_logp + self.loss + self.backward


class Update:
    """Log-probabilities of a rollout, then loss and gradient of the policy on it."""

    def __init__(self, size: Size, dtype: torch.dtype = torch.float32) -> None:
        self.size, self.dtype = size, dtype
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.policy = _policy(size).to(dtype)
        self.batch = _rollout(size)

    def run(self, head: str, *overrides: str) -> tuple[Results, list[float]]:
        """Loss and gradients of the head and of the first layer; and when each phase ended."""
        precision = "none" if self.dtype == torch.float64 else "bfloat16"
        config = _config(self.size, f"model.head={head}", f"model.autocast={precision}", *overrides)
        algorithm = GRPO(config, self.policy, Timer())
        plan = plan_updates(self.batch, config, step=0, epoch=0, device=self.policy.device)
        times = [time.perf_counter()]
        targets = algorithm.targets(self.batch, plan)
        times.append(time.perf_counter())
        (mini,) = plan
        (micro,) = mini.micro_batches
        loss = algorithm.loss(micro, mini, targets, StepMetrics())
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        return (loss.detach(), *self._gradients()), times

    def _gradients(self) -> list[Tensor]:
        first = next(p for n, p in self.policy.named_parameters() if "layers.0" in n)
        gradients = [self.policy.head.weight.grad, first.grad]
        for parameter in self.policy.parameters():
            parameter.grad = None
        return [g for g in gradients if isinstance(g, Tensor)]

    def phases(self, head: str) -> Phases:
        """One update, timed and counted at once."""
        times: list[float] = []
        most = peak_bytes(lambda: times.extend(self.run(head)[1]))
        return Phases(*(end - start for start, end in zip(times[:-1], times[1:])), most)


def cases(scale: str = "full", *, with_compile: bool = True) -> list[Case]:
    """The one case, at the sizes of ``registry.cases``; nothing is compiled."""
    size = SIZES[scale]
    tokens = size.prompts * size.samples * size.completion_tokens

    def prepare() -> Prepared:
        update = Update(size)

        def provider(name: str, head: str, note: str, *overrides: str) -> Provider:
            return Provider(name, lambda: update.run(head, *overrides)[0], note=note)

        keep = "model.activation_checkpointing=true"

        prepared = _prepared(
            lambda: Update(size, torch.float64).run("eager")[0],
            provider(FASTRL, "fused", 'model.head = "fused"'),
            provider("eager", "eager", 'model.head = "eager": all logits'),
            provider("fastrl checkpt", "fused", "and model.activation_checkpointing = true", keep),
            provider("eager checkpt", "eager", "likewise", keep),
        )
        return prepared._replace(tolerance=TOLERANCE)

    text = f"{tokens} tokens, {size.layers} layers x {size.width}, V = {size.classes}, bfloat16"
    return [Case("trainer_step", text, 0, (), prepare, has_memory=True)]


def _config(size: Size, *overrides: str) -> Config:
    tree: dict[str, Any] = {
        "rollout": {
            "prompts": size.prompts,
            "samples": size.samples,
            "max_new_tokens": size.completion_tokens,
        },
        "optim": {"mini_batches": 1, "micro_batch_tokens": 1 << 30},
    }
    for override in overrides:
        key, _, value = override.partition("=")
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = (
            value == "true" if value in ("true", "false") else value
        )
    return configs.parse(tree)


def _policy(size: Size) -> Policy:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = size.width // 64
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size.classes,
            hidden_size=size.width,
            intermediate_size=size.width * 8 // 3,
            num_hidden_layers=size.layers,
            num_attention_heads=heads,
            num_key_value_heads=max(heads // 3, 1),
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
        )
    )
    return Policy(model, SimpleNamespace(eos_token_id=0, pad_token_id=0)).eval()


def _rollout(size: Size) -> Batch:
    draw = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, size.classes, (count,), generator=draw).tolist())

    rows = []
    for prompt in range(size.prompts):
        prompt_ids = ids(size.prompt_tokens)
        for sample in range(size.samples):
            reward = float(sample % 2)
            rows.append(
                Trajectory(
                    uid=f"prompt {prompt}",
                    prompt="",
                    completion="",
                    answer="",
                    prompt_ids=prompt_ids,
                    completion_ids=ids(size.completion_tokens),
                    mask=(1,) * size.completion_tokens,
                    reward=reward,
                    reward_parts={"task": reward},
                )
            )
    return make_batch(rows, ["task"])
