"""Diagnosis on planted failures, advice, replay, and groups without variance left out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastrl import cli
from fastrl.envs import read_trajectories
from fastrl.train import config as configs
from fastrl.train.advise import QUESTIONS, advise
from fastrl.train.config import Config
from fastrl.train.diagnose import Watch, diagnose
from fastrl.train.loop import train
from fastrl.train.replay import replay

HEALTHY: dict[str, float] = {
    "group/zero_variance": 0.1,
    "group/mixed": 0.0,
    "group/size_mean": 8.0,
    "group/std_min": 0.2,
    "completion/length_mean": 40.0,
    "completion/finished": 0.9,
    "policy/entropy": 1.0,
    "kl/ref": 0.05,
    "policy/ratio_max": 1.0,
    "sampler/logp_gap": 0.001,
    "policy/clip_fraction": 0.05,
    "reward/trivial": 0.1,
    "episode/failed": 0.0,
    "reward/failed": 0.0,
}


def steps(count: int = 60, **changed: float) -> list[dict[str, float]]:
    """A healthy run whose reward rises, with single metrics replaced from the middle on."""
    names = {k.replace("__", "/"): v for k, v in changed.items()}
    return [
        {"step": i, **HEALTHY, "reward/mean": i / count, **(names if i > count // 2 else {})}
        for i in range(1, count + 1)
    ]


PRETRAINED = {"model": {"source": "some-model"}}

PLANTED: list[tuple[str, dict[str, Any], dict[str, float]]] = [
    ("groups without variance", {}, {"group__zero_variance": 0.9}),
    ("groups mix tasks", {}, {"group__mixed": 0.25}),
    ("groups too small", {}, {"group__size_mean": 2.0}),
    ("tiny standard deviations are amplified", {}, {"group__std_min": 0.001}),
    ("long answers smear the credit", {}, {"completion__length_mean": 2000.0}),
    ("most completions are cut", PRETRAINED, {"completion__finished": 0.05}),
    ("entropy has collapsed", {}, {"policy__entropy": 0.001}),
    ("far from the reference", {}, {"kl__ref": 5.0}),
    ("on-policy ratio is not 1", {}, {"policy__ratio_max": 1.2}),
    ("the sampler disagrees with the trainer", {}, {"sampler__logp_gap": 0.5}),
    ("updates are too large", {}, {"policy__clip_fraction": 0.6}),
    ("one answer satisfies the rewards", {}, {"reward__trivial": 0.9}),
    ("rewards fail", {}, {"reward__failed": 0.01}),
    ("environments fail", {}, {"episode__failed": 0.5}),
    ("the critic explains nothing", {"algorithm": "ppo"}, {"value__explained_variance": -0.5}),
    ("nothing is learnt", {}, {"reward__mean": 0.0}),
]


def test_a_healthy_run_has_no_findings() -> None:
    assert diagnose(steps(), configs.parse(PRETRAINED)) == []
    assert diagnose([], Config()) == []


@pytest.mark.parametrize(("name", "options", "changed"), PLANTED, ids=[p[0] for p in PLANTED])
def test_a_planted_failure_is_named_alone(
    name: str, options: dict[str, Any], changed: dict[str, float]
) -> None:
    findings = diagnose(steps(**changed), configs.parse(options))
    assert [f.name for f in findings] == [name]
    metric, value = next(iter(changed.items()))
    assert f"{metric.replace('__', '/')} at step 60: {value:.4g}" in findings[0].evidence
    assert findings[0].meaning
    assert findings[0].remedy


def test_several_updates_may_move_the_ratio() -> None:
    config = configs.parse({"optim": {"epochs": 2}})
    assert diagnose(steps(policy__ratio_max=1.2), config) == []


def test_each_finding_is_said_once() -> None:
    watch = Watch(Config())
    said = [f.name for record in steps(group__mixed=1.0) for f in watch.step(record)]
    assert said == ["groups mix tasks"]


def test_every_advice_is_a_configuration() -> None:
    names = list(QUESTIONS)
    proposals = set()
    for answers in itertools.product(*(QUESTIONS[n][1] for n in names)):
        text = advise(**dict(zip(names, answers, strict=True)))  # type: ignore[arg-type]
        configs.parse(configs.tomllib.loads(text))
        proposals.add(text)
    assert len(proposals) > 4


def test_commands(tmp_path: Path, small: Callable[..., Config], capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    train(small("grpo", "steps=2", "log.samples_every=1", "log.samples=16"), tmp_path)
    capsys.readouterr()
    assert cli.main(["doctor", str(tmp_path)]) == 0
    assert capsys.readouterr().out
    assert cli.main(["replay", str(tmp_path / "samples.jsonl")]) == 0
    assert "0 of 32 rewards changed" in capsys.readouterr().out
    assert cli.main(["advise", "--verifiable", "yes", "--samples", "cheap", "--rewards", "end", "--memory", "no"]) == 0  # fmt: skip
    assert 'algorithm = "grpo"' in capsys.readouterr().out
    assert cli.main(["advise", "--verifiable", "yes"]) == 1
    assert cli.main(["doctor", str(tmp_path / "none")]) == 1


def test_replay_finds_a_changed_reward_and_the_advantages(
    tmp_path: Path, small: Callable[..., Config]
) -> None:
    config = small("grpo", "steps=1", "log.samples_every=1", "log.samples=16", "grpo.scale=none")
    train(config, tmp_path)
    file = tmp_path / "samples.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[3]["reward"] += 0.5
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = replay(file, config)
    assert [r.changed for r in result] == [i == 3 for i in range(16)]
    group = [r for r in result if r.record.uid == result[0].record.uid]
    mean = sum(r.reward or 0.0 for r in group) / len(group)
    assert [r.advantage for r in group] == pytest.approx([(r.reward or 0.0) - mean for r in group])


def test_replay_plays_an_environment_again(tmp_path: Path, small: Callable[..., Config]) -> None:
    config = small(
        "grpo", "env.source=guess_number", "model.alphabet=0123456789abcdef<>?", "steps=2",
        "rollout.max_new_tokens=1", "log.samples_every=1", "log.samples=16", "grpo.credit=turn",
    )  # fmt: skip
    train(config, tmp_path)
    records = list(read_trajectories(tmp_path / "samples.jsonl"))
    assert len(records) == 32
    assert not any(r.changed for r in replay(tmp_path / "samples.jsonl", config))
    other = configs.parse({**configs.tomllib.loads(configs.dumps(config)), "seed": 5})
    assert any(r.changed for r in replay(tmp_path / "samples.jsonl", other))


def test_groups_without_variance_are_left_out(tmp_path: Path, small: Callable[..., Config]) -> None:
    train(small("grpo", "steps=3", "filter.groups=true", "filter.max_rounds=3"), tmp_path)
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert record["group/zero_variance"] == 0.0
        assert record["group/size_mean"] == 4.0


def test_a_step_may_keep_no_group(tmp_path: Path, small: Callable[..., Config]) -> None:
    config = small("grpo", "steps=2", "filter.groups=true", "task.rewards=[{function='tests.train.rewards:nan_always'}]")  # fmt: skip
    assert train(config, tmp_path) == (2, 0)
