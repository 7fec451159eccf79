"""Tasksets of verifiers, where it is installed: prompts, rewards with weights, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fastrl.envs import load_env_task

pytest.importorskip("verifiers", reason="verifiers is not installed: pip install verifiers")

TASKSET = """
import verifiers.v1 as vf

__all__ = ["Sums"]


class Data(vf.TaskData):
    answer: str


class Config(vf.TasksetConfig):
    count: int = 4


class Sum(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace):
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace):
        assert trace.num_turns == 1 and [m.role for m in trace.messages] == ["system", "user", "assistant"]
        return 1 / len(trace.last_reply)


class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for i in range(self.config.count):
            data = Data(prompt=f"{i}+1=", system_prompt="Add.", answer=str(i + 1))
            yield Sum(data, self.config.task)
"""
NEEDY = (
    TASKSET.replace("Sums", "Needy")
    + """
class Sum(Sum):
    NEEDS_CONTAINER = True

    async def setup(self, trace, runtime):
        await runtime.run("make")


class Needy(vf.Taskset[Sum, Config]):
    def load(self):
        yield Sum(Data(prompt="?", answer="!"), self.config.task)
"""
)


@pytest.fixture(autouse=True)
def tasksets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"toy_sums": TASKSET, "toy_needy": NEEDY}.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)


def test_tasks_and_rewards_of_a_taskset() -> None:
    task = load_env_task("verifiers:toy_sums", params={"count": 6}, held_out=2, size=8)
    assert len(task.train) == 4 and len(task.held_out) == 2
    assert task.weights == {"right": 2.0, "short": 0.5}
    env = task.make()
    entry = next(t for t in (*task.train, *task.held_out) if t["prompt"] == "3+1=")
    assert env.reset(entry) == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "3+1="},
    ]
    right = env.step({"role": "assistant", "content": "4"})
    assert right == ([], {"right": 1.0, "short": 1.0}, True)
    env.reset(entry)
    wrong = env.step({"role": "assistant", "content": "10"})
    assert wrong.reward_parts == {"right": 0.0, "short": 0.5}
    assert task.total(wrong.reward_parts) == 0.25


def test_the_order_of_tasks_is_that_of_the_seed() -> None:
    first, again, other = (
        load_env_task("verifiers:toy_sums", params={"count": 20}, held_out=0, seed=seed).train
        for seed in (1, 1, 2)
    )
    assert first == again and first != other


def test_what_needs_a_runtime_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"toy_needy .* a container, setup in a runtime; write"):
        load_env_task("verifiers:toy_needy")
