"""The figures of a step: rewards, groups, lengths, time; and the check that none is broken."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fastrl.envs import Trajectory
from fastrl.train.batch import Batch
from fastrl.train.collect import is_correct
from fastrl.train.config import Config
from fastrl.train.correction import correct, ratios
from fastrl.train.metrics import Timer

__all__ = ["check_finite", "rollout_metrics", "sampler_metrics", "times", "with_logprobs"]


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
        "reward/failed": sum(bool(t.error) and t.status != "failed" for t in trajectories) / count,
        "group/zero_variance": same / max(len(ranges), 1),
        "completion/length_mean": sum(lengths) / count,
        "completion/length_max": max(lengths, default=0),
        "completion/finished": sum(t.finished for t in trajectories) / count,
    }
    figures |= _group_figures(trajectories)
    if config.env.source is not None:
        figures |= {
            "episode/turns_mean": sum(len(t.turns) for t in trajectories) / count,
            "episode/truncated": sum(t.status == "truncated" for t in trajectories) / count,
            "episode/failed": sum(t.status == "failed" for t in trajectories) / count,
        }
    return figures


def _group_figures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What tells healthy groups from sick ones; see diagnose.py."""
    groups: dict[str, list[Trajectory]] = {}
    for t in trajectories:
        groups.setdefault(t.uid, []).append(t)
    rewards = [[t.reward for t in g if t.reward is not None] for g in groups.values()]
    deviations = [statistics.stdev(r) for r in rewards if len(set(r)) > 1]
    # The same completion to several questions: the share of all reward that one text earns.
    earned: dict[str, float] = {}
    asked: dict[str, set[tuple[int, ...]]] = {}
    for t in trajectories:
        earned[t.completion] = earned.get(t.completion, 0.0) + max(t.reward or 0.0, 0.0)
        asked.setdefault(t.completion, set()).add(t.prompt_ids)
    total = sum(earned.values())
    shared = [v for text, v in earned.items() if len(asked[text]) > 1]
    return {
        "group/size_mean": sum(map(len, rewards)) / max(len(groups), 1),
        "group/std_min": min(deviations, default=math.nan),
        "group/mixed": sum(
            len({t.prompt_ids for t in g if t.prompt_ids}) > 1 for g in groups.values()
        )
        / max(len(groups), 1),
        "reward/trivial": max(shared, default=0.0) / total if total > 0 else math.nan,
    }


def sampler_metrics(config: Config, batch: Batch, old_logp: Tensor) -> dict[str, float]:
    """How far the sampler's log-probabilities of the trained tokens are from the trainer's."""
    if batch.sampled_logp is None or not batch.mask.any():
        return {}
    gap = (old_logp.cpu().float() - batch.sampled_logp)[batch.mask].abs()
    found = ratios(batch, old_logp)
    figures = {
        "sampler/logp_gap": float(gap.mean()),
        "sampler/kl_k1": float(found.metrics["kl"]),
        "sampler/kl_k3": float(found.metrics["k3_kl"]),
        "sampler/ess": float(found.metrics["ess"]),
        "sampler/ratio_max": float(found.metrics["max"]),
    }
    corrected = correct(config, batch, old_logp)
    if corrected is not None:
        beyond = corrected.metrics["fraction_high"] + corrected.metrics["fraction_low"]
        figures |= {
            "correction/weight_mean": float(corrected.metrics["mean"]),
            "correction/weight_max": float(corrected.metrics["max"]),
            "correction/ess": float(corrected.metrics["ess"]),
            "correction/truncated": float(beyond),
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
        # Those of old weights are not what was sampled from, so the sampler's own stay.
        if targets is not None and trajectory.policy_step is None and batch.mask[row].any():
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
