"""The record of one episode: what was asked, sampled, answered by tools, and scored. One JSON line each."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

__all__ = ["Trajectory", "Turn", "read_trajectories", "write_trajectories"]


class Turn(NamedTuple):
    """One assistant message of an episode, as a range of its tokens, and the rewards it earned."""

    start: int
    """Place of its first token in `completion_ids`."""
    end: int
    """Place after its last token, the end-of-sequence token included when there was one."""
    reward_parts: dict[str, float | None] = {}  # noqa: RUF012  read only
    """Rewards of this turn by name; a name left out, or None, was not scored at this turn."""
    reward: float | None = None
    """Weighted sum of the parts; None when nothing was scored at this turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One prompt, what followed it, and everything needed to train on it or to read it later.

    `completion_ids`, `mask` and `logprobs` have one entry per token after the first prompt; `mask` is
    1 where the token is trained on (the model wrote it) and 0 where it is not (a tool or the chat
    template did). Without `turns` the whole completion is one turn.

    >>> record = Trajectory(uid="q0", prompt="1+1=", completion="2", answer="2", reward=1.0)
    >>> Trajectory.from_json(record.to_json()) == record
    True
    """

    uid: str
    """Identifies the prompt; completions with the same uid form a group."""
    prompt: str
    """Text given to the model, chat template included."""
    completion: str
    """Text after the prompt, tool outputs included, end-of-sequence tokens left out."""
    answer: str
    """The expected answer, or "" where there is none."""
    question: str = ""
    """The question as its source words it, without template."""
    prompt_ids: tuple[int, ...] = ()
    """Tokens of the prompt."""
    completion_ids: tuple[int, ...] = ()
    """Tokens after the prompt, with the end-of-sequence tokens that were sampled."""
    mask: tuple[int, ...] = ()
    """1 where the token is trained on."""
    logprobs: tuple[float, ...] = ()
    """Log-probability of each token under the policy that sampled it, in nats; 0 where it was not
    sampled."""
    reward: float | None = None
    """Weighted sum of the parts; None when nothing was scored."""
    reward_parts: dict[str, float | None] = field(default_factory=dict)
    """Each reward by name, summed over turns; None when not scored."""
    finished: bool = True
    """False when the completion was cut at a limit of tokens or turns, or failed."""
    step: int = 0
    """Training step that sampled it."""
    episode: str = ""
    """Identifies the episode; rows of one episode count once in the statistics of their group."""
    turns: tuple[Turn, ...] = ()
    """The assistant's messages in order."""
    messages: tuple[dict[str, Any], ...] = ()
    """The conversation: prompts, assistant messages with tool calls, tool outputs."""
    status: Literal["finished", "truncated", "failed"] = "finished"
    """How the episode ended: by itself, at a limit, or by an error of the environment."""
    error: str = ""
    """What failed."""
    info: dict[str, Any] = field(default_factory=dict)
    """What the environment reports at the end, for example the patch and the test results."""
    feedback: str | None = None
    """Room for what a human says about it."""
    policy_step: int | None = None
    """Training step whose weights sampled it, when they were older than `step`."""

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
        """This record as one line of strict JSON; NaN is written as null, which means not scored.

        Fields added after the first version are left out while they hold their default.
        """
        record = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in _LATER or getattr(self, f.name) != _default(f)
        }
        record["reward"] = _scored(self.reward)
        record["reward_parts"] = {k: _scored(v) for k, v in self.reward_parts.items()}
        if self.turns:
            record["turns"] = [
                t._replace(
                    reward=_scored(t.reward),
                    reward_parts={k: _scored(v) for k, v in t.reward_parts.items()},
                )._asdict()
                for t in self.turns
            ]
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
        if "turns" in fields:
            fields["turns"] = tuple(Turn(**turn) for turn in fields["turns"])
        return cls(**fields)


_LATER = {"episode", "turns", "messages", "status", "error", "info", "feedback", "policy_step"}


def _default(item: dataclasses.Field[Any]) -> Any:
    factory = item.default_factory
    return item.default if factory is dataclasses.MISSING else factory()


def _scored(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def write_trajectories(path: Path, records: Iterable[Trajectory]) -> None:
    """Append `records` to the file at `path`, one line each."""
    # Half of a surrogate pair becomes "\\ud800", which is what JSON calls it.
    with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(record.to_json() + "\n" for record in records)


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """The records in the file at `path`, in order."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield Trajectory.from_json(line)
