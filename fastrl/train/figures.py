"""The figures of a step: rewards, groups, lengths, time; and the check that none is broken."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastrl.envs import Trajectory
from fastrl.train.batch import Batch
from fastrl.train.collect import is_correct
from fastrl.train.config import Config
from fastrl.train.metrics import Timer

__all__ = ["check_finite", "rollout_metrics", "times", "with_logprobs"]


def rollout_metrics(
    config: Config, trajectories: Sequence[Trajectory], batch: Batch
) -> dict[str, float]:
    """Figures of what was sampled, and how it was scored."""
    count = max(len(trajectories), 1)
    scored = batch.totals[~batch.totals.isnan()]
    lengths = [_num_sampled(t) for t in trajectories]
    ranges: dict[str, list[float]] = {}
    for t in trajectories:
        ranges.setdefault(t.uid, []).extend([] if t.reward is None else [t.reward])
    same = sum(max(r, default=0.0) == min(r, default=0.0) for r in ranges.values())
    part_names = list(trajectories[0].reward_parts) if trajectories else []
    figures = {
        "reward/mean": float(scored.mean()),
        "reward/std": float(scored.std(correction=0)) if len(scored) else math.nan,
        **{
            f"reward/part/{n}": float(batch.rewards[:, k].nanmean())
            for k, n in enumerate(part_names)
        },
        "reward/correct": sum(is_correct(config, t.reward_parts) for t in trajectories) / count,
        "reward/unscored": 1 - len(scored) / count,
        "group/zero_variance": same / max(len(ranges), 1),
        "completion/length_mean": sum(lengths) / count,
        "completion/length_max": max(lengths, default=0),
        "completion/finished": sum(t.finished for t in trajectories) / count,
    }
    if config.env.source is not None:
        figures |= {
            "episode/turns_mean": sum(len(t.turns) for t in trajectories) / count,
            "episode/truncated": sum(t.status == "truncated" for t in trajectories) / count,
            "episode/failed": sum(t.status == "failed" for t in trajectories) / count,
        }
    return figures


def _num_sampled(trajectory: Trajectory) -> int:
    """Tokens that the model wrote."""
    if not trajectory.turns:
        return len(trajectory.completion_ids)
    return sum(turn.end - turn.start for turn in trajectory.turns)


def times(timer: Timer, total: float, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Where the seconds of a step went."""
    names = ("sample", "score", "forward_backward", "optimizer", "fastrl")
    parts = {f"time/{name}": timer.seconds[name] for name in names}
    return {
        **parts,
        "time/other": total - sum(parts.values()),
        "time/step": total,
        "throughput/tokens_per_second": sum(map(_num_sampled, trajectories)) / total,
    }


def with_logprobs(
    trajectories: Sequence[Trajectory], targets: Any, batch: Batch, config: Config
) -> list[Trajectory]:
    """The first completions of a step as they are recorded, with the log-probabilities trained on."""
    kept = []
    for row, trajectory in enumerate(trajectories[: config.log.samples]):
        if targets is not None and batch.mask[row].any():
            logprobs = targets.old_logp[row, : len(trajectory.completion_ids)].tolist()
            trajectory = dataclasses.replace(trajectory, logprobs=tuple(logprobs))
        kept.append(trajectory)
    return kept


def check_finite(figures: Mapping[str, float], step: int) -> None:
    """Raise FloatingPointError when the step went wrong."""
    norm, bad = figures.get("optim/grad_norm", 0.0), figures.get("policy/nonfinite", 0.0)
    if not math.isfinite(norm) or bad:
        raise FloatingPointError(
            f"train: step {step} had {int(bad)} tokens with non-finite inputs of the loss and gradient "
            f"norm {norm}; resume from the last checkpoint with a lower optim.lr"
        )
