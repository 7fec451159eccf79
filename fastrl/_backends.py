"""Which implementation of an op runs: ``auto`` takes the best available, a name runs or raises."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from fastrl import _library
from fastrl.errors import ImplementationError

IMPLEMENTATIONS = ("cpu", "cuda", "triton", "reference")

# Read once: the choice must not cost a look-up in the environment at every call. `fastrl info` prints it.
_AUTO_OVERRIDE = os.environ.get("FASTRL_IMPL", "auto")


class Preference(NamedTuple):
    """Best first, and why in this order."""

    order: tuple[str, ...]
    reason: str


_ON_CPU = Preference(("cpu", "reference"), "the compiled kernels are measured faster")
_LAUNCH_BOUND = Preference(
    ("cuda", "triton", "reference"),
    "not measured against each other yet; a launch from C++ costs less, which decides at small sizes",
)
_BANDWIDTH_BOUND = Preference(
    ("triton", "cuda", "reference"),
    "not measured against each other yet; a row of logits is large enough to hide a launch",
)
_ON_CUDA = {"token_logprobs": _BANDWIDTH_BOUND}
_ELSEWHERE = Preference(("reference",), "there are no kernels for this device")

_chosen: dict[tuple[str, str, str], str] = {}


def preference(op: str, device_type: str) -> Preference:
    """What ``auto`` tries for ``op`` on this kind of device."""
    if device_type == "cpu":
        return _ON_CPU
    return _ON_CUDA.get(op, _LAUNCH_BOUND) if device_type == "cuda" else _ELSEWHERE


def unavailable(op: str, impl: str, device_type: str) -> str | None:
    """Why ``impl`` cannot run ``op`` on this kind of device, or None when it can."""
    if impl == "reference":
        return None
    if impl == "cpu":
        if device_type != "cpu":
            return f"it reads CPU memory and the tensors are on {device_type}"
        if _library.compiled_error is not None:
            return f"fastrl._C is not loaded ({_library.compiled_error})"
        return None if _library.has_kernel(op, "CPU") else "this build has no CPU kernel for it"
    if impl == "cuda":
        return _cuda_unavailable(op, device_type)
    if impl == "triton":
        return _triton_unavailable(op, device_type)
    raise ImplementationError(
        f"{op}: impl must be one of auto, {', '.join(IMPLEMENTATIONS)}, got {impl!r}"
    )


def _cuda_unavailable(op: str, device_type: str) -> str | None:
    if _library.compiled_error is not None:
        return f"fastrl._C is not loaded ({_library.compiled_error})"
    if not _library.has_kernel(op, "CUDA"):
        return "fastrl._C was built without CUDA (needs nvcc; build with FASTRL_CUDA=1)"
    if device_type != "cuda":
        return f"built, but it reads CUDA memory and the tensors are on {device_type}"
    return None


def _triton_unavailable(op: str, device_type: str) -> str | None:
    if not _library.triton_installed:
        return "triton is not installed (pip install triton)"
    if not _library.has_triton_kernel(op):
        return "there is no Triton kernel for it"
    if device_type == "cuda" or (device_type == "cpu" and _library.triton_interprets):
        return None
    if device_type == "cpu":
        return (
            "its kernels run on GPUs; TRITON_INTERPRET=1 in the environment interprets them on CPU"
        )
    return f"its kernels run on GPUs and the tensors are on {device_type}"


def resolve(op: str, impl: str, device: torch.device) -> str:
    """Return the implementation to run; raise ``ImplementationError`` when the one asked for cannot.

    ``FASTRL_IMPL`` (read when fastrl is imported) replaces ``"auto"``; an explicit ``impl=`` argument wins over it.
    """
    if torch.compiler.is_compiling():  # a trace must not depend on what earlier calls have cached
        return _resolve(op, impl, device.type)
    key = (op, impl, device.type)
    found = _chosen.get(key)
    if found is None:
        found = _chosen[key] = _resolve(op, impl, device.type)
    return found


def _resolve(op: str, impl: str, device_type: str) -> str:
    wanted = _AUTO_OVERRIDE if impl == "auto" else impl
    if wanted == "auto":
        order = preference(op, device_type).order
        return next(name for name in order if unavailable(op, name, device_type) is None)
    reason = unavailable(op, wanted, device_type)
    if reason is None:
        return wanted
    available = [n for n in IMPLEMENTATIONS if unavailable(op, n, device_type) is None]
    raise ImplementationError(
        f"{op}: impl={wanted!r} cannot run: {reason}; available on {device_type}: {', '.join(available)}. "
        "Pass impl='auto' to let fastrl choose"
    )
