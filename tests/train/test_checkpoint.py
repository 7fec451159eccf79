"""Checkpoints: exact, whole or not there, and damage is noticed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fastrl.train import checkpoint


def write(folder: Path, step: int, keep: int = 9) -> Path:
    tensors = {"a.safetensors": {"x": torch.arange(5) + step, "y": torch.full((2, 2), 0.1)}}
    return checkpoint.save(folder, step, tensors, {"algorithm": {"kl_coef": 0.1 * step}}, keep=keep)


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    path = write(tmp_path, 7)
    found = checkpoint.load_latest(tmp_path, pytest.fail)
    assert found is not None
    assert (found.step, found.path) == (7, path)
    assert torch.equal(found.tensors["a.safetensors"]["x"], torch.arange(5) + 7)
    assert found.state["algorithm"]["kl_coef"] == 0.1 * 7
    assert {p.suffix for p in path.iterdir()} == {".safetensors", ".json"}


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (2, 10, 100):
        write(tmp_path, step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000010", "step_000100"]
    found = checkpoint.load_latest(tmp_path, pytest.fail)
    assert found is not None
    assert found.step == 100


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    write(tmp_path, 3)
    write(tmp_path, 3)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000003"]


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


# Of a safetensors file: 8 bytes with the length of the header, the header, the numbers.
DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda p: cut(p / "a.safetensors", 0),
    "cut in the length": lambda p: cut(p / "a.safetensors", 5),
    "cut in the header": lambda p: cut(p / "a.safetensors", 20),
    "cut before the numbers": lambda p: cut(p / "a.safetensors", -56),
    "cut at the last byte": lambda p: cut(p / "a.safetensors", -1),
    "longer": lambda p: (p / "a.safetensors").write_bytes((p / "a.safetensors").read_bytes() + b"x"),
    "flipped in the length": lambda p: flip(p / "a.safetensors", 0),
    "flipped in the header": lambda p: flip(p / "a.safetensors", 12),
    "flipped in the numbers": lambda p: flip(p / "a.safetensors", -1),
    "missing": lambda p: (p / "a.safetensors").unlink(),
    "a folder": lambda p: ((p / "a.safetensors").unlink(), (p / "a.safetensors").mkdir()),
    "more files": lambda p: (p / "b.safetensors").write_bytes(b""),
    "state cut": lambda p: cut(p / "state.json", 10),
    "state flipped": lambda p: flip(p / "state.json", 12),
    "state missing": lambda p: (p / "state.json").unlink(),
    "manifest empty": lambda p: cut(p / "manifest.json", 0),
    "manifest cut": lambda p: cut(p / "manifest.json", 20),
    "manifest flipped": lambda p: flip(p / "manifest.json", 40),
    "manifest of zeros": lambda p: (p / "manifest.json").write_bytes(bytes(200)),
    "manifest no object": lambda p: (p / "manifest.json").write_text("[1]"),
    "manifest lists nothing": lambda p: (p / "manifest.json").write_text('{"format": 1, "files": {}}'),
    "manifest of strings": lambda p: (p / "manifest.json").write_text(
        '{"format": 1, "files": {"a.safetensors": "x", "state.json": "y"}}'
    ),
    "manifest missing": lambda p: (p / "manifest.json").unlink(),
    "nothing left": lambda p: [f.unlink() for f in p.iterdir()],
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_a_message(tmp_path: Path, damage: str) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    DAMAGES[damage](path)
    messages: list[str] = []
    found = checkpoint.load_latest(tmp_path, messages.append)
    assert found is not None
    assert found.step == 1
    assert len(messages) == 1
    assert "step_000002 is damaged and was passed over: " in messages[0]
    # Alone it is an error: a run that has checkpoints never begins anew by itself.
    shutil.rmtree(tmp_path / "step_000001")
    with pytest.raises(ValueError, match=r"all 1 checkpoints in .* are damaged; put a copy back"):
        checkpoint.load_latest(tmp_path, messages.append)
    assert checkpoint.exists(tmp_path)
    # The run that continues writes that step anew.
    write(tmp_path, 2)
    assert checkpoint.load_latest(tmp_path, pytest.fail) is not None


def test_a_damaged_checkpoint_does_not_count_as_the_newest(tmp_path: Path) -> None:
    write(tmp_path, 2)
    cut(write(tmp_path, 6) / "a.safetensors", 9)
    # Continued from step 2, with checkpoints at other steps than before.
    write(tmp_path, 4, keep=1)
    messages: list[str] = []
    found = checkpoint.load_latest(tmp_path, messages.append)
    assert found is not None
    assert found.step == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000004", "step_000006"]


def test_a_newer_format_is_not_damage(tmp_path: Path) -> None:
    write(tmp_path, 1)
    manifest = write(tmp_path, 2) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(
        ValueError, match=r"step_000002 has format 2, but .* reads up to 1; install"
    ):
        checkpoint.load_latest(tmp_path, pytest.fail)


def test_an_unfinished_write_is_no_checkpoint(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    path.rename(tmp_path / "step_000002.tmp")
    assert checkpoint.load_latest(tmp_path, pytest.fail) is None
    assert checkpoint.load_latest(tmp_path / "absent", pytest.fail) is None
    # The next write of that step takes the place of the unfinished one.
    write(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000002"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros(1))


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, other = Tied(), Tied()
    tensors = checkpoint.weights(module)
    assert list(tensors) == ["count", "embedding.weight"] or len(tensors) == 2
    checkpoint.load_weights(other, tensors)
    assert torch.equal(other.head.weight, module.embedding.weight)
    assert other.head.weight is other.embedding.weight
    with pytest.raises(ValueError, match="1 weights differ"):
        checkpoint.load_weights(nn.Linear(2, 3, bias=False), {})
    with pytest.raises(ValueError, match=r"must be \[3, 2\], got \[3, 4\]"):
        checkpoint.load_weights(nn.Linear(2, 3, bias=False), {"weight": torch.zeros(3, 4)})


def test_the_optimiser_continues_bit_for_bit(tmp_path: Path) -> None:
    def steps(module: nn.Module, optimizer: torch.optim.Optimizer, count: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        for _ in range(count):
            module(torch.randn(4, 3, generator=rng)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def fresh() -> tuple[nn.Linear, torch.optim.AdamW]:
        torch.manual_seed(0)
        module = nn.Linear(3, 2)
        return module, torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)

    module, optimizer = fresh()
    steps(module, optimizer, 3, seed=1)
    tensors = {
        "model.safetensors": checkpoint.weights(module),
        "optimizer.safetensors": checkpoint.optimizer_tensors(optimizer),
    }
    checkpoint.save(tmp_path, 3, tensors, {}, keep=1)
    steps(module, optimizer, 3, seed=2)

    twin, twin_optimizer = fresh()
    found = checkpoint.load_latest(tmp_path, pytest.fail)
    assert found is not None
    checkpoint.load_weights(twin, found.tensors["model.safetensors"])
    checkpoint.load_optimizer(twin_optimizer, found.tensors["optimizer.safetensors"])
    steps(twin, twin_optimizer, 3, seed=2)
    assert torch.equal(module.weight, twin.weight)
    assert torch.equal(module.bias, twin.bias)


def test_random_states_come_back(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [
            random.random(),
            random.gauss(0, 1),
            float(np.random.rand()),  # noqa: NPY002
            float(np.random.randn()),  # noqa: NPY002
            float(torch.rand(())),
        ]

    # An odd number of normal draws leaves one cached in each generator.
    random.gauss(0, 1)
    np.random.randn()  # noqa: NPY002
    checkpoint.save(tmp_path, 1, {"rng.safetensors": checkpoint.rng_tensors()}, {}, keep=1)
    expected = draw()
    draw()
    found = checkpoint.load_latest(tmp_path, pytest.fail)
    assert found is not None
    checkpoint.restore_rng(found.tensors["rng.safetensors"])
    assert draw() == expected


def test_the_manifest_lists_every_file(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())["files"]
    assert set(manifest) == {p.name for p in path.iterdir()} - {"manifest.json"}
    assert manifest["a.safetensors"]["bytes"] == (path / "a.safetensors").stat().st_size
