"""The record of one completion: what was asked, what was sampled, how it was scored. One JSON line each."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Trajectory", "read_trajectories", "write_trajectories"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One prompt, one completion, and everything needed to train on it or to read it later.

    `completion_ids`, `mask` and `logprobs` have one entry per sampled token; `mask` is 1 where the
    token is trained on (the model wrote it) and 0 where it is not (a tool did).

    >>> record = Trajectory(uid="q0", prompt="1+1=", completion="2", answer="2", reward=1.0)
    >>> Trajectory.from_json(record.to_json()) == record
    True
    """

    uid: str
    """Identifies the prompt; completions with the same uid form a group."""
    prompt: str
    """Text given to the model, chat template included."""
    completion: str
    """Text sampled from the model, special tokens left out."""
    answer: str
    """The expected answer, or "" where there is none."""
    question: str = ""
    """The question as its source words it, without template."""
    prompt_ids: tuple[int, ...] = ()
    """Tokens of the prompt."""
    completion_ids: tuple[int, ...] = ()
    """Tokens sampled, with the end-of-sequence token when there was one."""
    mask: tuple[int, ...] = ()
    """1 where the token is trained on."""
    logprobs: tuple[float, ...] = ()
    """Log-probability of each token under the policy that sampled it, in nats."""
    reward: float | None = None
    """Weighted sum of the parts; None when nothing was scored."""
    reward_parts: dict[str, float | None] = field(default_factory=dict)
    """Each reward by name; None when not scored."""
    finished: bool = True
    """False when the completion was cut at the token limit."""
    step: int = 0
    """Training step that sampled it."""

    def __post_init__(self) -> None:
        lengths = {
            name: len(getattr(self, name))
            for name in ("mask", "logprobs")
            if getattr(self, name) and len(getattr(self, name)) != len(self.completion_ids)
        }
        if lengths:
            raise ValueError(
                f"Trajectory: mask and logprobs must have one entry per completion token = "
                f"{len(self.completion_ids)}, got {lengths}"
            )

    def to_json(self) -> str:
        """This record as one line of strict JSON; NaN is written as null, which means not scored."""
        record = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        record["reward"] = _scored(self.reward)
        record["reward_parts"] = {k: _scored(v) for k, v in self.reward_parts.items()}
        return json.dumps(record, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Trajectory:
        """The record in one line. Raises ValueError when the line is not one."""
        record: Any = json.loads(line)
        names = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(record, dict) or not {"uid", "prompt", "completion"} <= set(record):
            raise ValueError(
                f"Trajectory: expected an object with uid and prompt, got {line[:80]!r}"
            )
        if unknown := set(record) - names:
            raise ValueError(f"Trajectory: unknown fields {sorted(unknown)}")
        fields: dict[str, Any] = {k: tuple(v) if type(v) is list else v for k, v in record.items()}
        return cls(**fields)


def _scored(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def write_trajectories(path: Path, records: Iterable[Trajectory]) -> None:
    """Append `records` to the file at `path`, one line each."""
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(record.to_json() + "\n" for record in records)


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """The records in the file at `path`, in order."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield Trajectory.from_json(line)
