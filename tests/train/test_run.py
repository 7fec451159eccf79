"""Whole runs: repeatable, resumable after any end, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fastrl import cli
from fastrl.envs import read_trajectories
from fastrl.train import config as configs
from fastrl.train.config import Config
from fastrl.train.loop import train
from fastrl.train.metrics import METRICS, Timer, check_names
from tests.train import rewards

ROOT = Path(__file__).parents[2]
REWARD = "task.rewards=[{function='tests.train.rewards:position_or_signal'}]"


def records(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The lines of a run without what depends on the clock."""
    lines = (run_dir / name).read_text().splitlines()
    clock = ("time/", "throughput/", "seconds")
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(clock)} for line in lines
    ]


def saved(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run_dir / "checkpoints" / f"step_{step:06d}"
    files = sorted(folder.glob("*.safetensors"))
    assert {"optimizer.safetensors", "policy.safetensors"} <= {f.name for f in files}
    return {f"{f.name}/{k}": v for f in files for k, v in load_file(f).items()}


def assert_same_run(run_dir: Path, other: Path, step: int) -> None:
    """Metrics, evaluations and samples are equal, and so is every bit of the last checkpoint."""
    for name in ("metrics.jsonl", "eval.jsonl", "samples.jsonl", "eval_samples.jsonl"):
        assert records(run_dir, name) == records(other, name), name
    a, b = saved(run_dir, step), saved(other, step)
    assert set(a) == set(b)
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.fixture
def signal_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """`signal_at(call, number)`: the reward sends the signal at that call."""

    def arrange(call: int, number: int) -> None:
        rewards.restart_counting()
        monkeypatch.setenv(rewards.SIGNAL_AT, f"{call}:{number}")

    return arrange


# Two evaluations of 4 questions and 16 completions a step: this call is in the middle of step 4.
IN_STEP_4 = 4 + 3 * 16 + 4 + 8
OPTIONS = (
    REWARD,
    "steps=6",
    "checkpoint.every=2",
    "eval.every=2",
    "log.samples_every=2",
    "kl.coef=0.01",
)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_kill_then_resume_equals_the_uninterrupted_run(
    small: Callable[..., Config], tmp_path: Path, algorithm: str
) -> None:
    config = small(algorithm, *OPTIONS, "kl.target=0.01", "ppo.critic=head")
    train(config, tmp_path / "whole")

    file = tmp_path / "config.toml"
    file.write_text(configs.dumps(config))
    command = [
        sys.executable,
        "-m",
        "fastrl",
        "train",
        str(file),
        "--run-dir",
        str(tmp_path / "killed"),
    ]
    environment = {**os.environ, rewards.SIGNAL_AT: f"{IN_STEP_4}:{signal.SIGKILL:d}"}
    killed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    # Step 3 was logged but not saved, so the resumed run must do it again and not twice.
    assert [r["step"] for r in records(tmp_path / "killed")] == [1, 2, 3]

    outcome = train(config, tmp_path / "killed", resume=True)
    assert outcome == (6, 0)
    assert [r["step"] for r in records(tmp_path / "killed")] == [1, 2, 3, 4, 5, 6]
    assert_same_run(tmp_path / "whole", tmp_path / "killed", 6)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_after_the_step_and_the_run_goes_on(
    small: Callable[..., Config],
    tmp_path: Path,
    signal_at: Callable[[int, int], None],
    capsys: pytest.CaptureFixture[str],
    number: int,
) -> None:
    config = small("grpo", *OPTIONS)
    train(config, tmp_path / "whole")
    before = signal.getsignal(number)
    signal_at(IN_STEP_4 - 16, number)
    outcome = train(config, tmp_path / "stopped")
    assert outcome == (3, number)
    assert signal.getsignal(number) == before
    assert "--resume continues from here" in capsys.readouterr().out
    assert (tmp_path / "stopped/checkpoints/step_000003").is_dir()
    signal_at(0, 0)
    assert train(config, tmp_path / "stopped", resume=True) == (6, 0)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped", 6)


def test_resume_uses_the_checkpoint_before_a_truncated_one(
    small: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small("grpo", *OPTIONS)
    train(config, tmp_path / "whole")
    train(config, tmp_path / "damaged")
    file = tmp_path / "damaged/checkpoints/step_000006/policy.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    train(config, tmp_path / "damaged", resume=True)
    said = " ".join(capsys.readouterr().out.split())
    assert "step_000006 is damaged and was passed over" in said
    assert_same_run(tmp_path / "whole", tmp_path / "damaged", 6)


def test_resume_without_a_checkpoint_starts_at_the_beginning(
    small: Callable[..., Config], tmp_path: Path
) -> None:
    config = small("grpo", "steps=2")
    train(config, tmp_path / "a", resume=True)
    assert [r["step"] for r in records(tmp_path / "a")] == [1, 2]


def test_a_run_is_not_overwritten(small: Callable[..., Config], tmp_path: Path) -> None:
    config = small("grpo", "steps=1")
    train(config, tmp_path)
    with pytest.raises(ValueError, match=r"already holds a run; pass --resume"):
        train(config, tmp_path)


def test_the_run_folder(small: Callable[..., Config], tmp_path: Path) -> None:
    ahead = ("rollout.overlap=1", "correction.kind=tis")
    config = small("ppo", "steps=3", "eval.every=2", "log.samples_every=2", "kl.coef=0.01", *ahead)
    train(config, tmp_path)
    assert configs.load(tmp_path / "config.toml") == config
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    # Those of episodes are logged by environments alone; tests/train/test_episodes.py has them.
    defined = {m.name for m in METRICS if not m.name.startswith("episode/")}
    # Everything that is defined is logged by a run that uses it.
    assert {n for n in lines[0] if not n.startswith("reward/part/")} == defined - {"reward/part/"}
    parts = [
        lines[1][f"time/{n}"]
        for n in ("sample", "score", "forward_backward", "optimizer", "fastrl", "other")
    ]
    assert sum(parts) == pytest.approx(lines[1]["time/step"])
    assert min(parts) >= 0
    assert [r["step"] for r in records(tmp_path, "eval.jsonl")] == [0, 2, 3]
    samples = list(read_trajectories(tmp_path / "samples.jsonl"))
    assert [t.step for t in samples] == [1, 1, 3, 3]
    for t in samples:
        assert len(t.logprobs) == len(t.completion_ids) == len(t.mask)
        assert max(t.logprobs) < 0
    held_out = list(read_trajectories(tmp_path / "eval_samples.jsonl"))
    assert [t.uid for t in held_out[:4]] == [t.uid for t in held_out[-4:]]


def test_kl_moves_with_the_adaptive_controller(
    small: Callable[..., Config], tmp_path: Path
) -> None:
    config = small(
        "ppo", "steps=4", "kl.coef=0.01", "kl.target=1e-6", "kl.horizon=10", "ppo.warmup_steps=0"
    )
    train(config, tmp_path)
    coefficients = [r["kl/coef"] for r in records(tmp_path)]
    divergences = [r["kl/ref"] for r in records(tmp_path)]
    assert divergences[0] == 0.0
    assert divergences[-1] > 0.0
    # On target or below it falls by a fifth, above it rises by a fifth.
    assert coefficients[1] == pytest.approx(0.01 * 0.8)
    assert coefficients[-1] > coefficients[1]


def test_critic_warm_up_leaves_the_policy_alone(
    small: Callable[..., Config], tmp_path: Path
) -> None:
    for critic in ("head", "separate"):
        options = ("ppo.warmup_steps=1", "checkpoint.every=1", f"ppo.critic={critic}")
        train(small("ppo", "steps=2", *options), tmp_path / critic)
        first, second = saved(tmp_path / critic, 1), saved(tmp_path / critic, 2)
        untrained = small("ppo", "steps=0", "checkpoint.final=false")
        start = _initial(untrained)
        assert all(torch.equal(first[f"policy.safetensors/{n}"], p) for n, p in start.items())
        assert not all(torch.equal(second[f"policy.safetensors/{n}"], p) for n, p in start.items())
        assert first["critic.safetensors/head.weight"].any()


def _initial(config: Config) -> dict[str, torch.Tensor]:
    from fastrl.train.checkpoint import weights
    from fastrl.train.models import load_policy

    policy = load_policy(config.model, seed=config.seed, device=torch.device("cpu"))
    return weights(policy.model)


def test_unscored_completions_are_left_out(small: Callable[..., Config], tmp_path: Path) -> None:
    several = (
        "task.rewards=[{function='tests.train.rewards:none_for_short', weight=2.0},"
        "{function='tests.train.rewards:length', name='characters', weight=0.5}]"
    )
    train(small("grpo", "steps=2", several, "grpo.normalise_each=true"), tmp_path / "some")
    (first, _) = records(tmp_path / "some")
    assert first["reward/unscored"] == 0.0
    # Short completions have one of the two rewards; those that have both get 1 from the first.
    assert first["reward/part/none_for_short"] == 1.0
    assert first["reward/part/characters"] > 0
    assert first["optim/updates"] == 4
    never = "task.rewards=[{function='tests.train.rewards:nan_always'}]"
    train(small("grpo", "steps=2", never, "eval.size=0"), tmp_path / "none")
    (first, _) = records(tmp_path / "none")
    assert first["reward/unscored"] == 1.0
    assert first["reward/mean"] is None
    assert first["optim/updates"] == 0


def test_time_limit_ends_the_run_as_its_last_step_would(
    small: Callable[..., Config], tmp_path: Path
) -> None:
    outcome = train(small("grpo", "steps=1000", "time_limit=1e-9"), tmp_path)
    assert outcome == (0, 0)
    assert [r["step"] for r in records(tmp_path, "eval.jsonl")] == [0]


def test_undefined_metrics_are_refused() -> None:
    check_names({"reward/mean": 1.0, "reward/part/anything": 1.0})
    with pytest.raises(ValueError, match=r"reward/maen.*metrics\.METRICS"):
        check_names({"reward/maen": 1.0})
    assert all(m.formula and m.unit for m in METRICS)
    assert len({m.name for m in METRICS}) == len(METRICS)


def test_nested_time_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 4.0, 10.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    timer = Timer()
    with timer("outer"), timer("inner"):
        pass
    assert timer.seconds == {"inner": 3.0, "outer": 7.0}


# --- command line ------------------------------------------------------------------------------


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["train", "--help"], ["eval", "--help"], ["report", "--help"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 0
    said = capsys.readouterr().out
    for word in ("train", "eval", "report", "info", "--set", "--resume", "--run-dir", "RUN_DIR"):
        assert word in said
    assert cli.main(["train", "--keys"]) == 0
    assert "optim.lr = 0.001  # Learning rate of the policy." in capsys.readouterr().out


def test_errors_are_one_line_and_code_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("stepz = 3")
    assert cli.main(["train", str(file)]) == 1
    assert cli.main(["train", str(tmp_path / "absent.toml")]) == 1
    assert cli.main(["train"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "fastrl: config: unknown key stepz; did you mean steps?"
    assert "absent.toml" in said[1]
    assert len(said) == 3


def test_train_then_eval(
    small: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, run_dir = tmp_path / "c.toml", tmp_path / "run"
    file.write_text(configs.dumps(small("grpo")))
    assert cli.main(["train", str(file), "--run-dir", str(run_dir), "--set", "steps=1"]) == 0
    capsys.readouterr()
    assert cli.main(["eval", str(run_dir)]) == 0
    assert capsys.readouterr().out.startswith("step 1: accuracy ")
    assert cli.main(["eval", str(file)]) == 0
    assert capsys.readouterr().out.startswith("step 0: accuracy ")
    assert cli.main(["eval", str(tmp_path)]) == 1


def test_a_stopped_run_has_the_exit_code_of_its_signal(
    small: Callable[..., Config], tmp_path: Path, signal_at: Callable[[int, int], None]
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(configs.dumps(small("grpo", REWARD, "steps=4")))
    signal_at(6, signal.SIGINT)
    assert cli.main(["train", str(file), "--run-dir", str(tmp_path / "run")]) == 130
