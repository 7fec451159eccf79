"""GRPO teaches SmolLM2-135M one-digit sums on two CPU cores, in a few minutes and without a download.

Trains with `configs/grpo_smollm2.toml`, then shows what came of it: accuracy on held-out questions
before and after, the reward curve, answers to the same questions, where the time went, an update with
and without all logits in time and memory, and each fastrl op beside plain PyTorch. Ends with code 0
only if accuracy or reward rose by a stated margin.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# Before torch is imported: threads that wait for one another give their core away instead of spinning,
# or on a busy machine a step takes several times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# The profiler, which counts bytes, would announce itself in the middle of the text.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
# The weights come with a package; nothing may be looked for elsewhere.
os.environ["HF_HUB_OFFLINE"] = "1"
if not sys.stderr.isatty():
    os.environ["TQDM_DISABLE"] = "1"

import torch

import fastrl
from examples import head_table, op_table
from fastrl.envs import Trajectory
from fastrl.train import config as configs
from fastrl.train import diagnose
from fastrl.train.loop import train
from fastrl.train.report import write_report
from fastrl.train.report_data import Run, read_run, time_split

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "grpo_smollm2.toml"

# Larger than most chance differences, by rough estimate: 64 questions of which a quarter change sides at
# random move the accuracy by 0.06 (one standard deviation), other prompts the reward of a step by 0.1.
ACCURACY_MARGIN = 0.1
REWARD_MARGIN = 0.2

# What still follows the last step (evaluation, report, op table) takes less than a minute of the eight.
TRAINING_SECONDS = 330


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if the model got better, 1 if not, 130 when interrupted."""
    options = _parser().parse_args(arguments)
    started = time.perf_counter()
    run_dir = _new_folder(options.run_dir)
    config = configs.load(
        options.config,
        [
            f'run_dir="{run_dir}"',
            "checkpoint.final=false",
            "log.samples_every=0",
            f"time_limit={options.seconds}",
            *options.set,
        ],
    )
    _say(
        f"fastrl {fastrl.__version__}, torch {torch.__version__}, {_machine(config.threads)}",
        f"GRPO on {config.model.source}, task {config.task.source}: {config.rollout.prompts} prompts x "
        f"{config.rollout.samples} completions a step,",
        f"{config.steps} steps or {options.seconds} s, whichever comes first. Run folder: {run_dir}",
    )

    _title("Training")
    outcome = train(config, run_dir)
    if outcome.stopped_by:
        _say("stopped before the end, so there is nothing to compare")
        return 130
    run = read_run(run_dir)

    _title("Accuracy on held-out questions")
    _say(*accuracy_lines(run))
    _title("Mean reward of each step")
    _say(*reward_lines(run))
    _title("Held-out answers before and after")
    _say(*answer_lines(run.eval_samples))
    _title("Where the time went")
    _say(*time_lines(run))
    page = write_report(run_dir)
    _say("", f"curves: {page}", f"        {page.parent}/*.png")

    _title("One update with all logits of a micro-batch, and without them")
    _say(head_table.table(config.rollout))

    _title("Each op beside plain PyTorch on this machine")
    _say(op_table.table())

    _title("What fastrl doctor finds in this run")
    _say(diagnose.text_of(diagnose.doctor(run_dir)))

    verdict = judge(run)
    _title("Passed" if verdict.passed else "Failed")
    _say(verdict.message, f"{time.perf_counter() - started:.0f} s in all")
    return 0 if verdict.passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=CONFIG, help="configuration to train with")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/demo"), help="folder to write; numbered if taken"
    )
    parser.add_argument(
        "--seconds", type=float, default=TRAINING_SECONDS, help="no step begins after this time"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace one value of the configuration; may be repeated",
    )
    return parser


# --- what is said ------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """Whether the run got better, and the figures that say so."""

    passed: bool
    message: str


def judge(run: Run) -> Verdict:
    """Compare the end of the run with its beginning.

    The reward of the first step was sampled before any update; it is compared with the mean of the
    last three steps. Accuracy is that of the first and the last evaluation.
    """
    rewards = run.series("reward/mean").values
    accuracy = run.series("eval/accuracy").values
    if len(rewards) < 2 or len(accuracy) < 2:
        return Verdict(
            False,
            f"{len(rewards)} steps and {len(accuracy)} evaluations are too few to compare; "
            "raise --seconds, or run it while the machine is less busy",
        )
    late = rewards[1:][-3:]
    end = sum(late) / len(late)
    rises = (
        ("held-out accuracy", accuracy[0], accuracy[-1], ACCURACY_MARGIN),
        (f"mean reward (first step, last {len(late)})", rewards[0], end, REWARD_MARGIN),
    )
    passed = any(after - before >= margin - 1e-9 for _, before, after, margin in rises)
    lines = [
        f"{name}: {before:.3f} to {after:.3f}, {after - before:+.3f} (a rise counts from +{margin:.2f})"
        for name, before, after, margin in rises
    ]
    if not passed:
        lines.append("neither rose clearly; the curves show whether it was still rising")
    return Verdict(passed, "\n".join(lines))


def accuracy_lines(run: Run) -> list[str]:
    """Accuracy at every evaluation."""
    questions = run.series("eval/questions").values
    steps, values = run.series("eval/accuracy")
    how = "greedy" if run.config is None or run.config.eval.greedy else "sampled"
    lines = [
        f"{'before training' if step == 0 else f'after step {step}':<18}{value:6.1%}"
        for step, value in zip(steps, values, strict=True)
    ]
    asked = int(questions[0]) if questions else 0
    return [*lines, f"({asked} questions that training never saw, {how} answers)"]


def reward_lines(run: Run, *, width: int = 50, most: int = 20) -> list[str]:
    """One bar per step from 0 to the largest reward; with more than `most` steps, one per several."""
    steps, values = run.series("reward/mean")
    each = -(-len(steps) // most) or 1
    top = max([1e-9, *values])
    lines = []
    for i in range(0, len(steps), each):
        mean = sum(values[i : i + each]) / len(values[i : i + each])
        bar = _block() * round(width * max(mean, 0.0) / top)
        last = steps[min(i + each, len(steps)) - 1]
        label = f"{steps[i]}" if each == 1 else f"{steps[i]}-{last}"
        lines.append(f"{label:>9}  {mean:6.3f}  {bar}")
    return lines


def answer_lines(samples: Sequence[Trajectory], *, most: int = 4) -> list[str]:
    """The same held-out questions at the first and the last evaluation: changed ones first."""
    if not samples:
        return ["no answers were recorded"]
    first, last = samples[0].step, samples[-1].step
    before = {t.uid: t for t in samples if t.step == first}
    pairs = [(before[t.uid], t) for t in samples if t.step == last and t.uid in before]

    def gain(pair: tuple[Trajectory, Trajectory]) -> float:
        return (pair[1].reward or 0.0) - (pair[0].reward or 0.0)

    better = [p for p in pairs if gain(p) > 0]
    worse = [p for p in pairs if gain(p) < 0]
    same = [p for p in pairs if gain(p) == 0]
    # One that got worse is shown too, so that the picture is not better than the figures.
    shown = (better[: most - 1] + worse[:1] + same)[:most]
    lines = [f"{len(better)} answers got better, {len(worse)} worse, {len(same)} are as they were"]
    for old, new in shown:
        lines.append(f"{_printable(old.prompt[-200:])}  (answer {_printable(old.answer)})")
        for when, t in (("before", old), ("after", new)):
            reward = "not scored" if t.reward is None else f"reward {t.reward:.2f}"
            lines.append(f"    {when:<7} {_printable(t.completion[:100])}  ({reward})")
    return lines


def time_lines(run: Run) -> list[str]:
    """Seconds and shares of the parts of all steps."""
    split = time_split(run.metrics)
    total = sum(split.values()) or 1.0
    lines = [f"{part:<22}{s:8.1f} s  {s / total:6.1%}" for part, s in split.items()]
    return [*lines, f"{'all steps':<22}{total:8.1f} s  ({len(run.metrics)} steps)"]


def _printable(text: str) -> str:
    """`text` in quotes on one line, with what is not printable (or not in the terminal) escaped."""
    encoding = sys.stdout.encoding or "ascii"
    return repr(text).encode(encoding, "backslashreplace").decode(encoding)


def _block() -> str:
    """A filled cell, or what comes closest in the terminal's encoding."""
    try:
        "█".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "#"
    return "█"


def _title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def _say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


def _machine(threads: int) -> str:
    return (
        f"{threads or torch.get_num_threads()} threads on {torch.backends.cpu.get_cpu_capability()}"
    )


def _new_folder(wanted: Path) -> Path:
    """`wanted`, or the same with the first number that is free: earlier runs are kept."""
    folder, number = wanted, 1
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


if __name__ == "__main__":
    sys.exit(main())
