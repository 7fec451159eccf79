"""The rollouts of a run: each sampled when its step begins, or up to rollout.overlap steps before.

With overlap = k, a thread samples the rollout of step s from a copy of the weights after s - k steps while
the steps before s train. Which weights sample which rollout does not depend on how fast anything is, so
a run repeats bit for bit. Rollouts run one after the other, and none is under way during an
evaluation or a checkpoint; those that wait for their step are part of the checkpoint, because the weights
that sampled them are gone.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, NamedTuple

from torch import Tensor

from fastrl.envs import EnvTask, Task, Trajectory
from fastrl.train import checkpoint
from fastrl.train.collect import Evaluation, collect, evaluate
from fastrl.train.config import Config
from fastrl.train.http_json import EngineError
from fastrl.train.metrics import Timer
from fastrl.train.models import Policy
from fastrl.train.rollout import Engine
from fastrl.train.world import ALONE, World

__all__ = ["Rollouts"]


class _Rollout(NamedTuple):
    """Scored completions, and the seconds that they took."""

    trajectories: list[Trajectory]
    seconds: float


class Rollouts:
    """A context manager, which owns the thread that samples ahead."""

    def __init__(
        self,
        config: Config,
        task: Task | EnvTask,
        policy: Policy,
        engine: Engine,
        timer: Timer,
        world: World = ALONE,
    ) -> None:
        self._config = config
        self._task = task
        self._policy = policy
        self._engine = engine
        self._timer = timer
        self._world = world
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        # The rollouts begun and not taken: those of consecutive steps, `_next` the first without one.
        self._ahead: deque[Future[_Rollout]] = deque()
        self._next = 0
        self.figures: dict[str, float] = {}
        """What sampling ahead adds to the metrics of the last step taken."""

    def __enter__(self) -> Rollouts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._engine.close()
        self._thread.shutdown(cancel_futures=True)

    def take(self, step: int) -> list[Trajectory]:
        """The rollout of `step`, for which the policy has been trained `step` steps."""
        overlap = self._config.rollout.overlap
        if not overlap:
            with self._timer("sample"):
                self._engine.update(checkpoint.weights(self._policy.model), step)
            random_state = checkpoint.rng_tensors()
            try:
                return self._collect(self._timer, step)
            except EngineError:
                # What was scored before it failed is scored again when the run is resumed.
                checkpoint.restore_rng(random_state)
                raise
        with self._timer("sample"):
            self._begin(step, min(step + overlap, self._config.steps - 1))
            trajectories, seconds = self._ahead.popleft().result()
        stale = [t.step - (t.policy_step or t.step) for t in trajectories]
        self.figures = {
            "sampler/staleness": sum(stale) / max(len(stale), 1),
            "time/background": seconds,
        }
        return trajectories

    def _begin(self, step: int, last: int) -> None:
        """Begin the rollouts up to that of step `last` from the weights of now."""
        self._next = max(self._next, step)
        if self._next > last:
            return
        tensors = checkpoint.weights(self._policy.model)
        weights = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        while self._next <= last:
            self._ahead.append(self._thread.submit(self._sample, weights, step, self._next))
            self._next += 1

    def _sample(self, weights: Mapping[str, Tensor], version: int, step: int) -> _Rollout:
        began = time.perf_counter()
        self._engine.update(weights, version)
        # A timer of its own, because the other one is that of the thread that trains.
        return _Rollout(self._collect(Timer(), step), time.perf_counter() - began)

    def _collect(self, timer: Timer, step: int) -> list[Trajectory]:
        return collect(
            self._config,
            self._task,
            self._policy,
            self._engine,
            timer,
            step=step,
            world=self._world,
        )

    def evaluate(self, step: int) -> Evaluation:
        """Evaluate the policy, trained `step` steps, on the held-out questions."""
        wait(self._ahead)
        self._engine.update(checkpoint.weights(self._policy.model), step)
        return evaluate(
            self._config, self._task, self._policy, self._engine, step=step, world=self._world
        )

    def state(self) -> list[dict[str, Any]]:
        """What a checkpoint must hold: the rollouts that wait for their step, in order.

        Those from one that failed on are left out, and sampled anew from the weights of the checkpoint.
        """
        wait(self._ahead)
        whole = itertools.takewhile(lambda job: job.exception() is None, self._ahead)
        return [
            {"lines": [t.to_json() for t in r.trajectories], "seconds": r.seconds}
            for r in (job.result() for job in whole)
        ]

    def load_state(self, step: int, state: Sequence[Mapping[str, Any]]) -> None:
        """Take back what `state` returned after `step` steps."""
        self._ahead.clear()
        self._next = step + len(state)
        for rollout in state:
            job: Future[_Rollout] = Future()
            lines = [Trajectory.from_json(line) for line in rollout["lines"]]
            job.set_result(_Rollout(lines, rollout["seconds"]))
            self._ahead.append(job)
