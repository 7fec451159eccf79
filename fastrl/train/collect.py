"""From questions to scored completions: the data of a training step, and evaluation.

Held-out questions go through the same prompt, sampler and rewards as those trained on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastrl.envs import EnvTask, Question, Task, Trajectory, load_env_task, load_task
from fastrl.train import checkpoint
from fastrl.train.config import Config
from fastrl.train.episodes import play
from fastrl.train.journal import Journal
from fastrl.train.metrics import Timer
from fastrl.train.models import Policy, load_policy
from fastrl.train.rollout import Generator, TransformersGenerator, older_step
from fastrl.train.scoring import score
from fastrl.train.seeding import derived_seed, set_up
from fastrl.train.sharding import gathered
from fastrl.train.world import ALONE, World

__all__ = ["Evaluation", "collect", "evaluate", "evaluate_run", "is_correct", "make_task"]


class Evaluation(NamedTuple):
    """Figures of one evaluation, and its completions."""

    figures: dict[str, float]
    trajectories: list[Trajectory]


def collect(
    config: Config,
    task: Task | EnvTask,
    policy: Policy,
    generator: Generator,
    timer: Timer,
    *,
    step: int,
    world: World = ALONE,
) -> list[Trajectory]:
    """Completions of the questions of `step`, scored; those of one prompt stand side by side.

    Each rank samples and scores its share of the questions; all get all trajectories.

    With filter.groups, groups whose rewards are all equal are left out, and further questions are asked
    until there are rollout.prompts groups or filter.max_rounds is reached. Each round asks the same
    number of questions, so where a step begins in the stream of questions does not depend on luck.
    """
    rollout, rounds = config.rollout, config.filter.max_rounds if config.filter.groups else 1
    kept: list[Trajectory] = []
    for number in range(rounds):
        asked = task.batch((step * rounds + number) * rollout.prompts, rollout.prompts)
        found = _answers(
            config,
            task,
            policy,
            generator,
            timer,
            [(str(position), question) for position, question in asked],
            samples=rollout.samples,
            temperature=rollout.temperature,
            seed=derived_seed(config.seed, "sample", step, *([number] if number else [])),
            step=step + 1,
            world=world,
        )
        kept += found if not config.filter.groups else _with_variance(found)
        if len({t.uid for t in kept}) >= rollout.prompts:
            break
    wanted = list(dict.fromkeys(t.uid for t in kept))[: rollout.prompts]
    return [t for t in kept if t.uid in set(wanted)]


def _with_variance(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Those whose group has two different rewards."""
    rewards: dict[str, set[float]] = {}
    for t in trajectories:
        rewards.setdefault(t.uid, set()).update([] if t.reward is None else [t.reward])
    return [t for t in trajectories if len(rewards[t.uid]) > 1]


def evaluate(
    config: Config,
    task: Task | EnvTask,
    policy: Policy,
    generator: Generator,
    *,
    step: int,
    world: World = ALONE,
) -> Evaluation:
    """Accuracy and mean reward on the held-out questions, one completion each."""
    timer = Timer()
    started = time.perf_counter()
    trajectories = _answers(
        config,
        task,
        policy,
        generator,
        timer,
        [(f"held_out/{i}", question) for i, question in enumerate(task.held_out)],
        samples=1,
        temperature=0.0 if config.eval.greedy else config.rollout.temperature,
        # The same draws each time, so that two evaluations differ by the model alone.
        seed=derived_seed(config.seed, "eval"),
        step=step,
        world=world,
    )
    count = max(len(trajectories), 1)
    totals = [t.reward for t in trajectories if t.reward is not None]
    figures = {
        "step": step,
        "accuracy": sum(is_correct(config, t.reward_parts) for t in trajectories) / count,
        "reward": sum(totals) / len(totals) if totals else math.nan,
        "questions": count,
        "length": sum(sum(t.mask) for t in trajectories) / count,
        "seconds": time.perf_counter() - started,
    }
    return Evaluation(figures, trajectories)


def _answers(
    config: Config,
    task: Task | EnvTask,
    policy: Policy,
    generator: Generator,
    timer: Timer,
    questions: Sequence[tuple[str, Any]],
    *,
    samples: int,
    temperature: float,
    seed: int,
    step: int,
    world: World,
) -> list[Trajectory]:
    """Scored completions of `questions`, which are pairs of uid and question, or task of an environment."""
    # A question draws by its place among all of them, whichever rank asks it.
    asked = world.share([(uid, place, q) for place, (uid, q) in enumerate(questions)])
    options: dict[str, Any] = {"samples": samples, "temperature": temperature, "seed": seed}
    with gathered(policy):
        own = _own_answers(config, task, policy, generator, timer, asked, step=step, **options)
    if world.size == 1:
        return own
    place = {uid: i for i, (uid, _) in enumerate(questions)}
    lines = (line for rank in world.gather([t.to_json() for t in own]) for line in rank)
    return sorted(map(Trajectory.from_json, lines), key=lambda t: place[t.uid])


def _own_answers(
    config: Config,
    task: Task | EnvTask,
    policy: Policy,
    generator: Generator,
    timer: Timer,
    asked: Sequence[tuple[str, int, Any]],
    *,
    samples: int,
    temperature: float,
    seed: int,
    step: int,
) -> list[Trajectory]:
    """Scored completions of `asked`, which holds uid, place, and question or task."""
    if isinstance(task, EnvTask):
        return play(
            config,
            task,
            policy,
            generator,
            timer,
            asked,
            samples=samples,
            temperature=temperature,
            seed=seed,
            step=step,
        )
    texts = [_prompt(config, policy, question) for _, _, question in asked]
    ids = [policy.encode(text) for text in texts]
    with timer("sample"):
        groups = generator.generate(
            ids,
            samples=samples,
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=temperature,
            seed=seed,
            places=[place for _, place, _ in asked],
        )
    answered = [
        (uid, question, text, prompt, completion)
        for (uid, _, question), text, prompt, group in zip(asked, texts, ids, groups, strict=True)
        for completion in group
    ]
    decoded = [policy.decode(c.token_ids) for *_, c in answered]
    with timer("score"):
        scores = score(
            config.task, task, [(a[1], t) for a, t in zip(answered, decoded, strict=True)]
        )
    return [
        Trajectory(
            uid=uid,
            prompt=text,
            completion=completion,
            answer=question.answer,
            question=question.text,
            prompt_ids=tuple(prompt),
            completion_ids=tuple(tokens),
            mask=(1,) * len(tokens),
            logprobs=tuple(logprobs or ()),
            reward=task.total(parts),
            reward_parts=parts,
            finished=finished,
            step=step,
            policy_step=older_step(version, step),
            error=error,
        )
        for (uid, question, text, prompt, (tokens, finished, logprobs, version)), completion, (
            parts,
            error,
        ) in zip(answered, decoded, scores, strict=True)
    ]


def evaluate_run(config: Config, run_dir: Path | None) -> Evaluation:
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
        checkpoint.load_weights(policy.model, found.file("policy.safetensors"))
        step = found.step
    generator = TransformersGenerator(policy, config.model, batch_size=config.rollout.batch_size)
    return evaluate(config, make_task(config), policy, generator, step=step)


def make_task(config: Config) -> Task | EnvTask:
    """The questions and rewards, or the environment, that `config` names."""
    if config.env.source is not None:
        return load_env_task(
            config.env.source,
            params=config.env.params,
            weights=config.env.weights,
            size=config.task.size,
            held_out=config.eval.size,
            seed=config.seed,
        )
    return load_task(
        config.task.source,
        params=config.task.params,
        rewards=[(r.function, r.name, r.weight) for r in config.task.rewards],
        size=config.task.size,
        held_out=config.eval.size,
        seed=config.seed,
    )


def _prompt(config: Config, policy: Policy, question: Question) -> str:
    task = config.task
    names = {**question.data, "question": question.text}
    try:
        text = task.template.format_map(names)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"task: task.template = {task.template!r} cannot be filled in: {error!r}; it may name "
            f"{', '.join(sorted(names))}"
        ) from error
    return policy.prompt(text, chat=task.chat, system=task.system)


def is_correct(config: Config, parts: Mapping[str, float | None]) -> bool:
    """Whether the first reward reaches eval.correct_at."""
    first = next(iter(parts.values()))
    # A hair of tolerance, so that a share such as 1/3 + 2/3 can reach 1.
    return first is not None and first >= config.eval.correct_at - 1e-9
