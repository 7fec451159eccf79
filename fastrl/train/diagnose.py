"""Names the classic failures of a run from its metrics: evidence, meaning, and what to try.

`diagnose` reads the records of a run, finished or not. `fastrl doctor RUN_DIR` prints all findings;
while training, each kind is said once, at the step that shows it. The thresholds are rules of thumb.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastrl.train.config import Config
from fastrl.train.report_data import read_run

__all__ = ["Finding", "Watch", "diagnose", "doctor", "text_of"]

_WINDOW = 5
"""Steps over which a metric is averaged, so that one unlucky step is no finding."""


_OF_ONE_STEP = ("group/std_min", "group/mixed", "reward/failed", "episode/failed")
"""Metrics of which one step is enough."""


class Finding(NamedTuple):
    """One failure."""

    name: str
    evidence: str
    """Metric, step and value."""
    meaning: str
    remedy: str


class _Rule(NamedTuple):
    name: str
    metric: str
    shows: Callable[[list[float], Config], bool]
    """Whether the values of the metric so far show it; the last `_WINDOW` of them count as now."""
    meaning: str
    remedy: str


def _now(values: Sequence[float]) -> float:
    recent = values[-_WINDOW:]
    return sum(recent) / len(recent)


def _long(values: Sequence[float]) -> bool:
    return len(values) >= _WINDOW


def _on_policy(config: Config) -> bool:
    """Whether every update trains on what the current weights sampled."""
    return config.optim.mini_batches == config.optim.epochs == 1


_RULES: tuple[_Rule, ...] = (
    _Rule(
        "groups without variance",
        "group/zero_variance",
        lambda v, c: c.algorithm == "grpo" and _long(v) and _now(v) > 0.5,
        "most groups have equal rewards, so their advantages are 0 and they teach nothing",
        "easier or harder questions; partial rewards (fastrl.envs.partial_credit); more samples a prompt; "
        "filter.groups = true, which samples on until groups have variance (DAPO); ppo, whose critic "
        "learns from every episode",
    ),
    _Rule(
        "groups mix tasks",
        "group/mixed",
        lambda v, c: c.algorithm == "grpo" and v[-1] > 0,
        "episodes of one group had different first prompts, so they are compared with other tasks",
        "make reset deterministic in the task, and give every task its own uid",
    ),
    _Rule(
        "groups too small",
        "group/size_mean",
        lambda v, c: c.algorithm == "grpo" and _now(v) < 4,
        "the mean of a group this small is noise: half of each advantage comes from the baseline",
        "rollout.samples of 8 or more; fewer prompts instead; grpo.baseline = 'leave_one_out'",
    ),
    _Rule(
        "tiny standard deviations are amplified",
        "group/std_min",
        lambda v, c: c.algorithm == "grpo" and c.grpo.scale == "std" and 0 < v[-1] < 0.02,
        "a group whose rewards hardly differ gets advantages as large as one with a clear winner",
        "grpo.scale = 'none' (Dr. GRPO) or 'batch_std'; drop reward parts that only add noise",
    ),
    _Rule(
        "long answers smear the credit",
        "completion/length_mean",
        lambda v, c: c.algorithm == "grpo" and c.grpo.credit == "outcome" and _long(v) and _now(v) > 512,
        "one number per episode is spread over hundreds of tokens, most of which did not matter",
        "ppo, or grpo.credit = 'turn' or 'process' with rewards at each turn",
    ),
    _Rule(
        "most completions are cut",
        "completion/finished",
        lambda v, c: _long(v) and _now(v) < 0.2 and c.rollout.max_new_tokens > 1 and c.model.source != "tiny",
        "the model rarely ends by itself within the limit, so rewards judge half a text",
        "raise rollout.max_new_tokens (env.max_turns), or env.truncated = 'mask'",
    ),
    _Rule(
        "entropy has collapsed",
        "policy/entropy",
        lambda v, c: len(v) > _WINDOW and _now(v) < 0.02 * max(v[:_WINDOW]),
        "the policy has become deterministic and explores no more",
        "loss.entropy_coef, a larger loss.clip_high (0.28), a lower learning rate; if reward is high, "
        "the task is simply solved",
    ),
    _Rule(
        "far from the reference",
        "kl/ref",
        lambda v, c: _long(v) and _now(v) > 1.0,
        "the policy has moved far from where it started; rewards may have been found that nobody meant",
        "read samples.jsonl; raise kl.coef; for ppo set kl.target",
    ),
    _Rule(
        "on-policy ratio is not 1",
        "policy/ratio_max",
        lambda v, c: _on_policy(c) and v[-1] > 1.001,
        "the first and only update must have a ratio of exactly 1: two forward passes disagree",
        "no dropout, the same precision everywhere, the same micro-batches",
    ),
    _Rule(
        "the sampler disagrees with the trainer",
        "sampler/logp_gap",
        lambda v, c: c.correction.kind == "none" and _now(v) > 0.05,
        "sampled tokens had other log-probabilities in the engine than in training, so the data is off policy",
        'one precision for both, or correction.kind = "tis" (truncated importance sampling)',
    ),
    _Rule(
        "updates are too large",
        "policy/clip_fraction",
        lambda v, c: _long(v) and _now(v) > 0.3,
        "a third of the tokens is clipped: the policy leaves the region where its data is valid",
        "a lower optim.lr, fewer epochs or mini-batches",
    ),
    _Rule(
        "one answer satisfies the rewards",
        "reward/trivial",
        lambda v, c: _long(v) and _now(v) > 0.5,
        "one and the same completion earns most of the reward, whatever was asked",
        "a reward that depends on the question; fewer repeated answers; read samples.jsonl",
    ),
    _Rule(
        "the critic explains nothing",
        "value/explained_variance",
        lambda v, c: c.algorithm == "ppo" and len(v) >= 30 and _now(v) < 0.0,
        "the critic predicts returns worse than their mean, so advantages carry its noise",
        "ppo.critic_lr, ppo.warmup_steps, ppo.critic = 'separate'; or grpo, which has none",
    ),
    _Rule(
        "nothing is learnt",
        "reward/mean",
        lambda v, c: len(v) >= 40 and _now(v) <= sum(v[:_WINDOW]) / _WINDOW + 0.01 * (max(v) - min(v) + 1e-9),
        "the reward is where it was at the start",
        "look at the findings above first; then easier questions, partial rewards, a higher optim.lr",
    ),
    _Rule(
        "rewards fail",
        "reward/failed",
        lambda v, c: v[-1] > 0,
        "a reward function raised, took too long or returned no number; it scored nothing there",
        "read the error of such completions in samples.jsonl; task.failed_reward = 'raise' stops at the first",
    ),
    _Rule(
        "environments fail",
        "episode/failed",
        lambda v, c: v[-1] > 0.05,
        "environments raise or hang, and their episodes are lost",
        "read the error of such episodes in samples.jsonl; env.failed = 'raise' stops at the first",
    ),
)  # fmt: skip


def diagnose(records: Sequence[Mapping[str, Any]], config: Config) -> list[Finding]:
    """What the metrics of the steps in `records` show, as of the last one.

    >>> records = [{"step": i, "group/zero_variance": 1.0} for i in range(1, 7)]
    >>> diagnose(records, Config())[0].evidence
    'group/zero_variance at step 6: 1 (mean of 5 steps)'
    """
    findings = []
    for rule in _RULES:
        points = [(r["step"], r[rule.metric]) for r in records if _is_number(r.get(rule.metric))]
        values = [float(v) for _, v in points]
        if values and rule.shows(values, config):
            count = min(len(values), _WINDOW)
            about = f" (mean of {count} steps)" if count > 1 else ""
            last = values[-1] if rule.metric in _OF_ONE_STEP else _now(values)
            about = "" if last is values[-1] else about
            evidence = f"{rule.metric} at step {int(points[-1][0])}: {last:.4g}{about}"
            findings.append(Finding(rule.name, evidence, rule.meaning, rule.remedy))
    return findings


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


class Watch:
    """Says each kind of finding once while a run goes on."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._records: list[Mapping[str, Any]] = []
        self._said: set[str] = set()

    def step(self, figures: Mapping[str, Any]) -> list[Finding]:
        """Findings that the figures of this step show for the first time."""
        self._records.append(figures)
        new = [f for f in diagnose(self._records, self._config) if f.name not in self._said]
        self._said.update(finding.name for finding in new)
        return new


def doctor(run_dir: Path) -> list[Finding]:
    """Findings of the run in the folder `run_dir`. Raises ValueError when there is none to read."""
    run = read_run(run_dir)
    if run.config is None:
        raise ValueError(f"doctor: {run_dir}/config.toml cannot be read: {'; '.join(run.notes)}")
    return diagnose(run.metrics, run.config)


def text_of(findings: Sequence[Finding]) -> str:
    """The findings for people to read."""
    if not findings:
        return "nothing found: none of the classic failures shows in the metrics"
    return "\n".join(
        f"- {f.name}\n    evidence: {f.evidence}\n    meaning:  {f.meaning}\n    try:      {f.remedy}"
        for f in findings
    )
