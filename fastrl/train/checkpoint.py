"""Checkpoints that are whole or not there, and that hold no code.

A checkpoint is a folder ``step_000010`` of safetensors and JSON files. It is written under a temporary
name, flushed to the disk and renamed, so a name without a suffix is a finished write. A manifest with
size and SHA-256 of every file detects what was damaged later; the one before it is then used.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastrl.train.sharding import laid_out_like

__all__ = [
    "Checkpoint",
    "load_latest",
    "load_optimizer",
    "load_weights",
    "optimizer_tensors",
    "restore_rng",
    "rng_tensors",
    "save",
    "weights",
]

_MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What was saved: tensors by file and name, and JSON values."""

    step: int
    path: Path
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    *,
    keep: int,
) -> Path:
    """Write the checkpoint of `step` into `folder`, then remove all but the newest `keep`.

    `tensors` has one entry per safetensors file. A checkpoint of the same step is replaced.
    """
    final = folder / f"step_{step:06d}"
    draft = folder / f"{final.name}.tmp"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    for name, group in tensors.items():
        save_file({k: v.detach().cpu().contiguous() for k, v in group.items()}, draft / name)
    (draft / "state.json").write_text(json.dumps({"step": step, **state}, indent=1))
    manifest = {
        file.name: {"bytes": file.stat().st_size, "sha256": _digest(file)}
        for file in sorted(draft.iterdir())
    }
    (draft / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    for file in draft.iterdir():
        _flush(file)
    _flush(draft)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(draft, final)
    _flush(folder)
    # The old ones go only now, when the new one is safe.
    for _, path in _finished(folder)[keep:]:
        shutil.rmtree(path)
    return final


def load_latest(folder: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint in `folder` that is undamaged; None without one.

    `report` is told of every damaged one that was passed over, and why.
    """
    for step, path in _finished(folder):
        try:
            manifest = json.loads((path / _MANIFEST).read_text())
            for name, expected in manifest.items():
                _verify(path / name, expected)
            tensors = {n: load_file(path / n) for n in manifest if n.endswith(".safetensors")}
            state = json.loads((path / "state.json").read_text())
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            report(f"checkpoint {path.name} is damaged and was passed over: {error}")
            continue
        return Checkpoint(step=step, path=path, tensors=tensors, state=state)
    return None


def _finished(folder: Path) -> list[tuple[int, Path]]:
    """Steps and paths of the finished checkpoints, newest first."""
    if not folder.is_dir():
        return []
    matches = [(match, p) for p in folder.iterdir() if (match := _NAME.fullmatch(p.name))]
    return sorted(((int(match[1]), path) for match, path in matches), reverse=True)


def _verify(file: Path, expected: Mapping[str, Any]) -> None:
    size = file.stat().st_size
    if size != expected["bytes"]:
        raise ValueError(f"{file.name} must have {expected['bytes']} bytes, got {size}")
    if _digest(file) != expected["sha256"]:
        raise ValueError(f"{file.name} does not have the SHA-256 of the manifest")


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    """Wait until `path`, a file or the entries of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- what is saved -----------------------------------------------------------------------------


def weights(module: nn.Module) -> dict[str, Tensor]:
    """The state dict of `module` with each shared tensor (tied embeddings) once, under its first name."""
    seen: set[int] = set()
    result = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        # A shard may be empty on some ranks, but all must find the same names.
        place = id(tensor) if isinstance(tensor, DTensor) else tensor.data_ptr()
        # Empty tensors all have address 0 and are not shared.
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        result[name] = tensor.detach()
    return result


def load_weights(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy what `weights` returned into `module`. Raises ValueError when names or shapes differ."""
    own = weights(module)
    if set(own) != set(tensors):
        names = sorted(set(own) ^ set(tensors))
        raise ValueError(
            f"checkpoint: {len(names)} weights differ from those of the model, first {names[0]!r}; "
            "resume with the model the run was started with"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor.shape != tensors[name].shape:
                raise ValueError(
                    f"checkpoint: weight {name} must be {list(tensor.shape)}, got "
                    f"{list(tensors[name].shape)}; resume with the model the run was started with"
                )
            tensor.copy_(laid_out_like(tensors[name], tensor))


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of every parameter as "number.name"; learning rates come from the configuration."""
    state = optimizer.state_dict()["state"]
    return {f"{i}.{key}": value for i, entry in state.items() for key, value in entry.items()}


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` returned."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, key = name.partition(".")
        if tensor.shape == parameters[int(number)].shape:
            tensor = laid_out_like(tensor, parameters[int(number)])
        state.setdefault(int(number), {})[key] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def rng_tensors() -> dict[str, Tensor]:
    """The states of the random generators of Python, NumPy and torch, CUDA devices included."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    _, keys, position, has_gauss, cached = numpy_state
    return {
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
        **{f"cuda.{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())},
    }


def restore_rng(tensors: Mapping[str, Tensor]) -> None:
    """Put back what `rng_tensors` returned."""
    version, *words = tensors["python"].tolist()
    gauss = tensors["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    *keys, position, has_gauss = tensors["numpy"].tolist()
    cached = float(tensors["numpy_gauss"])
    state = ("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached)
    np.random.set_state(state)  # noqa: NPY002
    torch.set_rng_state(tensors["torch"])
    for i in range(torch.cuda.device_count()):
        if f"cuda.{i}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda.{i}"], i)
