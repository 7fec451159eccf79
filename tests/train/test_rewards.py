"""Rewards that raise, hang or return what is no number: a clear end, or on by policy; and limits on calls."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastrl import cli
from fastrl.envs import Question, RewardError, StepResult, as_score, load_task, read_trajectories
from fastrl.train import config as configs
from fastrl.train.config import Config
from fastrl.train.guard import call_each
from fastrl.train.loop import train
from fastrl.train.scoring import score
from tests.soak import ROOT
from tests.train import rewards

TWO = "task.rewards=[{function='tests.train.rewards:faulty'}, {function='tests.train.rewards:length', weight=0.1}]"
FAULTS = {
    "raises": r"reward 'faulty' raised KeyError: 'score' \(.*rewards\.py:\d+\)",
    "exits": r"reward 'faulty' raised SystemExit: done",
    "hangs": r"reward 'faulty' did not return: it took longer than 0\.3 s \(task\.reward_seconds\)",
    "a string": r"reward 'faulty' returned no score: it must be a finite number, or None .* got '1\.0' \(str\)",
    "a list": r"got \[1\.0\] \(list\)",
    "two numbers": r"got tensor\(\[0\., 0\.\]\) \(Tensor\)",
    "infinity": r"got inf \(float\)",
    "minus infinity": r"got -inf \(float\)",
    "a complex number": r"got 1j \(complex\)",
    "a dict": r"got \{'score': 1\.0\} \(dict\)",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_the_run_with_a_message(
    small: Callable[..., Config], tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv(rewards.FAULT, fault)
    file = tmp_path / "c.toml"
    file.write_text(configs.dumps(small("grpo", TWO, "task.reward_seconds=0.3", "steps=2")))
    assert cli.main(["train", str(file), "--run-dir", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert re.search(FAULTS[fault], said), said
    assert re.search(
        r"the question was '\d\d'; correct it, or set task.failed_reward = \"skip\"", said
    )


@pytest.mark.parametrize(
    ("fault", "seconds"), [("raises", "none"), ("raises", "5"), ("infinity", "none"), ("hangs", "0.05")]
)  # fmt: skip
def test_a_fault_is_skipped_and_counted(
    small: Callable[..., Config], tmp_path: Path, fault: str, seconds: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv(rewards.FAULT, fault)
    config = small(
        "grpo", TWO, "task.failed_reward=skip", f"task.reward_seconds={seconds}", "steps=2",
        "log.samples_every=1", "log.samples=16", "eval.size=0",
    )  # fmt: skip
    assert train(config, tmp_path) == (2, 0)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("rewards fail (reward/failed at step 1: ") == 1
    samples = list(read_trajectories(tmp_path / "samples.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for step in (1, 2):
        group = [t for t in samples if t.step == step]
        failed = [t for t in group if sum(map(ord, t.completion)) % 3 == 0]
        assert 0 < len(failed) < len(group)
        assert lines[step - 1]["reward/failed"] == len(failed) / len(group)
        for t in group:
            assert bool(t.error) == (t in failed)
            assert (t.reward_parts["faulty"] is None) == (t in failed)
            # The other reward counts on.
            assert t.reward is not None
            assert t.reward_parts["length"] == len(t.completion)
    assert cli.main(["doctor", str(tmp_path)]) == 0
    assert "- rewards fail\n    evidence: reward/failed at step 2: " in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["catches everything", "looks at no signal"])
def test_code_that_cannot_be_interrupted_ends_the_process(fault: str) -> None:
    # Without fastrl itself, whose import takes longer than everything else.
    code = (
        "import runpy, itertools, time\n"
        f"call_each = runpy.run_path({str(ROOT / 'fastrl/train/guard.py')!r})['call_each']\n"
        "def catches_everything():\n"
        "    while True:\n"
        "        try:\n"
        "            time.sleep(60)\n"
        "        except BaseException:\n"
        "            pass\n"
        "def looks_at_no_signal():\n"
        "    sum(itertools.repeat(0))\n"
        f"print(call_each([{fault.replace(' ', '_')}], seconds=0.2))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Timeout (0:00:01.2" in done.stderr
    assert f"in {fault.replace(' ', '_')}" in done.stderr


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (torch.tensor(2.0), 2.0), (Fraction(1, 4), 0.25),
        (torch.tensor([[3.0]]), 3.0), (None, None), (math.nan, None), (torch.tensor(math.nan), None),
    ],
)  # fmt: skip
def test_what_is_a_score(value: Any, expected: float | None) -> None:
    assert as_score(value) == expected
    assert type(as_score(value)) in (float, type(None))


def test_every_fault_of_a_completion_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rewards.FAULT, "raises")
    named = [("tests.train.rewards:faulty", name, 1.0) for name in ("first", "second")]
    task = load_task("count_up", rewards=named, held_out=1)
    config = configs.parse({"task": {"failed_reward": "skip"}}).task
    (scores,) = score(config, task, [(Question(text="a", answer=""), "")])
    assert scores.parts == {"first": None, "second": None}
    first, second = scores.error.split("; task: ")
    assert "'first' raised KeyError" in first and "'second' raised KeyError" in second


def test_the_functions_error_is_the_cause() -> None:
    task = load_task("count_up", rewards=[("tests.train.rewards:faulty", "f", 1.0)], held_out=1)
    os.environ[rewards.FAULT] = "raises"
    try:
        with pytest.raises(RewardError, match=r"the question was 'a{79}") as caught:
            task.score(Question(text="a" * 500, answer=""), "")
    finally:
        del os.environ[rewards.FAULT]
    assert isinstance(caught.value.__cause__, KeyError)
    assert len(str(caught.value)) < 300


class Faulty:
    """An environment of one turn whose reward is what `value` names."""

    weights: Mapping[str, float] = {"score": 1.0}

    def __init__(self, value: str) -> None:
        self._value = {"string": "1.0", "infinity": math.inf, "none": None, "nan": math.nan}[value]

    def tasks(self, *, size: int, seed: int) -> list[dict[str, Any]]:
        return [{"number": i} for i in range(8)]

    def reset(self, task: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"{task['number']}"}]

    def step(self, message: dict[str, Any]) -> StepResult:
        return StepResult([], {"score": self._value}, True)  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("value", "failed", "error"),
    [
        ("string", 1.0, "reward part 'score' is no score: it must be a finite number"),
        ("infinity", 1.0, "got inf (float)"),
        ("none", 0.0, ""),
        ("nan", 0.0, ""),
    ],
)
def test_rewards_of_environments(
    small: Callable[..., Config], tmp_path: Path, value: str, failed: float, error: str
) -> None:
    config = small(
        "grpo", "env.source=tests.train.test_rewards:Faulty", f"env.params={{value='{value}'}}", "steps=1",
        "eval.size=0", "log.samples_every=1",
    )  # fmt: skip
    train(config, tmp_path)
    (line,) = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (line["episode/failed"], line["reward/failed"]) == (failed, 0.0)
    assert line["reward/unscored"] == 1.0
    assert all(error in t.error for t in read_trajectories(tmp_path / "samples.jsonl"))


# --- limits --------------------------------------------------------------------------------------


def test_calls_stay_in_the_main_thread_and_may_use_signals() -> None:
    def alarmed() -> str:
        signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(ZeroDivisionError))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            time.sleep(5)
        except ZeroDivisionError:
            return "its own alarm"
        finally:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return "slept"

    before, running = signal.getsignal(signal.SIGVTALRM), set(threading.enumerate())
    calls: list[Callable[[], Any]] = [
        threading.current_thread,
        alarmed,
        lambda: time.sleep(60),
        lambda: 3,
    ]
    first, second, third, last = call_each(calls, seconds=0.4)
    assert (first, second, last) == (threading.main_thread(), "its own alarm", 3)
    assert isinstance(third, TimeoutError)
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert not [t for t in set(threading.enumerate()) - running if not t.daemon]


def test_a_loop_in_python_and_in_re_is_ended() -> None:
    def loop() -> None:
        while True:
            random.random()

    def catastrophic() -> None:
        re.match(r"(a|a)*b", "a" * 60)

    for call in (loop, catastrophic):
        (result,) = call_each([call], seconds=0.2)
        assert isinstance(result, TimeoutError)


def test_another_thread_has_limits_too() -> None:
    results: list[Any] = []
    calls: list[Callable[[], Any]] = [
        lambda: 1,
        lambda: time.sleep(1.5),
        lambda: sys.exit(3),
        lambda: 2,
    ]
    thread = threading.Thread(target=lambda: results.extend(call_each(calls, seconds=0.2)))
    thread.start()
    thread.join(10)
    assert (results[0], results[3]) == (1, 2)
    assert isinstance(results[1], TimeoutError)
    assert isinstance(results[2], RuntimeError)
