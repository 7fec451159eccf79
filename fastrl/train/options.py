"""Sections of the configuration for environments, for filtering groups and for LoRA; a sentence under each field, as in config.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["EnvConfig", "FilterConfig", "LoRAConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvConfig:
    """An environment of several turns in place of the questions of [task]."""

    source: str | None = None
    """A built-in environment, "reasoning_gym:NAME", "gymnasium:NAME", "textarena:NAME", or the import
    path "package.module:Class" of one; the questions of [task] if "none"."""
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
