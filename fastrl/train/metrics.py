"""Every metric that a run logs, defined once: name, formula, unit; and how they are collected.

Inside the mini-batch loop metrics stay on the device as the small tensors that the ops return;
`StepMetrics.result` reads them all at once when the step ends. Sums over "tokens" are over the
completion tokens trained on, counted once per pass over the rollout.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

import fastrl
from fastrl.train.world import ALONE, World

__all__ = ["METRICS", "Metric", "StepMetrics", "Timer", "check_names"]


class Metric(NamedTuple):
    """One entry of METRICS. A name that ends in "/" stands for a family of names."""

    name: str
    formula: str
    unit: str


METRICS: tuple[Metric, ...] = (
    Metric("step", "rollouts finished", "count"),
    Metric("reward/mean", "mean over scored completions of sum_k weight_k reward_k", "reward"),
    Metric("reward/std", "population standard deviation of the same", "reward"),
    Metric("reward/part/", "mean of one reward over the completions it scored", "reward"),
    Metric("reward/correct", "completions whose first reward >= eval.correct_at / all", "share"),
    Metric("reward/unscored", "completions that no reward scored / all", "share"),
    Metric("reward/failed", "completions of which a reward function failed / all", "share"),
    Metric("group/zero_variance", "prompts whose scored rewards are all equal / prompts", "share"),
    Metric("group/size_mean", "scored completions / prompts", "count"),
    Metric(
        "group/std_min", "smallest standard deviation of a group that has one, ddof 1", "reward"
    ),
    Metric("group/mixed", "groups with several first prompts / groups", "share"),
    Metric(
        "reward/trivial", "reward of the best-earning text given to several prompts / all", "share"
    ),
    Metric(
        "sampler/logp_gap",
        "mean over tokens of |log p of the trainer - log p of the sampler|",
        "nats",
    ),
    Metric("sampler/kl_k1", "mean over tokens of -l, l = log p trainer - log p sampler", "nats"),
    Metric("sampler/kl_k3", "mean over tokens of exp(l) - 1 - l", "nats"),
    Metric("sampler/ess", "(sum of exp(l))^2 / (tokens x sum of exp(2 l))", "share"),
    Metric("sampler/ratio_max", "largest exp(l) of the step", "1"),
    Metric(
        "sampler/staleness", "mean over completions of steps between sampling and training", "steps"
    ),
    Metric("correction/weight_mean", "mean over tokens of the importance weights", "1"),
    Metric("correction/weight_max", "largest importance weight after its bounds", "1"),
    Metric("correction/ess", "(sum of weights)^2 / (tokens x sum of squared weights)", "share"),
    Metric(
        "correction/truncated", "tokens whose weight was beyond correction.low or high", "share"
    ),
    Metric(
        "completion/length_mean", "tokens sampled, tool outputs left out / completions", "tokens"
    ),
    Metric("completion/length_max", "tokens of the longest completion", "tokens"),
    Metric("completion/finished", "completions that ended by themselves / all", "share"),
    Metric("episode/turns_mean", "assistant messages / episodes", "count"),
    Metric("episode/truncated", "episodes cut at a limit of turns or tokens / all", "share"),
    Metric("episode/failed", "episodes whose environment failed / all", "share"),
    Metric("policy/loss", "mean over optimiser steps of the policy loss", "loss"),
    Metric("policy/entropy", "sum of entropy / tokens", "nats"),
    Metric(
        "policy/clip_fraction", "tokens where the clipped term is the larger loss / tokens", "share"
    ),
    Metric(
        "policy/clip_fraction_high", "tokens with A > 0 and ratio > 1 + clip_high / tokens", "share"
    ),
    Metric(
        "policy/clip_fraction_low", "tokens with A < 0 and ratio < 1 - clip_low / tokens", "share"
    ),
    Metric(
        "policy/approx_kl", "sum of (ratio - 1 - log ratio) / tokens, against the rollout", "nats"
    ),
    Metric("policy/ratio_mean", "sum of ratio / tokens", "1"),
    Metric("policy/ratio_min", "smallest ratio of the step", "1"),
    Metric("policy/ratio_max", "largest ratio of the step", "1"),
    Metric("policy/ess", "(sum of ratio)^2 / (tokens x sum of ratio^2)", "share"),
    Metric("policy/nonfinite", "tokens with a NaN or infinite input of the loss", "count"),
    Metric(
        "kl/ref",
        "mean over tokens of the KL estimate to the reference: grpo kl.estimator, ppo k1",
        "nats",
    ),
    Metric("kl/coef", "weight of the KL term in this step", "1"),
    Metric("value/loss", "mean over optimiser steps of the value loss", "loss"),
    Metric("value/mean", "sum of values / tokens", "reward"),
    Metric(
        "value/clip_fraction", "tokens where the clipped term is the larger loss / tokens", "share"
    ),
    Metric("value/explained_variance", "1 - Var(return - value) / Var(return)", "1"),
    Metric(
        "optim/grad_norm", "mean over optimiser steps of the gradient norm before clipping", "1"
    ),
    Metric("optim/lr", "learning rate of the policy", "1"),
    Metric("optim/updates", "optimiser steps", "count"),
    Metric("throughput/tokens_per_second", "tokens sampled / time/step", "tokens/s"),
    Metric("time/sample", "sampling completions, or waiting for them with rollout.overlap", "s"),
    Metric("time/score", "computing rewards", "s"),
    Metric(
        "time/forward_backward", "forward and backward passes, forward of fastrl ops left out", "s"
    ),
    Metric("time/optimizer", "gradient clipping and optimiser steps", "s"),
    Metric(
        "time/fastrl",
        "forward calls of fastrl ops, the fused head among them; backward is in forward_backward",
        "s",
    ),
    Metric("time/other", "time/step less the parts above", "s"),
    Metric(
        "time/background",
        "sampling and scoring of this rollout beside earlier steps (rollout.overlap)",
        "s",
    ),
    Metric("time/step", "the step without evaluation and checkpoints", "s"),
)

_NAMES = {m.name for m in METRICS if not m.name.endswith("/")}
_FAMILIES = tuple(m.name for m in METRICS if m.name.endswith("/"))


def check_names(metrics: Mapping[str, float]) -> None:
    """Raise ValueError when a metric is logged that METRICS does not define."""
    unknown = [name for name in metrics if name not in _NAMES and not name.startswith(_FAMILIES)]
    if unknown:
        raise ValueError(f"metrics: {unknown} are not defined; add them to metrics.METRICS")


class Timer:
    """Seconds by name. Time inside a nested name counts for that name alone, so the parts add up.

    >>> timer = Timer()
    >>> with timer("forward_backward"), timer("fastrl"):
    ...     pass
    >>> sorted(timer.seconds)
    ['fastrl', 'forward_backward']
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._nested = [0.0]

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self._nested.append(0.0)
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.seconds[name] += elapsed - self._nested.pop()
            self._nested[-1] += elapsed

    def reset(self) -> None:
        """Forget all seconds."""
        self.seconds.clear()


class StepMetrics:
    """What the ops report during one step on this rank, kept on the device until `result`."""

    def __init__(self) -> None:
        self._policy: list[Tensor] = []
        self._value: list[Tensor] = []
        self._sums: defaultdict[str, list[Tensor]] = defaultdict(list)

    def policy(self, out: fastrl.PolicyLoss | fastrl.LinearPolicyLoss) -> None:
        """Take the metrics of one micro-batch's policy loss."""
        self._policy.append(out.metrics)
        self._sums["policy/loss"].append(out.loss.detach())

    def value(self, out: fastrl.ValueLoss) -> None:
        """Take the metrics of one micro-batch's value loss."""
        self._value.append(out.metrics)
        self._sums["value/loss"].append(out.loss.detach())

    def grad_norm(self, norm: Tensor) -> None:
        """Take the gradient norm of one optimiser step."""
        self._sums["optim/grad_norm"].append(norm)

    def result(self, world: World = ALONE) -> dict[str, float]:
        """The metrics of the step over all ranks; the one place where the host waits for the device."""
        updates = len(self._sums["optim/grad_norm"])
        sums = {n: float(torch.stack(v).double().sum()) for n, v in self._sums.items() if v}
        # The norm is of the summed gradient, which all ranks have; it is not to be summed once more.
        norm = sums.pop("optim/grad_norm", None)
        rows = [torch.stack(r).tolist() if r else [] for r in (self._policy, self._value)]
        ranks = world.gather([sums, *rows])
        # Micro-batch losses add up to the loss of a mini-batch, so all divide by optimiser steps.
        metrics = {n: sum(r[0][n] for r in ranks) / max(updates, 1) for n in sums}
        if norm is not None:
            metrics["optim/grad_norm"] = norm / updates
        metrics["optim/updates"] = updates
        policy, value = ([row for r in ranks for row in r[i]] for i in (1, 2))
        if policy:
            metrics |= _policy_metrics(torch.tensor(policy, dtype=torch.float64))
        if value:
            metrics |= _value_metrics(torch.tensor(value, dtype=torch.float64))
        return metrics


def _policy_metrics(rows: Tensor) -> dict[str, float]:
    total = dict(zip(fastrl.POLICY_METRICS, rows.sum(0).tolist(), strict=True))
    lowest = dict(zip(fastrl.POLICY_METRICS, rows.amin(0).tolist(), strict=True))
    highest = dict(zip(fastrl.POLICY_METRICS, rows.amax(0).tolist(), strict=True))
    tokens = max(total["tokens"], 1.0)
    squares = tokens * total["ratio_sq_sum"]
    return {
        "policy/entropy": total["entropy"] / tokens,
        "policy/clip_fraction": total["clipped"] / tokens,
        "policy/clip_fraction_high": total["clip_high"] / tokens,
        "policy/clip_fraction_low": total["clip_low"] / tokens,
        "policy/approx_kl": total["approx_kl3"] / tokens,
        "policy/ratio_mean": total["ratio_sum"] / tokens,
        "policy/ratio_min": lowest["ratio_min"],
        "policy/ratio_max": highest["ratio_max"],
        "policy/ess": total["ratio_sum"] ** 2 / squares if squares else math.nan,
        "policy/nonfinite": total["nonfinite"],
        "kl/ref": total["ref_kl"] / tokens,
    }


def _value_metrics(rows: Tensor) -> dict[str, float]:
    total = dict(zip(fastrl.VALUE_METRICS, rows.sum(0).tolist(), strict=True))
    tokens = max(total["tokens"], 1.0)

    def variance(name: str) -> float:
        mean = total[f"{name}_sum"] / tokens
        return total[f"{name}_sq_sum"] / tokens - mean * mean

    spread = variance("return")
    return {
        "value/mean": total["value_sum"] / tokens,
        "value/clip_fraction": total["clipped"] / tokens,
        "value/explained_variance": 1 - variance("error") / spread if spread > 1e-12 else math.nan,
    }
