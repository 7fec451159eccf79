"""The training loop, top to bottom: collect, score, advantages, mini-batches, loss, step, log.

What is left out on purpose: no distributed launcher, no asynchronous sampling, no reward model server.
PPO and GRPO are two files with one interface (`Algorithm`); everything they share is here.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fastrl.train import checkpoint
from fastrl.train.batch import Batch, MicroBatch, MiniBatch, make_batch, plan_updates
from fastrl.train.collect import collect, evaluate, make_task
from fastrl.train.config import Config
from fastrl.train.diagnose import Watch
from fastrl.train.figures import (
    check_finite,
    rollout_metrics,
    sampler_metrics,
    times,
    with_logprobs,
)
from fastrl.train.grpo import GRPO
from fastrl.train.journal import Journal
from fastrl.train.metrics import StepMetrics, Timer
from fastrl.train.models import load_policy
from fastrl.train.ppo import PPO
from fastrl.train.rollout import TransformersGenerator
from fastrl.train.seeding import set_up
from fastrl.train.warm_start import warm_start

__all__ = ["Algorithm", "Outcome", "train"]


class Algorithm(Protocol):
    """What differs between PPO and GRPO."""

    def parameter_groups(self) -> list[dict[str, Any]]: ...
    def modules(self) -> dict[str, nn.Module]: ...
    def state(self) -> dict[str, float]: ...
    def load_state(self, state: Mapping[str, float]) -> None: ...
    def targets(self, batch: Batch, plan: list[MiniBatch]) -> Any: ...
    def loss(
        self, micro: MicroBatch, mini: MiniBatch, targets: Any, metrics: StepMetrics
    ) -> Tensor: ...
    def finish(self, metrics: dict[str, float]) -> None: ...


class Outcome(NamedTuple):
    """How a call of `train` ended: steps finished in all, and the signal that stopped it, or 0."""

    step: int
    stopped_by: int


def train(config: Config, run_dir: Path, *, resume: bool = False) -> Outcome:
    """Run `config` in the folder `run_dir`, from the newest checkpoint there when `resume`.

    SIGINT and SIGTERM end the run after the step in progress, with a checkpoint. The same
    configuration on the same machine gives the same numbers, whether or not a run was interrupted.

    Raises ValueError when the folder already holds a run and `resume` is not set, or when the
    configuration does not fit; FloatingPointError when the loss is no longer finite.
    """
    _refuse_to_overwrite(run_dir, resume)
    device = set_up(config)
    task = make_task(config)
    policy = load_policy(config.model, seed=config.seed, device=device)
    journal = Journal(run_dir, config)
    # Before the algorithm is made, which may copy the policy as its reference and its critic.
    warm_start(config, task, policy, run_dir, journal, resume=resume)
    timer = Timer()
    algorithms: dict[str, type[GRPO] | type[PPO]] = {"grpo": GRPO, "ppo": PPO}
    algorithm: Algorithm = algorithms[config.algorithm](config, policy, timer)
    generator = TransformersGenerator(policy, config.model, batch_size=config.rollout.batch_size)
    optimizer = _optimizer(config, algorithm)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    max_norm = math.inf if config.optim.max_grad_norm is None else config.optim.max_grad_norm
    start = _resume(run_dir, journal, algorithm, optimizer) if resume else 0
    journal.open(start)

    watch = Watch(config)
    limit = math.inf if config.time_limit is None else config.time_limit
    began = time.perf_counter()

    with journal, _stop_signals(journal) as stopped_by:
        step = saved = evaluated = start
        if start == 0 and config.eval.size:
            journal.evaluation(*evaluate(config, task, policy, generator, step=0))
        while step < config.steps and not stopped_by:
            started = time.perf_counter()
            if started - began >= limit:
                break
            timer.reset()
            metrics = StepMetrics()

            # Collect: several completions of each of this step's questions.
            # Score: every reward of every completion; a completion may stay without one.
            trajectories = collect(config, task, policy, generator, timer, step=step)
            batch = make_batch(trajectories, list(task.weights), list(task.weights.values()))

            # Advantages. The plan of the first epoch is made before, so that the log-probabilities
            # of the rollout come from the very micro-batches that the first update trains on.
            plan = plan_updates(batch, config, step=step, epoch=0, device=device)
            has_tokens = bool(batch.mask.any())
            if has_tokens:
                with timer("forward_backward"):
                    targets = algorithm.targets(batch, plan)

            # Mini-batches: each is one optimiser step, its gradient summed over micro-batches.
            _set_learning_rate(config, optimizer, step)
            for epoch in range(config.optim.epochs if has_tokens else 0):
                if epoch:
                    plan = plan_updates(batch, config, step=step, epoch=epoch, device=device)
                for mini in plan:
                    if not mini.micro_batches:
                        continue
                    with timer("forward_backward"):
                        for micro in mini.micro_batches:
                            algorithm.loss(micro, mini, targets, metrics).backward()
                    with timer("optimizer"):
                        metrics.grad_norm(nn.utils.clip_grad_norm_(trained, max_norm))
                        optimizer.step()
                        optimizer.zero_grad(set_to_none=True)

            # Log. Reading the metrics is the one place where the host waits for the device.
            step += 1
            with timer("forward_backward"):
                figures = metrics.result()
            algorithm.finish(figures)
            figures |= rollout_metrics(config, trajectories, batch)
            if has_tokens:
                figures |= sampler_metrics(batch, targets.old_logp)
            figures["optim/lr"] = optimizer.param_groups[0]["lr"]
            figures |= times(timer, time.perf_counter() - started, trajectories)
            journal.metrics({"step": step, **figures})
            check_finite(figures, step)
            for finding in watch.step({"step": step, **figures}):
                journal.say(f"{finding.name} ({finding.evidence}); try {finding.remedy}")
            if _is_due(step - 1, config.log.samples_every):
                kept = with_logprobs(trajectories, targets if has_tokens else None, batch, config)
                journal.samples(kept)
            if config.eval.size and _is_due(step, config.eval.every):
                journal.evaluation(*evaluate(config, task, policy, generator, step=step))
                evaluated = step
            if _is_due(step, config.checkpoint.every):
                _save(run_dir, journal, config, algorithm, optimizer, step)
                saved = step

        if config.eval.size and evaluated < step and not stopped_by:
            journal.evaluation(*evaluate(config, task, policy, generator, step=step))
        if saved < step and (stopped_by or config.checkpoint.final):
            _save(run_dir, journal, config, algorithm, optimizer, step)
        if stopped_by:
            journal.say(f"stopped after step {step}; --resume continues from here")
        return Outcome(step, stopped_by[0] if stopped_by else 0)


# --- optimiser, checkpoints, signals -----------------------------------------------------------


def _optimizer(config: Config, algorithm: Algorithm) -> torch.optim.AdamW:
    options = config.optim
    groups = [{**group, "base_lr": group["lr"]} for group in algorithm.parameter_groups()]
    return torch.optim.AdamW(
        groups,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=True,
    )


def _set_learning_rate(config: Config, optimizer: torch.optim.Optimizer, step: int) -> None:
    options = config.optim
    factor = min((step + 1) / (options.warmup_steps + 1), 1.0)
    progress = max(step - options.warmup_steps, 0) / max(config.steps - options.warmup_steps, 1)
    if options.decay == "linear":
        factor *= 1 - progress
    elif options.decay == "cosine":
        factor *= (1 + math.cos(math.pi * progress)) / 2
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _save(
    run_dir: Path,
    journal: Journal,
    config: Config,
    algorithm: Algorithm,
    optimizer: torch.optim.Optimizer,
    step: int,
) -> None:
    journal.sync()
    tensors = {
        **{f"{n}.safetensors": checkpoint.weights(m) for n, m in algorithm.modules().items()},
        "optimizer.safetensors": checkpoint.optimizer_tensors(optimizer),
        "rng.safetensors": checkpoint.rng_tensors(),
    }
    state = {"algorithm": algorithm.state()}
    path = checkpoint.save(
        run_dir / "checkpoints", step, tensors, state, keep=config.checkpoint.keep
    )
    journal.say(f"saved {path}")


def _resume(
    run_dir: Path, journal: Journal, algorithm: Algorithm, optimizer: torch.optim.Optimizer
) -> int:
    """The step to continue from, with everything put back as it was after that step."""
    found = checkpoint.load_latest(run_dir / "checkpoints", journal.say)
    if found is None:
        journal.say(f"no checkpoint in {run_dir}; starting at step 0")
        return 0
    for name, module in algorithm.modules().items():
        checkpoint.load_weights(module, found.tensors[f"{name}.safetensors"])
    checkpoint.load_optimizer(optimizer, found.tensors["optimizer.safetensors"])
    checkpoint.restore_rng(found.tensors["rng.safetensors"])
    algorithm.load_state(found.state["algorithm"])
    journal.say(f"resumed from {found.path}")
    return found.step


def _refuse_to_overwrite(run_dir: Path, resume: bool) -> None:
    if not resume and (run_dir / "metrics.jsonl").exists():
        raise ValueError(
            f"train: {run_dir} already holds a run; pass --resume to continue it, or another --run-dir"
        )


@contextmanager
def _stop_signals(journal: Journal) -> Iterator[list[int]]:
    """A list that holds the number of the first SIGINT or SIGTERM; the second SIGINT is not caught."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        journal.say("stopping after this step, with a checkpoint; once more to stop at once")

    # Python lets the main thread alone set handlers.
    is_main = threading.current_thread() is threading.main_thread()
    caught = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    previous = {s: signal.signal(s, note) for s in caught}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
