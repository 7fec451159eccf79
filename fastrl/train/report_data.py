"""A run folder read back for the report: what is readable is used, what is not becomes a note.

A report is most wanted when a run went wrong, so a missing file, a half-written last line or a figure
that is not a number is never an error here; only a folder without a single record is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar

from fastrl.envs import Trajectory
from fastrl.train.config import Config, load

__all__ = ["TIME_PARTS", "Run", "Series", "read_run", "time_split"]

T = TypeVar("T")

TIME_PARTS: Mapping[str, tuple[str, ...]] = {
    "sampling": ("time/sample",),
    "forward and backward": ("time/forward_backward",),
    "fastrl ops": ("time/fastrl",),
    "rest": ("time/score", "time/optimizer", "time/other"),
}
"""The four parts of a step that are drawn, and the metrics that each sums."""


class Series(NamedTuple):
    """One figure over the steps where it is defined."""

    steps: list[int]
    values: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run folder holds."""

    path: Path
    metrics: tuple[Mapping[str, Any], ...]
    """One record per step, in order of steps."""
    evaluations: tuple[Mapping[str, Any], ...]
    """One record per evaluation, in order of steps."""
    samples: tuple[Trajectory, ...]
    """Completions of training questions."""
    eval_samples: tuple[Trajectory, ...]
    """Completions of held-out questions; the same question has the same uid in every evaluation."""
    config: Config | None
    """The configuration, if this version can read it."""
    config_text: str
    """config.toml as it stands in the folder."""
    notes: tuple[str, ...]
    """What could not be read, in words."""

    def series(self, name: str) -> Series:
        """The metric `name` where it is a finite number; "eval/accuracy" reads the evaluations."""
        table, key = self.metrics, name
        if name.startswith("eval/"):
            table, key = self.evaluations, name.removeprefix("eval/")
        points = [(record["step"], record.get(key)) for record in table]
        kept = [(int(step), float(v)) for step, v in points if _is_finite(v)]
        return Series([step for step, _ in kept], [value for _, value in kept])

    def names(self) -> list[str]:
        """Names of all metrics logged, in order of first appearance."""
        return list(dict.fromkeys(name for record in self.metrics for name in record))


def read_run(run_dir: Path) -> Run:
    """The run in the folder `run_dir`.

    Raises ValueError when it is not a folder, or holds neither a finished step nor an evaluation.
    """
    if not run_dir.is_dir():
        raise ValueError(
            f"report: run_dir must be a folder written by fastrl train, got {run_dir}, "
            f"{'a file' if run_dir.exists() else 'which does not exist'}; "
            "pass the run_dir of the configuration"
        )
    notes: list[str] = []
    metrics = _by_step(_lines(run_dir / "metrics.jsonl", _record, notes))
    evaluations = _by_step(_lines(run_dir / "eval.jsonl", _record, notes))
    if not metrics and not evaluations:
        started = (run_dir / "config.toml").exists()
        raise ValueError(
            f"report: {run_dir} must hold at least one step in metrics.jsonl or one evaluation in "
            f"eval.jsonl, got {'a run that finished none' if started else 'no run'}; "
            f"{'let it finish a step' if started else 'pass the run_dir of the configuration'}"
        )
    config, text = _config(run_dir / "config.toml", notes)
    if not metrics:
        notes.append("No step has finished yet.")
    return Run(
        path=run_dir,
        metrics=metrics,
        evaluations=evaluations,
        samples=tuple(_lines(run_dir / "samples.jsonl", Trajectory.from_json, notes)),
        eval_samples=tuple(_lines(run_dir / "eval_samples.jsonl", Trajectory.from_json, notes)),
        config=config,
        config_text=text,
        notes=tuple(notes),
    )


def time_split(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds in each of TIME_PARTS, summed over the records.

    >>> time_split([{"time/sample": 2.0, "time/score": 0.5, "time/other": 0.25}])["rest"]
    0.75
    """
    return {
        part: sum(v for n in names for v in (r.get(n) for r in metrics) if _is_finite(v))
        for part, names in TIME_PARTS.items()
    }


def _is_finite(value: Any) -> TypeGuard[float]:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _lines(path: Path, parse: Callable[[str], T], notes: list[str]) -> list[T]:
    """The readable lines of a JSON-lines file; a note for the others."""
    if not path.exists():
        return []
    # A crash can cut a line inside a multi-byte character, so bad bytes must not stop the reading.
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    result: list[T] = []
    bad: list[int] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            result.append(parse(line))
        except (ValueError, TypeError):
            bad.append(number)
    if bad:
        last = bad == [len(lines)]
        which = "the last line is cut off" if last else f"unreadable lines {bad[:5]}"
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        notes.append(f"{path.name}: {which}{more}; left out.")
    return result


def _record(line: str) -> Mapping[str, Any]:
    record = json.loads(line)
    if not isinstance(record, dict) or not _is_finite(record.get("step")):
        raise ValueError("a record is an object with a step")
    return record


def _by_step(records: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Records in order of steps; of a step that was run twice, the later record."""
    latest = {int(record["step"]): record for record in records}
    return tuple(latest[step] for step in sorted(latest))


def _config(path: Path, notes: list[str]) -> tuple[Config | None, str]:
    if not path.exists():
        notes.append("config.toml: missing.")
        return None, ""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return load(path), text
    except ValueError as error:
        notes.append(f"config.toml: {error}")
        return None, text
