"""`fastrl replay FILE`: rewards and advantages of recorded trajectories, computed again without a model.

Rewards changed, or are suspected? Replay says which records would now be scored differently. Questions
are scored by the rewards of the configuration beside the file; environments are played again with the
recorded assistant messages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastrl.envs import EnvTask, Task, Trajectory, read_trajectories
from fastrl.train.advantages import group_advantages
from fastrl.train.batch import make_batch
from fastrl.train.collect import make_task
from fastrl.train.config import Config

__all__ = ["Replayed", "replay", "text_of"]


class Replayed(NamedTuple):
    """One record, and what it is worth now."""

    record: Trajectory
    reward: float | None
    """The reward as computed now; None when nothing was scored."""
    advantage: float
    """Group advantage of its first trained token among the records of its step and uid in the file."""

    @property
    def changed(self) -> bool:
        """Whether the reward is another than the recorded one."""
        old, new = self.record.reward, self.reward
        if old is None or new is None:
            return old is not new
        return not math.isclose(old, new, rel_tol=1e-9, abs_tol=1e-12)


def replay(file: Path, config: Config) -> list[Replayed]:
    """Every record of the file at `path`, scored anew.

    Raises ValueError when a record belongs to no question or task of `config`.
    """
    task = make_task(config)
    records = list(read_trajectories(file))
    scored = [_scored(record, task) for record in records]
    # A uid names a group within its step.
    keyed = [dataclasses.replace(t, uid=f"{t.step}/{t.uid}") for t in scored]
    batch = make_batch(keyed, list(task.weights), list(task.weights.values()))
    advantages = group_advantages(batch, config.grpo)
    result = []
    for i, (record, now) in enumerate(zip(records, scored, strict=True)):
        places = batch.mask[i].nonzero()
        first = float(advantages[i, places[0, 0]]) if len(places) else 0.0
        result.append(Replayed(record, now.reward, first))
    return result


def _scored(record: Trajectory, task: Task | EnvTask) -> Trajectory:
    if isinstance(task, EnvTask):
        return _played(record, task)
    questions = {q.text: q for q in (*task.train, *task.held_out)}
    if record.question not in questions:
        raise ValueError(
            f"replay: no question of the task reads {record.question[:80]!r}; use the configuration "
            "that the records were made with"
        )
    # The text of a completion has no end-of-sequence token, as when it was scored first.
    parts = task.score(questions[record.question], record.completion)
    return dataclasses.replace(record, reward_parts=parts, reward=task.total(parts))


def _played(record: Trajectory, task: EnvTask) -> Trajectory:
    if record.status == "failed":
        return record
    env = task.make()
    env.reset(_entry(record, task))
    parts: dict[str, float | None] = dict.fromkeys(task.weights)
    said = [dict(m) for m in record.messages if m["role"] == "assistant"]
    turns = list(record.turns)

    def add(number: int, scores: Mapping[str, float | None]) -> None:
        known = {n: float(v) for n, v in scores.items() if v is not None}
        for name, value in known.items():
            parts[name] = (parts[name] or 0.0) + value
        if turns and known:
            old = turns[number].reward_parts
            merged = {**old, **{n: (old.get(n) or 0.0) + v for n, v in known.items()}}
            turns[number] = turns[number]._replace(reward_parts=merged, reward=task.total(merged))

    turns = [turn._replace(reward_parts={}, reward=None) for turn in turns]
    try:
        done = False
        for number, message in enumerate(said):
            if done:
                break
            _, scores, done = env.step(message)
            add(number, scores)
        if not done and hasattr(env, "cut"):
            add(len(said) - 1, env.cut())
    finally:
        if hasattr(env, "close"):
            env.close()
    counts = record.reward is not None
    total = task.total(parts) if counts else None
    return dataclasses.replace(record, reward_parts=parts, reward=total, turns=tuple(turns))


def _entry(record: Trajectory, task: EnvTask) -> Mapping[str, Any]:
    kind, _, number = record.uid.rpartition("/")
    if kind == "held_out" and int(number) < len(task.held_out):
        return task.held_out[int(number)]
    if record.uid.isdigit():
        return task.batch(int(record.uid), 1)[0][1]
    raise ValueError(
        f"replay: {record.uid!r} is no task of this configuration; use the one that the records were made with"
    )


def text_of(replayed: Sequence[Replayed]) -> str:
    """A table for people to read, and what changed."""
    lines = [f"{'step':>5} {'uid':>12} {'recorded':>9} {'now':>9} {'advantage':>10}"]
    for r in replayed:
        old, new = ("none" if v is None else f"{v:.4f}" for v in (r.record.reward, r.reward))
        mark = "  changed" if r.changed else ""
        lines.append(
            f"{r.record.step:>5} {r.record.uid:>12} {old:>9} {new:>9} {r.advantage:>10.4f}{mark}"
        )
    lines.append(f"{sum(r.changed for r in replayed)} of {len(replayed)} rewards changed")
    return "\n".join(lines)
