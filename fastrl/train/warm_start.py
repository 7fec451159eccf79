"""Supervised warm start: the policy imitates demonstrations before the first step of reinforcement learning.

For what sampling does not find by chance, such as the form of a tool call. A demonstration is played like
any other episode; only the sampler is replaced by one that reads from the script of `Env.demonstrate`. So
its tokens come from the same chat rendering and the same concatenation, and only the assistant's are
trained on. The loss is their mean negative log-likelihood at the temperature of sampling.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from fastrl.envs import EnvTask, Message, Task, Trajectory
from fastrl.train import checkpoint
from fastrl.train.batch import make_batch, plan_updates
from fastrl.train.collect import is_correct
from fastrl.train.config import Config
from fastrl.train.episodes import play
from fastrl.train.forward import policy_outputs
from fastrl.train.journal import Journal
from fastrl.train.metrics import Timer
from fastrl.train.models import Policy
from fastrl.train.rollout import Completion
from fastrl.train.seeding import derived_seed
from fastrl.train.storage import replace_file
from fastrl.train.world import ALONE, World

__all__ = ["demonstrations", "warm_start"]

_FOLDER = "warm_start"


def warm_start(
    config: Config,
    task: Task | EnvTask,
    policy: Policy,
    run_dir: Path,
    journal: Journal,
    world: World = ALONE,
    *,
    resume: bool,
) -> None:
    """Train `policy` in place as [warm_start] says; nothing when its steps are 0.

    The result is kept in RUN_DIR/warm_start. A resumed run takes it from there and does not train again,
    because a reference model must be the one that the run began with. It is short, so of several
    processes each does all of it, and the first one's result counts. Writes RUN_DIR/warm_start.jsonl:
    per step the loss in nats per token, and the share of demonstrations that are right.

    Deterministic by seed. Raises ValueError when there is no environment with `demonstrate`, or when a
    demonstration does not fit the episode.
    """
    options = config.warm_start
    if not options.steps:
        return
    folder = run_dir / _FOLDER
    found = checkpoint.load_latest(folder, journal.say) if resume else None
    if found is not None:
        checkpoint.load_weights(policy.model, found.file("policy.safetensors"))
        return
    # Environments may draw from the generators, and the steps after a resumed start must not know.
    random_state = checkpoint.rng_tensors()
    trained = policy.trained()
    optimizer = torch.optim.AdamW(
        trained, lr=options.lr, betas=config.optim.betas, weight_decay=0.0, fused=True
    )
    max_norm = math.inf if config.optim.max_grad_norm is None else config.optim.max_grad_norm
    timer = Timer()
    records = []
    for step in range(options.steps):
        shown = demonstrations(config, task, policy, step=step)
        batch = make_batch(shown, [], [])
        plan = plan_updates(batch, config, step=step, epoch=0, device=policy.device)
        num_tokens = int(batch.mask.sum())
        total = 0.0
        for micro in (m for mini in plan for m in mini.micro_batches):
            loss = -policy_outputs(policy, micro, config, timer).logp.sum() / num_tokens
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(trained, max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        correct = sum(is_correct(config, t.reward_parts) for t in shown) / len(shown)
        records.append({"step": step + 1, "loss": total, "correct": correct})
        if (step + 1) % max(options.steps // 10, 1) == 0:
            journal.say(f"warm start {step + 1}/{options.steps}  loss {total:.3f} nats per token")
    checkpoint.restore_rng(random_state)
    if not world.is_first:
        return
    tensors = {"policy.safetensors": checkpoint.weights(policy.model)}
    checkpoint.save(folder, 0, tensors, {}, keep=1)
    lines = "".join(json.dumps(r) + "\n" for r in records)
    replace_file(run_dir / "warm_start.jsonl", lines.encode())


def demonstrations(
    config: Config, task: Task | EnvTask, policy: Policy, *, step: int
) -> list[Trajectory]:
    """The demonstrations of warm-start step `step`, as episodes whose assistant tokens are trained on."""
    if not isinstance(task, EnvTask) or not hasattr(task.make(), "demonstrate"):
        raise ValueError(
            f"warm_start: warm_start.steps = {config.warm_start.steps} needs an environment with "
            f"`demonstrate`, got env.source = {config.env.source!r}; set warm_start.steps = 0"
        )
    size = config.warm_start.batch
    asked = task.batch(step * size, size)
    seed = derived_seed(config.seed, "demonstrate", step)
    scripts = [
        task.make().demonstrate(entry, random.Random(f"{seed}/{place}"))  # type: ignore[attr-defined]
        for place, (_, entry) in enumerate(asked)
    ]
    episodes = play(
        config,
        task,
        policy,
        _Script(policy, scripts),
        Timer(),
        [(str(position), place, entry) for place, (position, entry) in enumerate(asked)],
        samples=1,
        temperature=1.0,
        seed=seed,
        step=step + 1,
    )
    for t in episodes:
        if t.status != "finished":
            raise ValueError(
                f"warm_start: a demonstration must end by itself, got one that {t.status} "
                f"({t.error or 'limits: env.max_turns, env.max_tokens'}) on the prompt {t.prompt!r}"
            )
    # Imitated whatever it scored, or whether anything scored it.
    return [dataclasses.replace(t, reward=0.0) for t in episodes]


class _Script:
    """A `Generator` that says what the demonstrations say: message k of script i at turn k in place i."""

    def __init__(self, policy: Policy, scripts: Sequence[Sequence[Message]]) -> None:
        self._policy = policy
        self._scripts = [iter(script) for script in scripts]
        ends, usual = policy.eos_ids, policy.tokenizer.eos_token_id
        self._end = usual if usual in ends else ends[0]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        places: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """The next message of each place, with the end of its turn."""
        return [
            [self._say(place, max_new_tokens)]
            for place in (range(len(prompts)) if places is None else places)
        ]

    def _say(self, place: int, max_new_tokens: int) -> Completion:
        message = next(self._scripts[place], None)
        if message is None:
            raise ValueError(
                "warm_start: the messages of a demonstration must last until the environment ends the "
                f"episode, got too few in place {place}; see Env.demonstrate"
            )
        ids = [*self._policy.encode(message["content"]), self._end]
        if len(ids) > max_new_tokens:
            raise ValueError(
                f"warm_start: a demonstrated message must have at most rollout.max_new_tokens = "
                f"{max_new_tokens} tokens with its end of turn, got {len(ids)}: {message['content']!r:.80}"
            )
        return Completion(ids, True)
