"""The record of a run: JSON lines always, TensorBoard where installed, a progress bar on a terminal.

A run folder holds config.toml, metrics.jsonl (one object per step), eval.jsonl (one per evaluation),
samples.jsonl and eval_samples.jsonl (one trajectory per line) and checkpoints/; beside them what other
parts write (warm_start.py, engines.py). Every line carries its step, so a resumed run can cut off what
was written after the checkpoint it continues from.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fastrl.envs import Trajectory, write_trajectories
from fastrl.train import config as configs
from fastrl.train.config import Config
from fastrl.train.metrics import check_names
from fastrl.train.storage import replace_file, writing

__all__ = ["Journal", "Silent"]

_FILES = ("metrics.jsonl", "eval.jsonl", "samples.jsonl", "eval_samples.jsonl")


class Journal:
    """Writes and shows what a run reports. A context manager, which owns the progress bar."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        self._run_dir = run_dir
        self._config = config
        self._console = Console()
        self._tensorboard: Any = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            disable=not (config.log.progress and self._console.is_terminal),
        )
        self._job = self._bar.add_task(config.algorithm, total=config.steps, figures="")

    def open(self, start: int, *, evaluated: int) -> None:
        """Begin at step `start`: save the configuration, cut records of later steps.

        Evaluations are kept up to that of step `evaluated`, -1 for none.
        """
        replace_file(self._run_dir / "config.toml", configs.dumps(self._config).encode())
        for name in _FILES:
            _cut(self._run_dir / name, evaluated if name.startswith("eval") else start)
        self._bar.update(self._job, completed=start)
        if self._config.log.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                return
            self._tensorboard = SummaryWriter(
                str(self._run_dir / "tensorboard"), purge_step=start + 1
            )

    def __enter__(self) -> Journal:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
        if self._tensorboard is not None:
            # An error that already ends the run says more than that its last events cannot be written.
            with suppress(*[OSError] if error is not None else []):
                self._tensorboard.close()

    def say(self, message: str) -> None:
        """Print one line."""
        self._console.print(Text(message), soft_wrap=True)

    def metrics(self, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step; their names must be defined in `metrics.METRICS`."""
        check_names(metrics)
        self._append("metrics.jsonl", metrics)
        step = int(metrics["step"])
        self._add_scalars(metrics, step)
        figures = _figures(metrics)
        self._bar.update(self._job, completed=step, figures=figures)
        if self._config.log.progress and not self._console.is_terminal:
            self.say(f"step {step}/{self._config.steps}  {figures}")

    def evaluation(self, result: Mapping[str, float], trajectories: Sequence[Trajectory]) -> None:
        """Record one evaluation on the held-out questions."""
        self._append("eval.jsonl", result)
        self._append_trajectories("eval_samples.jsonl", trajectories)
        shown = {f"eval/{name}": result[name] for name in ("accuracy", "reward")}
        self._add_scalars(shown, int(result["step"]))
        self.say(
            f"held out after step {int(result['step'])}: accuracy {result['accuracy']:.3f}, "
            f"reward {result['reward']:.3f} ({int(result['questions'])} questions)"
        )

    def samples(self, trajectories: Sequence[Trajectory]) -> None:
        """Record and print some completions."""
        self._append_trajectories("samples.jsonl", trajectories)
        if not self._config.log.progress:
            return
        table = Table("question", "completion", "answer", "reward")
        for t in trajectories:
            reward = "not scored" if t.reward is None else f"{t.reward:.3f}"
            # Text, because square brackets in a string would be read as markup.
            cells = (t.question[:200], t.completion[:200], t.answer[:80], reward)
            table.add_row(*(Text(cell) for cell in cells))
        self._console.print(table)

    def sync(self) -> None:
        """Wait until all records are on the disk, so that none is older than a checkpoint."""
        for name in _FILES:
            path = self._run_dir / name
            if path.exists():
                with writing(path), open(path, "a") as file:
                    os.fsync(file.fileno())

    def _append(self, name: str, record: Mapping[str, float]) -> None:
        # JSON has no NaN; null stands for a figure that is not defined.
        line = {k: None if not math.isfinite(v) else v for k, v in record.items()}
        path = self._run_dir / name
        with writing(path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def _append_trajectories(self, name: str, trajectories: Sequence[Trajectory]) -> None:
        with writing(self._run_dir / name):
            write_trajectories(self._run_dir / name, trajectories)

    def _add_scalars(self, values: Mapping[str, float], step: int) -> None:
        if self._tensorboard is None:
            return
        with writing(self._run_dir / "tensorboard"):
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)


class Silent(Journal):
    """The journal of a rank that keeps none: the first rank writes and speaks for all."""

    def open(self, start: int, *, evaluated: int) -> None:
        """Nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing."""

    def say(self, message: str) -> None:
        """Nothing."""

    def metrics(self, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def evaluation(self, result: Mapping[str, float], trajectories: Sequence[Trajectory]) -> None:
        """Nothing."""

    def samples(self, trajectories: Sequence[Trajectory]) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""


def _cut(path: Path, last: int) -> None:
    """Remove the lines of steps after `last`, and a last line that a crash left unfinished."""
    if not path.exists():
        return
    # Bytes: a crash can cut inside a character, and a line of JSON may hold U+2028, which ends none.
    lines = path.read_bytes().split(b"\n")
    kept = b"".join(line + b"\n" for line in lines if _is_up_to(line, last))
    if kept != path.read_bytes():
        replace_file(path, kept)


def _is_up_to(line: bytes, last: int) -> bool:
    try:
        return bool(json.loads(line)["step"] <= last)
    except (ValueError, TypeError, KeyError):
        return False


def _figures(metrics: Mapping[str, float]) -> str:
    """The figures beside the progress bar."""
    parts = [f"reward {metrics['reward/mean']:.3f}"]
    if "kl/ref" in metrics:
        parts.append(f"kl {metrics['kl/ref']:.4f}")
    if "policy/clip_fraction" in metrics:
        parts.append(f"clip {metrics['policy/clip_fraction']:.3f}")
    parts.append(f"{metrics['throughput/tokens_per_second']:.0f} tok/s")
    parts.append(f"{metrics['time/step']:.2f} s")
    return "  ".join(parts)
