"""Data is data: no pickle, no eval, and what is loaded from a file or a configuration runs nothing."""

from __future__ import annotations

import ast
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import fastrl
from fastrl import cli
from fastrl.envs import read_trajectories
from fastrl.train import checkpoint
from fastrl.train import config as configs
from fastrl.train.models import load_policy

PACKAGE = Path(fastrl.__file__).parent

# Modules and functions that run, or may run, what is in the data that they read.
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
CALLS = {
    "torch.load", "torch.save", "eval", "exec", "compile", "__import__", "numpy.load", "np.load",
    "torch.hub.load", "pandas.read_pickle",
}  # fmt: skip
ANYWHERE = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "from_pickle",
}  # fmt: skip
# Code comes by import path, from here alone.
IMPORTS_BY_NAME = {"envs/tasks.py", "envs/env.py"}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def findings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").partition(".")[0]}
        else:
            names = set()
        yield from sorted(names & MODULES)
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in CALLS or name.rpartition(".")[2] in ANYWHERE:
                yield name
            yield from (f"{k.arg}=True" for k in node.keywords if k.arg in ("trust_remote_code", "allow_pickle")
                        and not (isinstance(k.value, ast.Constant) and k.value.value is False))  # fmt: skip


def test_the_search_finds_what_it_looks_for() -> None:
    for line in (
        "import pickle", "from pickle import loads", "import torch\ntorch.load(f)", "eval('1')", "exec(x)",
        "import yaml", "dist.all_gather_object(a, b)", "np.load(f, allow_pickle=True)",
        "m.from_pretrained(x, trust_remote_code=True)",
    ):  # fmt: skip
        assert list(findings(line)), line
    assert not list(
        findings("model.eval()\nre.compile('a')\nload_file(x)\nf(trust_remote_code=False)")
    )


def test_the_package_has_none_of_it() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 80
    found = {str(f.relative_to(PACKAGE)): list(findings(f.read_text())) for f in files}
    assert {name: what for name, what in found.items() if what} == {}
    importing = {
        str(f.relative_to(PACKAGE)) for f in files
        if str(f.relative_to(PACKAGE)).startswith(("envs", "train")) and "import_module(" in f.read_text()
    }  # fmt: skip
    assert importing == IMPORTS_BY_NAME


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, int]]:
        return os.mkdir, (str(self.mark), 0o700)


def test_the_bomb_goes_off(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["a.safetensors", "state.json", "manifest.json", "b.bin"])
def test_a_checkpoint_runs_nothing(tmp_path: Path, name: str) -> None:
    mark = tmp_path / "mark"
    folder = tmp_path / "checkpoints"
    path = checkpoint.save(folder, 1, {"a.safetensors": {"x": torch.ones(2)}}, {}, keep=1)
    bomb = pickle.dumps(Bomb(mark))
    if name == "b.bin":
        torch.save(Bomb(mark), path / name)
    else:
        (path / name).write_bytes(bomb)
    # The manifest agrees with the damage, as that of whoever planted it would.
    if name != "manifest.json":
        import hashlib

        files = {
            f.name: {"bytes": f.stat().st_size, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()}
            for f in path.iterdir() if f.name != "manifest.json"
        }  # fmt: skip
        (path / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))
    said: list[str] = []
    if name == "b.bin":
        found = checkpoint.load_latest(folder, said.append)
        assert found is not None
        assert list(found.tensors) == ["a.safetensors"]
    else:
        with pytest.raises(ValueError, match="all 1 checkpoints in"):
            checkpoint.load_latest(folder, said.append)
    assert not mark.exists()


def test_trajectories_run_nothing(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    for data in (pickle.dumps(Bomb(tmp_path / "mark")), b'{"__reduce__": "os.mkdir"}\n', b"__import__('os').mkdir('mark')\n"):  # fmt: skip
        file.write_bytes(data)
        with pytest.raises(ValueError, match=r"Trajectory|JSON|decode|Expecting"):
            list(read_trajectories(file))
    assert not (tmp_path / "mark").exists()


def test_a_configuration_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "mark"
    code = f"__import__('os').mkdir({str(mark)!r})"
    for text in (
        f'run_dir = "{code}"',
        f'[task]\ntemplate = "{{question.__class__.__init__}} {code}"',
        f'[task.params]\nlength = "!!python/object/apply:os.mkdir [{mark}]"',
    ):
        file = tmp_path / "c.toml"
        file.write_text(text)
        configs.load(file)
    configs.load(file, [f"run_dir={code}", f"task.template={{question}} ${{{code}}}"])
    # What imports must be an import path, and is imported, not evaluated.
    for override in (
        f"task.source={code}",
        f'task.rewards=[{{function="{code}"}}]',
        f"env.source={code}",
    ):
        file.write_text("steps = 0")
        arguments = ["train", str(file), "--run-dir", str(tmp_path / "run"), "--set", override]
        assert cli.main(arguments) == 1
        assert "fastrl: " in capsys.readouterr().err
    assert not mark.exists()


def test_a_model_folder_runs_nothing(tmp_path: Path) -> None:
    """Neither pickled weights nor the code that a folder brings along."""
    mark, folder = tmp_path / "mark", tmp_path / "model"
    policy = load_policy(configs.ModelConfig(hidden_size=32), seed=0, device=torch.device("cpu"))
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Bomb(mark)}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"cannot load model\.source|safetensors"):
        load_policy(configs.ModelConfig(source=str(folder)), seed=0, device=torch.device("cpu"))
    assert not mark.exists()
    description = json.loads((folder / "config.json").read_text())
    description |= {"model_type": "planted", "auto_map": {"AutoConfig": "planted.C", "AutoModelForCausalLM": "planted.M"}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(description))
    (folder / "planted.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    with pytest.raises(ValueError, match=r"planted|trust_remote_code|cannot load"):
        load_policy(configs.ModelConfig(source=str(folder)), seed=0, device=torch.device("cpu"))
    assert not mark.exists()
