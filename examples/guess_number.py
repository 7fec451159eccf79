"""PPO and GRPO learn to guess a number by bisection, side by side, from random weights.

Same model, data, updates and seeds; what differs is who gets the credit. GRPO gives one number to a
whole episode, GRPO with credit by turn compares each turn with the same turn of other episodes, PPO's
critic judges each guess. Writes one figure with mean and range over the seeds, and prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from fastrl.train import config as configs
from fastrl.train.loop import train

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
RUNS = {
    "PPO": ("guess_ppo.toml", []),
    "GRPO, one number per episode": ("guess_grpo.toml", []),
    "GRPO, credit by turn": ("guess_grpo.toml", ['grpo.credit="turn"']),
}
COLOURS = {
    "PPO": "#0072b2",
    "GRPO, one number per episode": "#d55e00",
    "GRPO, credit by turn": "#009e73",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, draw, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--runs", type=Path, default=Path("runs/guess_number"))
    parser.add_argument("--figure", type=Path, default=Path("runs/guess_number/figure.png"))
    options = parser.parse_args(arguments)
    curves = {
        name: [_curve(name, seed, options.steps, options.runs) for seed in options.seeds]
        for name in RUNS
    }
    _table(curves, options.seeds)
    _draw(curves, options.figure)
    print(options.figure)
    return 0


def _curve(name: str, seed: int, steps: int, folder: Path) -> list[float]:
    """Share of episodes solved at each step; a finished run is read again, not repeated."""
    file, extra = RUNS[name]
    run_dir = folder / f"{name.replace(',', '').replace(' ', '_')}_{seed}"
    config = configs.load(
        CONFIGS / file,
        [
            f"seed={seed}",
            f"steps={steps}",
            "eval.size=0",
            "log.samples_every=0",
            "log.progress=false",
            "log.tensorboard=false",
            *extra,
        ],
    )
    metrics = run_dir / "metrics.jsonl"
    if not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        train(config, run_dir, resume=metrics.exists())
    return [json.loads(line)["reward/correct"] for line in metrics.read_text().splitlines()]


def _table(curves: dict[str, list[list[float]]], seeds: Sequence[int]) -> None:
    print(f"{'solved, mean of the last 10 steps':<36}" + "".join(f"  seed {s}" for s in seeds))
    for name, runs in curves.items():
        print(f"{name:<36}" + "".join(f"  {sum(r[-10:]) / len(r[-10:]):6.3f}" for r in runs))


def _draw(curves: dict[str, list[list[float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.2), dpi=120)
    for name, runs in curves.items():
        columns = list(zip(*runs, strict=True))
        steps = range(1, len(columns) + 1)
        axes.plot(steps, [sum(c) / len(c) for c in columns], label=name, color=COLOURS[name])
        low, high = [min(c) for c in columns], [max(c) for c in columns]
        axes.fill_between(steps, low, high, alpha=0.15, color=COLOURS[name], linewidth=0)
    axes.set(xlabel="step (512 episodes each)", ylabel="secrets found", ylim=(0, 1))
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
