"""The configuration tree: overrides, refusals, and writing it back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fastrl.train import config as configs
from fastrl.train.config import Config, RewardConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_committed_configurations_load_and_survive_writing(path: Path) -> None:
    config = configs.load(path)
    assert configs.parse(tomllib.loads(configs.dumps(config))) == config


def test_writing_keeps_every_kind_of_value() -> None:
    config = configs.parse(
        {
            "run_dir": 'a "quoted" \\ path\nwith ünicode',
            "task": {
                "params": {"names": ["a", "b"], "deep": {"x y": 1.5, "on": True}},
                "rewards": [{"function": "a:b", "weight": 0.25}, {"name": "n"}],
            },
            "optim": {"lr": 1e-7, "max_grad_norm": "none", "betas": [0.5, 0.75]},
            "loss": {"dual_clip": 3},
        }
    )
    assert config.optim.max_grad_norm is None
    assert config.loss.dual_clip == 3.0
    assert config.task.rewards[1] == RewardConfig(name="n")
    assert configs.parse(tomllib.loads(configs.dumps(config))) == config


def test_overrides_are_typed(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[task]\nrewards = [{ function = "a:b" }]\n[kl]\ntarget = 0.1\n')
    config = configs.load(
        path,
        [
            "optim.lr=1e-4",
            "optim.epochs = 3",
            "model.source=smollm2-135m",
            "kl.target=none",
            "model.share_prompts=false",
            "task.params={min_terms = 2}",
            "task.params.max_terms=3",
            "task.rewards.0.weight=0.5",
            "ppo.value_clip=1",
        ],
    )
    assert config.optim.lr == 1e-4
    assert config.optim.epochs == 3
    assert config.model.source == "smollm2-135m"
    assert config.model.share_prompts is False
    assert config.kl.target is None
    assert config.task.params == {"min_terms": 2, "max_terms": 3}
    assert config.task.rewards[0].weight == 0.5
    assert isinstance(config.ppo.value_clip, float)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"optim": {"learning_rate": 1}},
            r"unknown key optim\.learning_rate; did you mean optim\.lr",
        ),
        ({"optm": {}}, "unknown key optm; did you mean optim"),
        ({"temperature": 1}, "did you mean rollout.temperature"),
        ({"kl": {"coeff": 1}}, "did you mean kl.coef"),
        ({"optim": {"lr": "fast"}}, r"optim\.lr must be a number, got 'fast' \(str\)"),
        ({"steps": 1.5}, r"steps must be an integer, got 1\.5"),
        ({"steps": True}, "steps must be an integer, got True"),
        ({"algorithm": "sac"}, "algorithm must be one of grpo, ppo, got 'sac'"),
        ({"optim": {"betas": [1]}}, "must have 2 values, got 1"),
        ({"optim": 3}, "optim must be a table"),
        ({"task": {"rewards": [{"wait": 1}]}}, r"unknown key task\.rewards\.0\.wait"),
        ({"rollout": {"temperature": 0}}, "temperature must be positive.*eval.greedy"),
        ({"optim": {"mini_batches": 99}}, r"at most rollout\.prompts = 16"),
        ({"rollout": {"samples": 1}}, "at least 2 for grpo"),
        ({"task": {"template": "no question"}}, "must contain {question}"),
        ({"rollout": {"prompts": 0}}, r"rollout\.prompts must be at least 1, got 0"),
    ],
)
def test_refusals_name_key_value_and_remedy(tree: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configs.parse(tree)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr", "reads key=value"),
        ("steps.x=1", "steps is a value"),
        ("task.rewards.7.weight=1", "position below 1"),
    ],
)
def test_bad_overrides(tmp_path: Path, override: str, message: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text("steps = 1\n[task]\nrewards = [{}]\n")
    with pytest.raises(ValueError, match=message):
        configs.load(path, [override])


def test_invalid_toml_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("steps =")
    with pytest.raises(ValueError, match=r"broken\.toml is not valid TOML"):
        configs.load(path)


def test_every_field_has_a_sentence_and_the_tree_is_frozen() -> None:
    lines = configs.describe().splitlines()
    assert len(lines) > 60
    for line in lines:
        assert line.partition("  # ")[2].strip(), line
    with pytest.raises(AttributeError):
        Config().steps = 3  # type: ignore[misc]
