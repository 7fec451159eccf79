"""The functions of real trainers, imported when asked for: a peer that is not installed is reported by name."""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

# verl would load the plugin of an installed fastrl and be compared with itself.
os.environ.setdefault("FASTRL_VERL", "0")


class MissingPeer(Exception):
    """A peer cannot be imported; the message says which and why."""


@cache
def _module(name: str) -> ModuleType:
    package = name.partition(".")[0]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(name)
    except Exception as error:  # a peer may fail in any way while it is imported
        raise MissingPeer(f"{package}: {type(error).__name__}: {error}") from error


def verl_algorithms() -> ModuleType:
    """verl's advantage estimators and losses."""
    return _module("verl.trainer.ppo.core_algos")


def verl_functional() -> ModuleType:
    """verl's masked statistics and log-probabilities."""
    return _module("verl.utils.torch_functional")


def liger_grpo() -> Any:
    """Liger-Kernel's chunked GRPO loss over an lm_head, which is plain torch and runs on CPU."""
    return _module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss


def trl_chunked_logprobs() -> Any:
    """TRL's log-probabilities over an lm_head in tiles of the vocabulary; torch operations where there is no Triton device."""
    module = _module("trl.kernels.chunked_logprob")
    if not hasattr(module, "ChunkedLogProbFunction"):
        raise MissingPeer("trl: this version has no ChunkedLogProbFunction; install trl==1.16.0")
    return module.ChunkedLogProbFunction


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
