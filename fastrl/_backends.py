"""Which implementation of an op runs: ``auto`` takes the best available, a name runs or raises."""

from __future__ import annotations

import os

import torch

from fastrl import _library
from fastrl.errors import ImplementationError

IMPLEMENTATIONS = ("cpu", "cuda", "triton", "reference")

# Read once: the choice must not cost a look-up in the environment at every call. `fastrl info` prints it.
_AUTO_OVERRIDE = os.environ.get("FASTRL_IMPL", "auto")

# Best first, by device type. Devices that are not listed use the reference.
_PREFERENCE = {"cpu": ("cpu", "reference"), "cuda": ("reference",)}

_chosen: dict[tuple[str, str, str], str] = {}


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
        return "this version has no CUDA kernels yet"
    if impl == "triton":
        return "this version has no Triton kernels yet"
    raise ImplementationError(
        f"{op}: impl must be one of auto, {', '.join(IMPLEMENTATIONS)}, got {impl!r}"
    )


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
        preference = _PREFERENCE.get(device_type, ("reference",))
        return next(name for name in preference if unavailable(op, name, device_type) is None)
    reason = unavailable(op, wanted, device_type)
    if reason is None:
        return wanted
    available = [n for n in IMPLEMENTATIONS if unavailable(op, n, device_type) is None]
    raise ImplementationError(
        f"{op}: impl={wanted!r} cannot run: {reason}; available on {device_type}: {', '.join(available)}. "
        "Pass impl='auto' to let fastrl choose"
    )
