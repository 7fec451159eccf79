"""Environments: where an episode of several turns comes from, and how each turn is rewarded.

An environment speaks messages in the form that chat completions use: `{"role": ..., "content": ...}`.
It knows nothing of tokens, batches or training; one instance plays one episode at a time.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

from fastrl.envs.tasks import stream

__all__ = ["Env", "EnvTask", "Message", "StepResult", "load_env_task"]

Message: TypeAlias = dict[str, Any]
"""A chat message: "role" (system, user, assistant or tool), "content", and for calls "tool_calls"."""


class StepResult(NamedTuple):
    """What an environment answers to one assistant message."""

    messages: list[Message]
    """The next messages for the model, usually of role "tool" or "user"; none when `done`."""
    reward_parts: Mapping[str, float | None]
    """Rewards of this turn by name; a name left out, or None, was not scored at this turn."""
    done: bool
    """Whether the episode is over."""


class Env(Protocol):
    """One episode at a time.

    `tasks` returns what `reset` understands: one JSON-like mapping per task. The same task must give
    the same first messages, because episodes of one task form a group that shares its prompt.
    What may be there too: `tools`, a list of tool schemas for the chat template; `info`, a JSON-like
    mapping that is recorded when the episode ends; `cut()`, the reward parts of an episode that ran into
    a limit of turns or tokens; `close()`, called when it has ended; `demonstrate(task, rng)`, the assistant
    messages of one way to play `task`, enough to reach its end, for a warm start. It may be a poor way:
    what is imitated is the form, and reinforcement improves on it. `rng` is a `random.Random`. `step` may add
    "tool_calls" to the message it is given.
    """

    weights: Mapping[str, float]
    """Every reward part by name with its weight in the sum; the first decides what counts as correct."""

    def tasks(self, *, size: int, seed: int) -> Sequence[Mapping[str, Any]]:
        """At most `size` tasks, the same for the same seed."""
        ...

    def reset(self, task: Mapping[str, Any]) -> list[Message]:
        """Begin an episode; returns the first messages."""
        ...

    def step(self, message: Message) -> StepResult:
        """Answer the assistant's `message`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvTask:
    """The tasks of an environment, split into training and held-out, and its reward weights."""

    make: Callable[[], Env]
    train: tuple[Mapping[str, Any], ...]
    held_out: tuple[Mapping[str, Any], ...]
    weights: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

    def batch(self, position: int, size: int) -> list[tuple[int, Mapping[str, Any]]]:
        """Tasks number `position` to `position + size` of an endless shuffled stream."""
        return stream(self.train, position, size, self.seed)

    def total(self, parts: Mapping[str, float | None]) -> float | None:
        """The weighted sum of the parts that were scored; None when none was."""
        scored = [(self.weights[n], v) for n, v in parts.items() if v is not None]
        return sum(w * v for w, v in scored) if scored else None


def load_env_task(
    source: str,
    *,
    params: Mapping[str, Any] | None = None,
    weights: Mapping[str, float] | None = None,
    size: int = 1024,
    held_out: int = 32,
    seed: int = 0,
) -> EnvTask:
    """The environment named `source`, made with `params`, and its tasks.

    `source` is a built-in name, "reasoning_gym:NAME", "gymnasium:NAME", "textarena:NAME",
    "verifiers:NAME", or the import path "package.module:Class" of anything that has the methods of
    `Env`. `weights` replaces weights of single reward parts. With fewer tasks than `held_out` asks
    for in addition to one for training, the held-out tasks are also trained on: an environment such
    as guess_number has all of its few tasks in both.

    Raises ValueError for an unknown source or reward part, or without tasks.

    >>> task = load_env_task("guess_number", params={"numbers": 8}, held_out=2)
    >>> len(task.train), len(task.held_out)
    (6, 2)
    """
    make = _maker(source, dict(params or {}))
    probe = make()
    tasks = list(probe.tasks(size=size + held_out, seed=seed))
    if not tasks:
        raise ValueError(f"env: {source} returned no tasks for size = {size + held_out}")
    random.Random(f"{seed}/split").shuffle(tasks)
    enough = len(tasks) > held_out
    chosen = {**probe.weights}
    if unknown := set(weights or ()) - set(chosen):
        raise ValueError(
            f"env: {source} has no reward parts {sorted(unknown)}; it has {', '.join(chosen)}"
        )
    chosen |= dict(weights or {})
    return EnvTask(
        make=make,
        train=tuple(tasks[held_out:] if enough else tasks),
        held_out=tuple(tasks[:held_out]),
        weights=chosen,
        seed=seed,
    )


def _maker(source: str, params: dict[str, Any]) -> Callable[[], Env]:
    """A function that makes one environment; the import happens once, with a clear error."""
    kind, _, name = source.partition(":")
    if kind in _ADAPTERS and name:
        path, params = _ADAPTERS[kind], {"name": name, **params}
    else:
        path = _BUILT_IN.get(source, source)
    module, colon, attribute = path.partition(":")
    if not (colon and attribute):
        raise ValueError(
            f"env: unknown environment {source!r}; expected one of {', '.join(_BUILT_IN)}, "
            f'one of {", ".join(_ADAPTERS)} with ":NAME", or "package.module:Class"'
        )
    try:
        make = cast(Callable[..., Env], getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"env: cannot import the environment {source!r}: {error}") from error
    return lambda: make(**params)


_BUILT_IN = {
    "guess_number": "fastrl.envs.guess_number:GuessNumber",
    "calculator": "fastrl.envs.calculator:Calculator",
    "code_repair": "fastrl.envs.code_repair:CodeRepair",
}

_ADAPTERS = {
    "reasoning_gym": "fastrl.envs.adapters:ReasoningGym",
    "gymnasium": "fastrl.envs.adapters:Gymnasium",
    "textarena": "fastrl.envs.adapters:TextArena",
    "verifiers": "fastrl.envs.verifiers:Verifiers",
}
