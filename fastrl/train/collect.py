"""From questions to scored completions: the data of a training step, and evaluation.

Held-out questions go through the same prompt, sampler and rewards as those trained on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

from fastrl.envs import Task, Trajectory, load_task
from fastrl.train import checkpoint
from fastrl.train.config import Config
from fastrl.train.journal import Journal
from fastrl.train.metrics import Timer
from fastrl.train.models import Policy, load_policy
from fastrl.train.rollout import Generator, TransformersGenerator
from fastrl.train.seeding import derived_seed, set_up

__all__ = ["collect", "evaluate", "evaluate_run", "is_correct", "make_task"]


def collect(
    config: Config, task: Task, policy: Policy, generator: Generator, timer: Timer, *, step: int
) -> list[Trajectory]:
    """Completions of the questions of `step`, scored; those of one prompt stand side by side."""
    rollout = config.rollout
    questions = task.batch(step * rollout.prompts, rollout.prompts)
    texts = [_prompt(config, policy, question.text) for _, question in questions]
    ids = [policy.encode(text) for text in texts]
    with timer("sample"):
        groups = generator.generate(
            ids,
            samples=rollout.samples,
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            seed=derived_seed(config.seed, "sample", step),
        )
    trajectories = []
    with timer("score"):
        for (position, question), text, prompt, group in zip(
            questions, texts, ids, groups, strict=True
        ):
            for tokens, finished in group:
                completion = policy.decode(tokens)
                parts = task.score(question, completion)
                trajectories.append(
                    Trajectory(
                        uid=str(position),
                        prompt=text,
                        completion=completion,
                        answer=question.answer,
                        question=question.text,
                        prompt_ids=tuple(prompt),
                        completion_ids=tuple(tokens),
                        mask=(1,) * len(tokens),
                        reward=task.total(parts),
                        reward_parts=parts,
                        finished=finished,
                        step=step + 1,
                    )
                )
    return trajectories


def evaluate(
    config: Config, task: Task, policy: Policy, generator: Generator, *, step: int
) -> dict[str, float]:
    """Accuracy and mean reward on the held-out questions, one completion each."""
    started = time.perf_counter()
    prompts = [policy.encode(_prompt(config, policy, q.text)) for q in task.held_out]
    completions = generator.generate(
        prompts,
        samples=1,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=0.0 if config.eval.greedy else config.rollout.temperature,
        seed=derived_seed(config.seed, "eval"),
    )
    pairs = zip(task.held_out, completions, strict=True)
    parts = [task.score(question, policy.decode(c.token_ids)) for question, (c,) in pairs]
    totals = [t for t in map(task.total, parts) if t is not None]
    return {
        "step": step,
        "accuracy": sum(is_correct(config, p) for p in parts) / len(parts),
        "reward": sum(totals) / len(totals) if totals else math.nan,
        "questions": len(parts),
        "length": sum(len(c.token_ids) for (c,) in completions) / len(completions),
        "seconds": time.perf_counter() - started,
    }


def evaluate_run(config: Config, run_dir: Path | None) -> dict[str, float]:
    """Evaluate the newest checkpoint in `run_dir`, or the untrained model without one."""
    policy = load_policy(config.model, seed=config.seed, device=set_up(config))
    step = 0
    if run_dir is not None:
        journal = Journal(run_dir, config)
        found = checkpoint.load_latest(run_dir / "checkpoints", journal.say)
        if found is None:
            raise ValueError(
                f"eval: {run_dir} has no checkpoint; train it, or name its config.toml"
            )
        checkpoint.load_weights(policy.model, found.tensors["policy.safetensors"])
        step = found.step
    generator = TransformersGenerator(policy, config.model, batch_size=config.rollout.batch_size)
    return evaluate(config, make_task(config), policy, generator, step=step)


def make_task(config: Config) -> Task:
    """The questions and rewards that `config` names."""
    return load_task(
        config.task.source,
        params=config.task.params,
        rewards=[(r.function, r.name, r.weight) for r in config.task.rewards],
        size=config.task.size,
        held_out=config.eval.size,
        seed=config.seed,
    )


def _prompt(config: Config, policy: Policy, question: str) -> str:
    task = config.task
    return policy.prompt(question, template=task.template, chat=task.chat, system=task.system)


def is_correct(config: Config, parts: Mapping[str, float | None]) -> bool:
    """Whether the first reward reaches eval.correct_at."""
    first = next(iter(parts.values()))
    # A hair of tolerance, so that a share such as 1/3 + 2/3 can reach 1.
    return first is not None and first >= config.eval.correct_at - 1e-9
