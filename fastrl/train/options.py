"""Sections of the configuration for environments, warm start and filtering; a sentence under each field, as in config.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["EnvConfig", "FilterConfig", "WarmStartConfig"]


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
