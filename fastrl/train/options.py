"""More sections of the configuration; those of model, task, optimiser and losses are in config.py.

A sentence under each field, as in config.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "CheckpointConfig",
    "CorrectionConfig",
    "EngineConfig",
    "EnvConfig",
    "FilterConfig",
    "LoRAConfig",
    "LogConfig",
    "ScaleConfig",
    "WarmStartConfig",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvConfig:
    """An environment of several turns in place of the questions of [task]."""

    source: str | None = None
    """A built-in environment, "reasoning_gym:NAME", "gymnasium:NAME", "textarena:NAME", "verifiers:NAME",
    or the import path "package.module:Class" of one; the questions of [task] if "none"."""
    params: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment."""
    weights: dict[str, Any] = field(default_factory=dict)
    """Weights of reward parts that replace the environment's own."""
    max_turns: int = 8
    """Most assistant messages of an episode; it is then truncated."""
    max_tokens: int = 2048
    """Most tokens of an episode, prompt included; it is then truncated."""
    truncated: Literal["keep", "zero", "mask", "drop"] = "keep"
    """Episodes that ran into a limit: keep scores them as they are; the others keep them out of the
    statistics of their group: zero trains them with advantage 0 (ppo: reward 0), mask trains none of
    their tokens, drop removes them."""
    failed: Literal["raise", "zero", "mask", "drop"] = "mask"
    """Episodes whose environment raised or took too long: raise ends the run, the others are as for
    truncated."""
    step_seconds: float = 60.0
    """Longest time of one reset or step of an environment, which then counts as failed."""
    workers: int = 1
    """Environments that step at the same time, in threads; for those that wait for other processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStartConfig:
    """Imitation of the environment's demonstrations before the first step."""

    steps: int = 0
    """Optimiser steps; 0 leaves it out."""
    batch: int = 64
    """Demonstrations per step, each of another training task."""
    lr: float = 1e-3
    """Learning rate, constant; the other options of AdamW are those of [optim]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterConfig:
    """Which groups are trained on."""

    groups: bool = False
    """Leave out groups whose rewards are all equal, and sample other tasks in their place (dynamic
    sampling, DAPO)."""
    max_rounds: int = 4
    """Most rounds of sampling in a step; what is then missing stays missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoRAConfig:
    """Low-rank adapters (Hu et al., 2021) that are trained in place of the weights; needs peft."""

    rank: int = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: float = 16.0
    """The output of an adapter is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("all-linear",)
    """Names of the layers that get one, such as "q_proj"; "all-linear" is every linear layer but the
    lm_head, which can be named too."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"config: model.lora.rank must be at least 0, got {self.rank}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """What samples completions: the model in training, or servers that it hands its weights to."""

    kind: Literal["transformers", "vllm", "sglang"] = "transformers"
    """The model in this process, or vLLM or SGLang over HTTP."""
    urls: tuple[str, ...] = ()
    """Servers, for example "http://localhost:8000"; requests are spread over them."""
    autocast: Literal["model", "none", "bfloat16"] = "model"
    """transformers: precision of the matrix products while sampling; "model" is that of training."""
    concurrency: int = 64
    """Most requests on the way; a request asks for the samples of one prompt."""
    timeout: float = 600.0
    """Longest time of a request, the loading of weights among them, in seconds."""
    retries: int = 4
    """Further attempts after a lost connection, a timeout or an HTTP status of 500 and above."""
    backoff: float = 0.5
    """Seconds before the first further attempt; twice as many before each one after, 30 at most."""
    on_failure: Literal["raise", "wait"] = "raise"
    """When these attempts are used up: raise ends the run; wait goes on until a server is back."""
    wait_limit: float = 3600.0
    """Seconds after which wait ends the run too."""
    weights_dir: str | None = None
    """Folder that trainer and servers see under the same path, for the weights on their way;
    "weights" in the folder of the run if "none"."""

    def __post_init__(self) -> None:
        if self.kind != "transformers" and not self.urls:
            raise ValueError(
                f'config: engine.kind = "{self.kind}" needs engine.urls, got none; name the servers, '
                'for example ["http://localhost:8000"]'
            )
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(
                    f"config: engine.urls must begin with http:// or https://, got {url!r}"
                )
        for key, lowest in {"concurrency": 1, "retries": 0, "backoff": 0, "wait_limit": 0}.items():
            if getattr(self, key) < lowest:
                raise ValueError(
                    f"config: engine.{key} must be at least {lowest}, got {getattr(self, key)}"
                )
        if self.timeout <= 0:
            raise ValueError(f"config: engine.timeout must be positive, got {self.timeout}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionConfig:
    """Importance weights p(trainer) / p(sampler) of `fastrl.surrogates.rollout_correction`."""

    kind: Literal["none", "tis", "mis", "icepop"] = "none"
    """tis lowers weights above `high` to it (truncated importance sampling), mis and icepop put
    those out of bounds to 0."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """A weight per token, per completion (product over its tokens), or the geometric mean of it."""
    low: float | None = None
    """Lower bound; icepop must have one (0.5 in its paper)."""
    high: float = 2.0
    """Upper bound (5.0 in icepop's paper)."""

    def __post_init__(self) -> None:
        if self.high <= max(self.low or 0.0, 0.0):
            raise ValueError(
                f"config: correction.high must be above 0 and correction.low = {self.low}, got {self.high}"
            )
        if self.kind == "icepop" and (self.low is None or self.level != "token"):
            raise ValueError(
                "config: icepop bounds the weights of tokens on both sides, got correction.low = "
                f'{self.low} and correction.level = "{self.level}"; set low = 0.5 and level = "token", '
                'or kind = "mis"'
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleConfig:
    """Several processes, started by torchrun; read when there is more than one."""

    strategy: Literal["ddp", "fsdp2"] = "ddp"
    """"ddp": every process holds all weights; "fsdp2": each holds a shard of weights, gradients and the
    optimiser's state, and the whole only of the layer it computes, and of all layers while it samples."""
    timeout: float = 1800.0
    """Seconds that a process waits for another one, which is then taken for lost; more than the longest
    difference in the time that two of them sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """What is saved, and when."""

    every: int = 0
    """Steps between checkpoints; 0 means only at the end and on Ctrl-C."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    final: bool = True
    """Save after the last step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """What is shown and written while training."""

    samples_every: int = 10
    """Steps between printed sample completions; 0 prints none."""
    samples: int = 2
    """Completions printed and kept each time."""
    tensorboard: bool = True
    """Write TensorBoard files when TensorBoard is installed."""
    progress: bool = True
    """Show a progress bar on a terminal, or one line per step elsewhere."""
