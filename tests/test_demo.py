"""The demo's parts, and its exit code, on a model small enough to learn within seconds."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fastrl.envs import Trajectory
from fastrl.train.config import Config
from fastrl.train.report_data import Run

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module examples/demo.py, which sets variables of the environment when it is imported."""
    for name in ("OMP_WAIT_POLICY", "HF_HUB_OFFLINE", "TQDM_DISABLE", "KINETO_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    from examples import demo

    threads = torch.get_num_threads()
    yield demo
    torch.set_num_threads(threads)
    sys.modules.pop("examples.demo", None)


def make_run(
    rewards: list[float], accuracy: list[float], *, samples: tuple[Trajectory, ...] = ()
) -> Run:
    times = {
        "time/sample": 3.0,
        "time/forward_backward": 6.0,
        "time/fastrl": 0.1,
        "time/other": 0.9,
    }
    return Run(
        path=Path("run"),
        metrics=tuple({"step": i + 1, "reward/mean": r, **times} for i, r in enumerate(rewards)),
        evaluations=tuple(
            {"step": 10 * i, "accuracy": a, "questions": 64} for i, a in enumerate(accuracy)
        ),
        samples=(),
        eval_samples=samples,
        config=Config(),
        config_text="",
        notes=(),
    )


def answer(uid: str, step: int, completion: str, reward: float | None) -> Trajectory:
    prompt = f"{uid} + 1 ="
    return Trajectory(
        uid=uid, prompt=prompt, completion=completion, answer="2", reward=reward, step=step
    )


def run_demo(demo: ModuleType, monkeypatch: Any, folder: Path, *settings: str) -> int:
    """The demo on the tiny configuration with a small op table."""
    monkeypatch.setattr(demo.op_table, "table", lambda table=demo.op_table.table: table("tiny", 1))
    head_table = demo.head_table.table
    monkeypatch.setattr(demo.head_table, "table", lambda rollout: head_table(rollout, "tiny"))
    config = str(ROOT / "configs" / "grpo_tiny.toml")
    replaced = [f"--set={setting}" for setting in settings]
    return demo.main(["--config", config, "--run-dir", str(folder / "demo"), *replaced])


def test_demo_ends_with_0_when_the_model_learns(demo, monkeypatch, tmp_path, capsys):
    code = run_demo(demo, monkeypatch, tmp_path, "steps=40", "log.progress=false")
    out = capsys.readouterr().out
    assert code == 0, out
    assert "before training" in out
    assert "after step 40" in out
    for part in ("sampling", "forward and backward", "fastrl ops", "rest"):
        assert part in out
    for op in ("gae", "group_advantages", "whiten", "token_logprobs", "policy_loss", "value_loss"):
        assert op in out
    assert re.search(r"eager, before( +\d+\.\d\d){4} +\d+\n", out)
    assert re.search(r"fused, after( +\d+\.\d\d){4} +\d+\n", out)
    assert "answers got better" in out
    assert f"curves: {tmp_path / 'demo' / 'report' / 'index.html'}" in out
    assert (tmp_path / "demo" / "report" / "reward.png").exists()
    assert not (tmp_path / "demo" / "checkpoints").exists(), "a demo leaves no gigabytes behind"
    assert "\x1b" not in out, "no control codes where there is no terminal"
    assert "\r" not in out


def test_demo_ends_with_1_and_the_figures_when_the_reward_does_not_rise(
    demo, monkeypatch, tmp_path, capsys
):
    settings = ("steps=4", "optim.lr=0.0", "log.progress=false")
    (tmp_path / "demo").mkdir()
    assert run_demo(demo, monkeypatch, tmp_path, *settings) == 1
    out = capsys.readouterr().out
    assert "Failed" in out
    assert "held-out accuracy: 0.000 to 0.000, +0.000 (a rise counts from +0.10)" in out
    assert "mean reward (first step, last 3): 0." in out
    assert (tmp_path / "demo-2" / "report").exists(), "an earlier run is kept"


def test_demo_stops_in_time(demo, monkeypatch, tmp_path, capsys):
    config = str(ROOT / "configs" / "grpo_tiny.toml")
    arguments = ["--config", config, "--run-dir", str(tmp_path / "demo"), "--seconds", "0.001"]
    monkeypatch.setattr(demo.op_table, "table", str)
    monkeypatch.setattr(demo.head_table, "table", str)
    assert demo.main(arguments) == 1
    assert "too few to compare" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rewards", "accuracy", "passed"),
    [
        ([0.1, 0.2, 0.3, 0.3, 0.3], [0.5, 0.5], True),
        ([0.1, 0.2, 0.2, 0.2], [0.5, 0.59], False),
        ([0.1, 0.1, 0.1, 0.1], [0.5, 0.61], True),
        ([0.9, 0.5, 0.5, 0.5], [0.5, 0.4], False),
        ([0.1, 0.9], [0.5, 0.5], True),
        ([0.1], [0.5, 0.9], False),
        ([0.1, 0.9], [0.5], False),
        ([], [], False),
    ],
)
def test_verdict(demo, rewards, accuracy, passed):
    verdict = demo.judge(make_run(rewards, accuracy))
    assert verdict.passed is passed, verdict.message


def test_verdict_names_the_figures(demo):
    message = demo.judge(make_run([0.1, 0.2, 0.2, 0.2], [0.5, 0.55])).message
    assert "held-out accuracy: 0.500 to 0.550, +0.050 (a rise counts from +0.10)" in message
    assert "mean reward (first step, last 3): 0.100 to 0.200, +0.100" in message
    assert "neither rose clearly" in message


def test_reward_bars_have_the_height_of_the_rewards(demo):
    lines = demo.reward_lines(make_run([0.25, -0.1, 1.0], []), width=40)
    assert [line.count("█") + line.count("#") for line in lines] == [10, 0, 40]


def test_many_steps_are_put_together(demo):
    lines = demo.reward_lines(make_run([0.5] * 45, []), most=20)
    assert len(lines) == 15
    assert lines[0].split()[:2] == ["1-3", "0.500"]
    assert lines[-1].split()[0] == "43-45"


def test_a_terminal_without_unicode_gets_ascii(demo, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    lines = demo.reward_lines(make_run([1.0], [])) + demo.answer_lines(
        [answer("é", 0, "ü\x1b[31m", 0.0), answer("é", 1, "2", 1.0)]
    )
    assert all(line.isascii() and line.isprintable() for line in lines)


def test_answers_show_one_that_got_worse(demo):
    before = [answer(str(i), 0, "x", 0.0) for i in range(6)] + [answer("9", 0, "2", 1.0)]
    after = [answer(str(i), 8, "2", 1.0) for i in range(6)] + [answer("9", 8, "lost", None)]
    lines = demo.answer_lines(before + after)
    assert lines[0] == "6 answers got better, 1 worse, 0 are as they were"
    assert len(lines) == 1 + 4 * 3
    assert lines[-1] == "    after   'lost'  (not scored)"


def test_time_lines_add_up(demo):
    lines = demo.time_lines(make_run([0.1, 0.2], []))
    assert lines[0].split() == ["sampling", "6.0", "s", "30.0%"]
    assert lines[-1].split()[:4] == ["all", "steps", "20.0", "s"]


def test_op_table_has_a_line_for_each_op_and_none_that_differs(demo):
    """That plain versions agree with the ops is checked before anything is timed."""
    lines = demo.op_table.table("tiny", 1).splitlines()[1:]
    assert {line.split()[0] for line in lines} >= {
        *("gae", "group_advantages", "whiten", "policy_loss", "value_loss", "token_logprobs")
    }
    assert not [line for line in lines if "differs" in line]


def test_op_table_gives_no_figure_for_a_wrong_result(demo, monkeypatch):
    monkeypatch.setattr(
        demo.op_table, "verified", lambda prepared: ({}, {"eager": "differs by 1 from float64"})
    )
    lines = demo.op_table.table("tiny", 1).splitlines()[1:]
    assert all("differs by 1" in line for line in lines)
