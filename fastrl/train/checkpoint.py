"""Checkpoints that are whole or not there, and that hold no code.

A checkpoint is a folder ``step_000010`` of safetensors and JSON files. It is written under a temporary
name, flushed to the disk and renamed, so a name without a suffix is a finished write. A manifest with
size and SHA-256 of every file detects what was damaged later; the one before it is then used. Where
checkpoints exist but none can be read, loading ends with an error: a run that is to be continued never
begins anew by itself.
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
from fastrl.train.storage import flush, writing

__all__ = [
    "Checkpoint",
    "exists",
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
_FORMAT = 1
"""Of the folder and its manifest; raised when an older version could not read what is written."""
_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What was saved: tensors by file and name, and JSON values."""

    step: int
    path: Path
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]

    def file(self, name: str) -> dict[str, Tensor]:
        """The tensors of one file. Raises ValueError when there is none of that name."""
        if name not in self.tensors:
            raise ValueError(
                f"checkpoint: {self.path} has no {name}, only {', '.join(sorted(self.tensors))}; resume "
                "with the algorithm and model the run was started with"
            )
        return self.tensors[name]


class NewerFormatError(ValueError):
    """The checkpoint was written by a later version."""


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
    with writing(final):
        folder.mkdir(parents=True, exist_ok=True)
        # Also what crashes left of other steps.
        for unfinished in folder.glob("step_*.tmp"):
            shutil.rmtree(unfinished, ignore_errors=True)
        try:
            _write(draft, {"step": step, **state}, tensors)
        except BaseException:
            # A full disk is not to stay full because of half a checkpoint.
            shutil.rmtree(draft, ignore_errors=True)
            raise
        shutil.rmtree(final, ignore_errors=True)
        os.rename(draft, final)
        flush(folder)
        # The old ones go only now, when the new one is safe. Those of later steps are damaged, or this
        # one would not have been written: they must not count as the newest.
        for _, path in [(s, path) for s, path in _finished(folder) if s <= step][keep:]:
            shutil.rmtree(path)
    return final


def _write(
    draft: Path, state: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]
) -> None:
    draft.mkdir()
    for name, group in tensors.items():
        save_file({k: v.detach().cpu().contiguous() for k, v in group.items()}, draft / name)
    (draft / "state.json").write_text(json.dumps(state, indent=1))
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": _digest(file)}
        for file in sorted(draft.iterdir())
    }
    (draft / _MANIFEST).write_text(json.dumps({"format": _FORMAT, "files": files}, indent=1))
    for file in draft.iterdir():
        flush(file)
    flush(draft)


def exists(folder: Path) -> bool:
    """Whether `folder` holds a checkpoint, damaged or not."""
    return bool(_finished(folder))


def load_latest(folder: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint in `folder` that is undamaged; None where none was ever written.

    `report` is told of every damaged one that was passed over, and why. Raises ValueError when all are
    damaged, and when the newest was written by a version of fastrl whose format this one does not know.
    """
    finished = _finished(folder)
    for step, path in finished:
        try:
            tensors, state = _read(path)
        except NewerFormatError:
            raise
        except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
            report(f"checkpoint {path.name} is damaged and was passed over: {error}")
            continue
        return Checkpoint(step=step, path=path, tensors=tensors, state=state)
    if finished:
        raise ValueError(
            f"checkpoint: all {len(finished)} checkpoints in {folder} are damaged; put a copy back, or "
            "move the folder away to begin at step 0"
        )
    return None


def _read(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Tensors and state of one checkpoint, every byte of it verified."""
    manifest = json.loads((path / _MANIFEST).read_bytes())
    if isinstance(manifest["format"], int) and manifest["format"] > _FORMAT:
        # Not damaged: to pass it over would continue from an older step and write over this one.
        raise NewerFormatError(
            f"checkpoint: {path} has format {manifest['format']}, but this version of fastrl reads up to "
            f"{_FORMAT}; install the version that wrote it, or move it away to continue from an older one"
        )
    names = {file.name for file in path.iterdir()} - {_MANIFEST}
    if different := names ^ set(manifest["files"]):
        raise ValueError(f"{sorted(different)[0]!r} is in the folder or the manifest alone")
    for name, expected in manifest["files"].items():
        _verify(path / name, expected)
    tensors = {n: load_file(path / n) for n in names if n.endswith(".safetensors")}
    return tensors, json.loads((path / "state.json").read_bytes())


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


# --- what is saved -----------------------------------------------------------------------------


def weights(module: nn.Module) -> dict[str, Tensor]:
    """The state dict of `module` with each shared tensor (tied embeddings) once, under its first name.

    Where only some parameters are trained (adapters), the others are left out: they are those of the
    model that the configuration names. Where none is, as in a copy for sampling, nothing is left out.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    is_trained = any(p.requires_grad for p in parameters.values())
    frozen = {n for n, p in parameters.items() if is_trained and not p.requires_grad}
    seen: set[int] = set()
    result = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name in frozen:
            continue
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
