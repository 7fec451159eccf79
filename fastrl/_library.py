"""The ``fastrl`` operator library: schemas and fake kernels in Python, compiled kernels from ``fastrl._C``.

Schemas are defined here so that every operator exists even where nothing was compiled: tracing, ``opcheck`` and
``fastrl.info`` then work the same everywhere, and the compiled module only adds implementations.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("fastrl", "DEF")
_DISPATCH_KEYS = ("CPU",)

# Filled when an operator is defined: a look-up in a dict can be traced, a question to the dispatcher cannot.
_kernels: dict[str, tuple[str, ...]] = {}
# Operators written in Python over other operators, and those.
_parts: dict[str, tuple[str, ...]] = {}


def define(name: str, signature: str, fake: Callable[..., Any]) -> None:
    """Declare operator ``fastrl::name`` with its schema and the function that gives output shapes and dtypes."""
    _LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"fastrl::{name}", fake, lib=_LIBRARY)
    _kernels[name] = tuple(
        key
        for key in _DISPATCH_KEYS
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"fastrl::{name}", key)
    )


def compose(
    name: str,
    signature: str,
    fake: Callable[..., Any],
    function: Callable[..., Any],
    parts: tuple[str, ...],
) -> None:
    """Declare ``fastrl::name`` as Python code over the operators ``parts``: it has a kernel where all of them have one."""
    define(name, signature, fake)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    _parts[name] = parts


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """Results are float32, float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def has_kernel(name: str, dispatch_key: str) -> bool:
    """Whether the compiled module implements ``fastrl::name`` for a dispatch key such as ``"CPU"``."""
    return all(dispatch_key in _kernels.get(part, ()) for part in _parts.get(name, (name,)))


def _load_compiled() -> str | None:
    """Import the compiled module, which registers its kernels; return why that failed, or None."""
    try:
        importlib.import_module("fastrl._C")
    except ImportError as error:
        return str(error)
    return None


# None when the compiled module is loaded, otherwise the reason it is not.
compiled_error: str | None = _load_compiled()
