"""The training loop, top to bottom: collect, score, advantages, mini-batches, loss, step, log.

What is left out on purpose: no distributed launcher, no reward model server. What is sampled comes step
by step from engines.py or rollout.py, or from overlap.py, which runs ahead. PPO and GRPO are two files with
one interface (`Algorithm`); everything they share is here. Several processes run this very loop on one
batch; what they share out and sum is in world.py and sharding.py.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

import safetensors.torch as safetensors
import torch
from torch import Tensor, nn

from fastrl.train import checkpoint, sharding
from fastrl.train.batch import Batch, MicroBatch, MiniBatch, make_batch, plan_updates
from fastrl.train.collect import make_task
from fastrl.train.config import Config
from fastrl.train.diagnose import Watch
from fastrl.train.engines import make_engine
from fastrl.train.figures import (
    check_finite,
    rollout_metrics,
    sampler_metrics,
    times,
    with_logprobs,
)
from fastrl.train.grpo import GRPO
from fastrl.train.http_json import EngineError
from fastrl.train.journal import Journal, Silent
from fastrl.train.metrics import StepMetrics, Timer
from fastrl.train.models import load_policy
from fastrl.train.overlap import Rollouts
from fastrl.train.ppo import PPO
from fastrl.train.seeding import set_up
from fastrl.train.storage import check_writable
from fastrl.train.warm_start import warm_start
from fastrl.train.world import World, connect

__all__ = ["Algorithm", "Outcome", "train"]


class Algorithm(Protocol):
    """What differs between PPO and GRPO."""

    def parameter_groups(self) -> list[dict[str, Any]]: ...
    def networks(self) -> list[nn.Module]: ...
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

    Under ``torchrun`` all processes train one model (see world.py); `run_dir` is then a folder that all
    of them see. SIGINT and SIGTERM, to any of them, end the run after the step in progress, with a
    checkpoint. The same configuration on the same machine and number of processes gives the same
    numbers, whether or not a run was interrupted; other numbers of processes agree up to rounding.

    Raises ValueError when the folder already holds a run and `resume` is not set, when none of its
    checkpoints can be read, or when the configuration does not fit; StorageError (an OSError) when the
    folder cannot be written; FloatingPointError when the loss is no longer finite; EngineError, after
    a checkpoint, when no server samples; ConnectionError when another process was lost.
    """
    check_writable(run_dir)
    _refuse_to_overwrite(run_dir, resume)
    if (run_dir / "checkpoints").exists():
        check_writable(run_dir / "checkpoints")
    with connect(config) as world:
        return _train(config, run_dir, world, resume=resume)


def _train(config: Config, run_dir: Path, world: World, *, resume: bool) -> Outcome:
    device = set_up(config, world)
    task = make_task(config)
    policy = load_policy(config.model, seed=config.seed, device=device)
    journal = Journal(run_dir, config) if world.is_first else Silent(run_dir, config)
    # Before the algorithm is made, which may copy the policy as its reference and its critic.
    warm_start(config, task, policy, run_dir, journal, world, resume=resume)
    timer = Timer()
    algorithms: dict[str, type[GRPO] | type[PPO]] = {"grpo": GRPO, "ppo": PPO}
    algorithm: Algorithm = algorithms[config.algorithm](config, policy, timer, world)
    sharding.spread(algorithm.networks(), config.scale, world)
    optimizer = _optimizer(config, algorithm)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    max_norm = math.inf if config.optim.max_grad_norm is None else config.optim.max_grad_norm
    engine = make_engine(config, policy, run_dir, journal.say, world)
    rollouts = Rollouts(config, task, policy, engine, timer, world)
    start, evaluated = (
        _resume(run_dir, journal, world, algorithm, optimizer, rollouts) if resume else (0, -1)
    )
    journal.open(start, evaluated=evaluated)

    save = partial(_save, run_dir, journal, world, config, algorithm, optimizer, rollouts)
    watch = Watch(config)
    limit = math.inf if config.time_limit is None else config.time_limit
    began = time.perf_counter()

    with journal, rollouts, _stop_signals(journal) as received:
        step = saved = start
        if evaluated < 0 and config.eval.size:
            journal.evaluation(*rollouts.evaluate(0))
            evaluated = 0
        # All ranks stop together: for the signal that any of them got, or by the latest clock.
        while not (stop := world.highest(max(received, default=0))) and step < config.steps:
            started = time.perf_counter()
            if world.highest(started - began >= limit):
                break
            timer.reset()
            metrics = StepMetrics()

            # Collect: several completions of each of this step's questions.
            # Score: every reward of every completion; a completion may stay without one.
            try:
                trajectories = rollouts.take(step)
            except EngineError:
                # Nothing of this step has been trained, so the run can go on from here.
                if saved < step:
                    save(step, evaluated)
                raise
            batch = make_batch(trajectories, list(task.weights), list(task.weights.values()))

            # Advantages. The plan of the first epoch is made before, so that the log-probabilities
            # of the rollout come from the very micro-batches that the first update trains on.
            plan = plan_updates(batch, config, step=step, epoch=0, device=device, world=world)
            has_tokens = bool(batch.mask.any())
            if has_tokens:
                with timer("forward_backward"):
                    targets = algorithm.targets(batch, plan)
                sharding.settle(algorithm.networks())

            # Mini-batches: each is one optimiser step, its gradient summed over micro-batches and
            # ranks.
            _set_learning_rate(config, optimizer, step)
            for epoch in range(config.optim.epochs if has_tokens else 0):
                if epoch:
                    plan = plan_updates(
                        batch, config, step=step, epoch=epoch, device=device, world=world
                    )
                for mini in plan:
                    if not mini.micro_batches:
                        continue
                    with timer("forward_backward"):
                        for micro in mini.micro_batches:
                            algorithm.loss(micro, mini, targets, metrics).backward()
                    with timer("optimizer"):
                        sharding.sum_gradients(trained, world)
                        metrics.grad_norm(sharding.clip_gradients(trained, max_norm))
                        optimizer.step()
                        optimizer.zero_grad(set_to_none=True)

            # Log. Reading the metrics is the one place where the host waits for the device.
            step += 1
            with timer("forward_backward"):
                figures = metrics.result(world)
            algorithm.finish(figures)
            figures |= rollout_metrics(config, trajectories, batch) | rollouts.figures
            if has_tokens:
                figures |= sampler_metrics(config, batch, targets.old_logp)
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
                journal.evaluation(*rollouts.evaluate(step))
                evaluated = step
            if _is_due(step, config.checkpoint.every):
                save(step, evaluated)
                saved = step

        if config.eval.size and evaluated < step and not stop:
            journal.evaluation(*rollouts.evaluate(step))
            evaluated = step
        if saved < step and (stop or config.checkpoint.final):
            save(step, evaluated)
        if stop:
            journal.say(f"stopped after step {step}; --resume continues from here")
        return Outcome(step, stop)


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
    world: World,
    config: Config,
    algorithm: Algorithm,
    optimizer: torch.optim.Optimizer,
    rollouts: Rollouts,
    step: int,
    evaluated: int,
) -> None:
    """A checkpoint in one piece, which any number of processes can continue from.

    `evaluated` is the step of the last evaluation, because the final one comes after a checkpoint.
    """
    journal.sync()
    # First, because scoring what is still on its way may draw random numbers.
    ahead = rollouts.state()
    tensors = {f"{n}.safetensors": checkpoint.weights(m) for n, m in algorithm.modules().items()}
    tensors["optimizer.safetensors"] = checkpoint.optimizer_tensors(optimizer)
    tensors = {name: sharding.whole(group, world) for name, group in tensors.items()}
    for rank, data in enumerate(world.gather_bytes(safetensors.save(checkpoint.rng_tensors()))):
        tensors[_rng_file(rank)] = safetensors.load(data)
    if not world.is_first:
        return
    state = {"algorithm": algorithm.state(), "evaluated": evaluated, "rollouts": ahead}
    path = checkpoint.save(
        run_dir / "checkpoints", step, tensors, state, keep=config.checkpoint.keep
    )
    journal.say(f"saved {path}")


def _rng_file(rank: int) -> str:
    return f"rng.{rank}.safetensors" if rank else "rng.safetensors"


def _resume(
    run_dir: Path,
    journal: Journal,
    world: World,
    algorithm: Algorithm,
    optimizer: torch.optim.Optimizer,
    rollouts: Rollouts,
) -> tuple[int, int]:
    """The step to continue from, with everything put back as it was after it, and the last evaluated."""
    found = checkpoint.load_latest(run_dir / "checkpoints", journal.say)
    steps = world.gather(found.step if found else 0)
    if len(set(steps)) > 1:
        raise ValueError(
            f"train: the newest checkpoints that the ranks see in {run_dir} are of steps {steps}; give a "
            "folder on a file system that all machines share"
        )
    if found is None:
        journal.say(f"no checkpoint in {run_dir}; starting at step 0")
        return 0, -1
    for name, module in algorithm.modules().items():
        checkpoint.load_weights(module, found.file(f"{name}.safetensors"))
    checkpoint.load_optimizer(optimizer, found.file("optimizer.safetensors"))
    # Ranks that the saved run did not have keep the generators of a fresh start.
    if _rng_file(world.rank) in found.tensors:
        checkpoint.restore_rng(found.file(_rng_file(world.rank)))
    algorithm.load_state(found.state["algorithm"])
    rollouts.load_state(found.step, found.state.get("rollouts", []))
    journal.say(f"resumed from {found.path}")
    return found.step, found.state["evaluated"]


def _refuse_to_overwrite(run_dir: Path, resume: bool) -> None:
    has_run = (run_dir / "metrics.jsonl").exists() or checkpoint.exists(run_dir / "checkpoints")
    if not resume and has_run:
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
