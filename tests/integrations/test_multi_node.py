"""The examples for several nodes: TRL in two processes on this machine, verl's command against verl's own configuration."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


def run_in_two_processes(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "examples.trl_multi_node", "--cpu", "--model", str(folder / "model")),
        *("--output", str(folder / "out"), "--steps", "2", "--batch", "4", "--length", "6"),
        *arguments,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    log = json.loads((folder / "out" / "log.json").read_text())
    return [row for row in log if "loss" in row]


def test_trl_in_two_processes(tmp_path: Path) -> None:
    """Two processes of four completions each: the same losses, rewards and metric names with and without fastrl."""
    pytest.importorskip("trl", reason="trl is not installed: requirements/peers-no-deps.txt")
    from tests.integrations.test_trl import tiny_model

    _, tokenizer = tiny_model(512, tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    expected = run_in_two_processes(tmp_path, "--stock")
    got = run_in_two_processes(tmp_path)
    assert len(got) == len(expected) == 2
    for ours, theirs in zip(got, expected):
        assert ours.keys() == theirs.keys()
        for key in theirs.keys() - {"step_time", "epoch"}:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=2e-4), key


def overrides() -> list[str]:
    """The options of the command in the shell script, its variables filled in."""
    text = (ROOT / "examples" / "verl_multi_node.sh").read_text()
    command = text[text.index("exec python") :].replace("\\\n", " ").replace('"$@"', "")
    command = command.replace("$VERL_USE_EXTERNAL_MODULES", "fastrl.integrations.verl_plugin")
    words = shlex.split(re.sub(r"\$\{(\w+)(?::[-?]([^}]*))?\}", _filled, command))
    assert words[:4] == ["exec", "python", "-m", "verl.trainer.main_ppo"]
    return words[4:]


def _filled(match: re.Match[str]) -> str:
    name, default = match.groups()
    return default if name in ("GPUS", "NODES") else f"/data/{name.lower()}"


def test_verl_command_composes() -> None:
    """Hydra refuses an option that verl does not have; verl's own check reads the result."""
    hydra = pytest.importorskip("hydra", reason="hydra is not installed")
    verl = pytest.importorskip("verl", reason="verl is not installed")
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with hydra.initialize_config_dir(str(folder), version_base=None):
        config = hydra.compose("ppo_trainer", overrides())
        with pytest.raises(hydra.errors.ConfigCompositionException):
            hydra.compose("ppo_trainer", [*overrides(), "algorithm.no_such_option=1"])
    assert config.trainer.nnodes == 2
    assert config.actor_rollout_ref.rollout.n == 8
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    OmegaConf.resolve(config)
    validate_config(config, use_reference_policy=True, use_critic=False)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.policy_loss.loss_mode == "vanilla"
    assert actor.ppo_max_token_len_per_gpu == 16384


def test_verl_plugin_by_name() -> None:
    """What VERL_USE_EXTERNAL_MODULES of the script does in each process of verl."""
    pytest.importorskip("verl", reason="verl is not installed")
    program = "import verl; from fastrl.integrations import report; print(len(report()))"
    environment = os.environ | {
        "VERL_USE_EXTERNAL_MODULES": "fastrl.integrations.verl_plugin",
        "VERL_USE_EXTERNAL_PLUGINS": "none",
        "FASTRL_VERL": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 30
