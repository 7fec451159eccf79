"""Sections of the configuration for environments, filtering groups and several processes; a sentence under each field, as in config.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["EnvConfig", "FilterConfig", "ScaleConfig"]


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
class ScaleConfig:
    """Several processes, started by torchrun; read when there is more than one."""

    strategy: Literal["ddp", "fsdp2"] = "ddp"
    """"ddp": every process holds all weights; "fsdp2": each holds a shard of weights, gradients and the
    optimiser's state, and the whole only of the layer it computes, and of all layers while it samples."""
    timeout: float = 1800.0
    """Seconds that a process waits for another one, which is then taken for lost; more than the longest
    difference in the time that two of them sample."""
