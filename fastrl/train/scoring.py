"""Scores of completions: every reward function under a time limit, and a policy for those that fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fastrl.envs import Question, RewardError, Task
from fastrl.train.config import TaskConfig
from fastrl.train.guard import call_each

__all__ = ["Scores", "score"]


class Scores(NamedTuple):
    """The rewards of one completion."""

    parts: dict[str, float | None]
    """By name; None when not scored."""
    error: str
    """What failed, or ""."""


def score(config: TaskConfig, task: Task, answered: Sequence[tuple[Question, str]]) -> list[Scores]:
    """The scores of each pair of question and completion.

    Raises RewardError when a function fails and task.failed_reward = "raise".
    """
    pairs = [(reward, *pair) for pair in answered for reward in task.rewards]
    results = _call(config, [lambda p=p: p[0].score(*p[1:]) for p in pairs])  # type: ignore[misc]
    scored: list[float | None] = []
    errors: list[str] = []
    for (reward, question, _), result in zip(pairs, results, strict=True):
        if not isinstance(result, Exception):
            scored.append(result)
            errors.append("")
            continue
        error = result
        if isinstance(result, TimeoutError):
            error = reward.failure(question, f"did not return: {result} (task.reward_seconds)")
        if config.failed_reward == "raise":
            raise RewardError(
                f'{error}; correct it, or set task.failed_reward = "skip", which counts such rewards as '
                "not scored"
            ) from result
        scored.append(None)
        errors.append(str(error))
    names, size = list(task.weights), len(task.rewards)
    return [
        Scores(
            dict(zip(names, scored[i : i + size], strict=True)),
            "; ".join(e for e in errors[i : i + size] if e),
        )
        for i in range(0, len(pairs), size)
    ]


def _call(
    config: TaskConfig, calls: Sequence[Callable[[], float | None]]
) -> Sequence[float | Exception | None]:
    if config.reward_seconds is not None:
        return call_each(calls, seconds=config.reward_seconds)
    results: list[float | Exception | None] = []
    for call in calls:
        try:
            results.append(call())
        except RewardError as error:
            results.append(error)
    return results
