"""Sampling ahead: which weights sample what, that it repeats bit for bit, and that it resumes exactly."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fastrl.envs import Trajectory
from fastrl.train import checkpoint, overlap
from fastrl.train import config as configs
from fastrl.train.batch import make_batch
from fastrl.train.collect import make_task
from fastrl.train.config import Config, parse
from fastrl.train.engines import make_engine
from fastrl.train.figures import with_logprobs
from fastrl.train.grpo import Targets
from fastrl.train.http_json import EngineError
from fastrl.train.loop import train
from fastrl.train.metrics import Timer
from fastrl.train.models import Policy, load_policy
from fastrl.train.overlap import Rollouts
from fastrl.train.rollout import Completion
from fastrl.train.world import World
from tests.train.conftest import CONFIGS
from tests.train.engine_server import EngineServer
from tests.train.test_run import OPTIONS, assert_same_run, records, signal_at

__all__ = ["signal_at"]  # a fixture

AHEAD = ("correction.kind=tis", "correction.high=2.0")


class Recorder:
    """An engine that notes which weights it has when it samples, and can be held up."""

    def __init__(self) -> None:
        self.version = -1
        self.weights: Mapping[str, torch.Tensor] = {}
        self.sampled: list[int] = []
        self.sums: list[float] = []
        self.go = threading.Semaphore(10**6)
        self.fails_at = -1

    def update(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.weights, self.version = weights, version

    def close(self) -> None:
        self.go.release(10**6)

    def generate(self, prompts: Any, *, samples: int, **_: Any) -> list[list[Completion]]:
        self.go.acquire()
        if len(self.sampled) == self.fails_at:
            raise EngineError("engine: gone")
        self.sampled.append(self.version)
        self.sums.append(sum(float(t.sum()) for t in self.weights.values()))
        return [[Completion([0], True, [-1.0], self.version)] * samples for _ in prompts]


def make(config: Config) -> tuple[Rollouts, Recorder, Policy]:
    policy = load_policy(config.model, seed=0, device=torch.device("cpu"))
    engine = Recorder()
    return Rollouts(config, make_task(config), policy, engine, Timer()), engine, policy


def train_a_little(policy: Policy) -> float:
    """Change the weights in place, as an optimiser does, and return their sum."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    return sum(float(t.sum()) for t in checkpoint.weights(policy.model).values())


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_a_rollout_has_the_weights_of_so_many_steps_before(
    small: Callable[..., Config], ahead: int
) -> None:
    rollouts, engine, policy = make(small("grpo", "steps=5", f"rollout.overlap={ahead}", *AHEAD))
    sums = [sum(float(t.sum()) for t in checkpoint.weights(policy.model).values())]
    with rollouts:
        for step in range(5):
            taken = rollouts.take(step)
            version = max(step - ahead, 0)
            assert {t.step for t in taken} == {step + 1}
            assert {t.policy_step for t in taken} == {version + 1 if version < step else None}
            if ahead:
                assert rollouts.figures["sampler/staleness"] == step - version
            else:
                assert rollouts.figures == {}
            sums.append(train_a_little(policy))
    # Those weights, and not the ones that the step in training had made of them meanwhile.
    expected = [max(step - ahead, 0) for step in range(5)]
    assert engine.sampled == expected
    assert engine.sums == [sums[v] for v in expected]


def test_no_more_rollouts_are_begun_than_the_bound(small: Callable[..., Config]) -> None:
    rollouts, engine, _ = make(small("grpo", "steps=9", "rollout.overlap=2", *AHEAD))
    with rollouts:
        for step in range(9):
            rollouts.take(step)
            wait_for = min(step + 3, 9)
            eventually(lambda count=wait_for: len(engine.sampled) == count)  # type: ignore[misc]
            assert len(rollouts._ahead) == min(2, 8 - step)


def test_training_goes_on_while_the_next_rollout_is_sampled(small: Callable[..., Config]) -> None:
    rollouts, engine, policy = make(small("grpo", "steps=3", "rollout.overlap=1", *AHEAD))
    engine.go = threading.Semaphore(1)
    with rollouts:
        rollouts.take(0)
        # The second rollout is held up, and the step trains all the same.
        train_a_little(policy)
        assert engine.sampled == [0]
        engine.go.release(2)
        assert rollouts.take(1)[0].step == 2


def test_an_evaluation_has_the_newest_weights_and_no_company(small: Callable[..., Config]) -> None:
    rollouts, engine, policy = make(small("grpo", "steps=4", "rollout.overlap=2", *AHEAD))
    engine.go = threading.Semaphore(1)
    with rollouts:
        rollouts.take(0)
        train_a_little(policy)
        threading.Timer(0.1, engine.go.release, [10]).start()
        evaluation = rollouts.evaluate(1)
        # The rollouts of steps 1 and 2 were finished before, and the next one has its own weights.
        assert engine.sampled == [0, 0, 0, 1]
        assert {t.policy_step for t in evaluation.trajectories} == {None}
        rollouts.take(1)
        eventually(lambda: len(engine.sampled) == 5)
        assert engine.sampled[4] == 1


def test_an_error_of_the_sampler_ends_the_step_that_needs_it(small: Callable[..., Config]) -> None:
    rollouts, engine, _ = make(small("grpo", "steps=4", "rollout.overlap=1", *AHEAD))
    engine.fails_at = 2
    with rollouts:
        rollouts.take(0)
        rollouts.take(1)
        with pytest.raises(EngineError, match="gone"):
            rollouts.take(2)


def test_a_checkpoint_leaves_out_what_failed(small: Callable[..., Config]) -> None:
    rollouts, engine, _ = make(small("grpo", "steps=6", "rollout.overlap=3", *AHEAD))
    engine.fails_at = 2
    with rollouts:
        rollouts.take(0)
        assert len(rollouts.state()) == 1
        rollouts.take(1)
        assert rollouts.state() == []
        with pytest.raises(EngineError, match="gone"):
            rollouts.take(2)


def test_a_rollout_that_failed_leaves_the_random_generators(
    small: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw_and_fail(*_: Any, **__: Any) -> None:
        random.random()
        torch.rand(())
        raise EngineError("engine: gone after a first round was scored")

    monkeypatch.setattr(overlap, "collect", draw_and_fail)
    rollouts, _, _ = make(small("grpo"))
    before = checkpoint.rng_tensors()
    with rollouts, pytest.raises(EngineError, match="gone"):
        rollouts.take(0)
    after = checkpoint.rng_tensors()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_end_of_a_run_does_not_wait_for_a_server(
    small: Callable[..., Config], tmp_path: Path
) -> None:
    with EngineServer("vllm", small("grpo").model) as server:
        pass  # gone, and its port free
    engine = ("engine.kind=vllm", f"engine.urls=['{server.url}']", "engine.on_failure=wait")
    config = small("grpo", "rollout.overlap=1", "engine.backoff=30.0", *engine, *AHEAD)
    policy = load_policy(config.model, seed=0, device=torch.device("cpu"))
    said: list[str] = []
    waiting = make_engine(config, policy, tmp_path, said.append)
    began = time.monotonic()
    with Rollouts(config, make_task(config), policy, waiting, Timer()) as rollouts:
        rollouts._begin(0, 1)
        eventually(lambda: bool(said))
    assert time.monotonic() - began < 10


def test_what_waits_comes_back_as_it_was(small: Callable[..., Config]) -> None:
    config = small("grpo", "steps=6", "rollout.overlap=2", *AHEAD)
    rollouts, _, _ = make(config)
    with rollouts:
        rollouts.take(0)
        state = rollouts.state()
        expected = [rollouts.take(1), rollouts.take(2)]
    again, engine, _ = make(config)
    with again:
        again.load_state(1, state)
        assert [again.take(1), again.take(2)] == expected
        assert all(isinstance(t, Trajectory) for t in expected[0])
        assert again.take(3)[0].policy_step == 2
        eventually(lambda: len(engine.sampled) == 3)
        assert engine.sampled == [1, 2, 3]


def test_samples_of_old_weights_are_recorded_with_their_own_logprobs(
    small: Callable[..., Config],
) -> None:
    rollouts, _, _ = make(small("grpo", "rollout.overlap=1", *AHEAD))
    with rollouts:
        fresh, stale = rollouts.take(0)[0], rollouts.take(1)[0]
    batch = make_batch([fresh, stale], list(fresh.reward_parts))
    targets = Targets(torch.full((2, 1), -2.0), torch.zeros(2, 1), None)
    kept = with_logprobs([fresh, stale], targets, batch, small("grpo"))
    assert [t.logprobs for t in kept] == [(-2.0,), (-1.0,)]


# --- whole runs --------------------------------------------------------------------------------


def test_without_overlap_a_run_is_what_it_was(
    small: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the weights handed over nor a correction by weights of 1 changes a bit of the training."""
    config = small("grpo", "steps=3", "optim.epochs=1", "optim.mini_batches=1")
    train(config, tmp_path / "a")

    def plain(self: Rollouts, step: int) -> list[Trajectory]:
        return overlap.collect(
            config, self._task, self._policy, self._engine, self._timer, step=step
        )

    monkeypatch.setattr(Rollouts, "take", plain)
    train(config, tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b", 3)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_run_repeats_bit_for_bit_and_is_stale_by_the_bound(
    small: Callable[..., Config], tmp_path: Path, algorithm: str
) -> None:
    options = ("log.samples_every=1", "ppo.warmup_steps=0")
    config = small(algorithm, "steps=5", "rollout.overlap=2", *options, *AHEAD)
    for name in ("a", "b"):
        train(config, tmp_path / name)
    assert_same_run(tmp_path / "a", tmp_path / "b", 5)
    lines = records(tmp_path / "a")
    assert [r["sampler/staleness"] for r in lines] == [0, 1, 2, 2, 2]
    # Fresh weights differ by rounding alone; old ones by what training has moved.
    assert lines[0]["sampler/logp_gap"] < 1e-4 < lines[2]["sampler/logp_gap"]
    assert lines[0]["sampler/ratio_max"] == pytest.approx(1, abs=1e-3)
    assert lines[2]["sampler/ratio_max"] > 1.01
    assert lines[2]["sampler/ess"] < 1
    assert lines[2]["sampler/kl_k3"] > 0
    samples = [r["policy_step"] for r in records(tmp_path / "a", "samples.jsonl") if r["step"] == 5]
    assert set(samples) == {3}


# The reward is called 4 times in an evaluation and 16 times in a rollout: four rollouts lie between the
# evaluations before the first and after the second step. Filtered groups take more.
@pytest.mark.parametrize(
    ("call", "filtered"),
    [(60, "false"), (70, "false"), (100, "true")],
    ids=["step", "eval", "filter"],
)
def test_resume_is_exact(
    small: Callable[..., Config],
    tmp_path: Path,
    signal_at: Callable[[int, int], None],
    call: int,
    filtered: str,
) -> None:
    config = small("grpo", *OPTIONS, "rollout.overlap=2", f"filter.groups={filtered}", *AHEAD)
    train(config, tmp_path / "whole")
    signal_at(call, signal.SIGINT)
    outcome = train(config, tmp_path / "stopped")
    assert outcome.stopped_by == signal.SIGINT
    assert 0 < outcome.step < 6
    signal_at(0, 0)
    assert train(config, tmp_path / "stopped", resume=True) == (6, 0)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped", 6)


def test_a_reward_that_draws_random_numbers_repeats_and_resumes(
    small: Callable[..., Config], tmp_path: Path
) -> None:
    reward = "task.rewards=[{function='tests.train.rewards:random_number'}]"
    options = ("checkpoint.every=2", "eval.every=2", "rollout.overlap=1", *AHEAD)
    config = small("grpo", reward, "steps=4", *options)
    train(config, tmp_path / "whole")
    train(config, tmp_path / "cut")
    for name in ("step_000004", "step_000003"):
        folder = tmp_path / "cut/checkpoints" / name
        if folder.exists():
            (folder / "manifest.json").unlink()
    train(config, tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 4)
    assert records(tmp_path / "cut")[3]["reward/std"] > 0


def test_a_server_samples_ahead_with_the_weights_of_each_rollout(
    small: Callable[..., Config], tmp_path: Path
) -> None:
    options = ("steps=4", "eval.every=2", "rollout.overlap=1", *AHEAD)
    local = small("grpo", *options)
    with EngineServer("vllm", local.model) as server:
        engine = ("engine.kind=vllm", f"engine.urls=['{server.url}']", "engine.backoff=0.01")
        config = small("grpo", *options, *engine)
        train(config, tmp_path / "a")
        # An evaluation, rollouts 0 to 2, an evaluation, rollout 3, an evaluation.
        assert server.versions == [f"step_{v:06d}" for v in (0, 0, 0, 1, 2, 2, 4)]
        train(config, tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b", 4)
    assert [r["sampler/staleness"] for r in records(tmp_path / "a")] == [0, 1, 1, 1]
    assert records(tmp_path / "a")[0]["sampler/logp_gap"] < 1e-4


def test_the_copy_follows_only_when_it_is_told(
    small: Callable[..., Config], tmp_path: Path
) -> None:
    config = small("grpo", "rollout.overlap=1", *AHEAD)
    policy = load_policy(config.model, seed=0, device=torch.device("cpu"))
    engine = make_engine(config, policy, tmp_path, print)
    engine.update(checkpoint.weights(policy.model), 0)

    def sample() -> list[list[Completion]]:
        return engine.generate([[3, 4]], samples=4, max_new_tokens=8, temperature=1.0, seed=1)

    before = sample()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(3.0)
    assert sample() == before
    engine.update(checkpoint.weights(policy.model), 1)
    assert sample() != before
    assert sample()[0][0].version == 1


def test_it_learns_ahead(small: Callable[..., Config], tmp_path: Path) -> None:
    """Measured over seeds 0 to 2: mean reward 0.08 or less in the first steps, 0.80 or more in the last."""
    options = ("rollout.overlap=1", "steps=60", "eval.size=0", "checkpoint.final=false", *AHEAD)
    config = configs.load(
        CONFIGS / "grpo_tiny.toml",
        ["seed=0", "log.samples_every=0", "log.tensorboard=false", *options],
    )
    train(config, tmp_path)
    rewards = [r["reward/mean"] for r in records(tmp_path)]
    assert sum(rewards[:5]) / 5 < 0.2
    assert sum(rewards[-5:]) / 5 > 0.6


@pytest.mark.parametrize("change", [{"rollout": {"overlap": 1}}, {"engine": {"kind": "vllm"}}])
def test_several_processes_sample_step_by_step(
    change: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    tree: dict[str, dict[str, Any]] = {
        "engine": {"urls": ["http://localhost:1"]},
        "correction": {"kind": "tis"},
    }
    for section, values in change.items():
        tree[section] = {**tree.get(section, {}), **values}
    config = parse(tree)
    policy = load_policy(config.model, seed=0, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"2 processes; set engine\.kind"):
        make_engine(config, policy, tmp_path, print, World(rank=1, size=2))
