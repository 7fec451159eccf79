"""The ``fastrl`` operators: schemas and fake kernels in Python, compiled kernels from ``fastrl._C``, Triton's in Python.

Schemas are defined here so that every operator exists even where nothing was compiled: tracing, ``opcheck`` and
``fastrl.info`` then work the same everywhere, and the compiled module only adds implementations.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import library as torch_library

# The dispatcher holds one kernel per operator and device, so Triton's have operators of their own beside those of C++.
_COMPILED = torch_library.Library("fastrl", "DEF")
_TRITON = torch_library.Library("fastrl_triton", "DEF")
_DISPATCH_KEYS = ("CPU", "CUDA")

# One operator per implementation: "cpu" and "cuda" are one operator of which the dispatcher picks the kernel.
Operators = dict[str, Callable[..., Any]]


class Definition(NamedTuple):
    """What defines an operator, kept so that tests can run other builds of its kernels under names of their own."""

    signature: str
    fake: Callable[..., Any]
    operators: Operators


class Composition(NamedTuple):
    """An operator written in Python, and the operators that it calls."""

    function: Callable[..., Any]
    parts: tuple[str, ...]


definitions: dict[str, Definition] = {}

# Filled when an operator is defined: a look-up in a dict can be traced, a question to the dispatcher cannot.
_kernels: dict[str, tuple[str, ...]] = {}
_triton_kernels: set[str] = set()
# Operators written in Python over other operators, and those.
compositions: dict[str, Composition] = {}


def define(name: str, signature: str, fake: Callable[..., Any]) -> Operators:
    """Declare operator ``name`` with its schema and the function that gives output shapes and dtypes."""
    for library, namespace in ((_COMPILED, "fastrl"), (_TRITON, "fastrl_triton")):
        library.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
        torch_library.register_fake(f"{namespace}::{name}", fake, lib=library)
    _kernels[name] = tuple(
        key
        for key in _DISPATCH_KEYS
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"fastrl::{name}", key)
    )
    compiled = getattr(torch.ops.fastrl, name).default
    triton = getattr(torch.ops.fastrl_triton, name).default
    operators = {"cpu": compiled, "cuda": compiled, "triton": triton}
    definitions[name] = Definition(signature, fake, operators)
    return operators


def implement_in_triton(name: str, module: str) -> None:
    """Let function ``name`` of ``module`` implement the operator; Triton is imported by the first call."""

    def kernel(*args: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args)

    _TRITON.impl(name, kernel, "CUDA")
    if triton_interprets:
        _TRITON.impl(name, kernel, "CPU")
    _triton_kernels.add(name)


def compose(
    name: str,
    signature: str,
    fake: Callable[..., Any],
    function: Callable[..., Any],
    parts: tuple[str, ...],
) -> Operators:
    """Declare operator ``name`` as Python code over the operators ``parts``: it has a kernel where all of them have one.

    ``function(impl, *args)`` takes its parts from the implementation that it is told.
    """
    operators = define(name, signature, fake)
    for key in _DISPATCH_KEYS:
        _COMPILED.impl(name, bound(function, key.lower()), key)
        _TRITON.impl(name, bound(function, "triton"), key)
    compositions[name] = Composition(function, parts)
    return operators


def bound(function: Callable[..., Any], impl: str) -> Callable[..., Any]:
    """``function`` with its first argument given, as a function of its own."""

    def kernel(*args: Any) -> Any:
        return function(impl, *args)

    return kernel


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """Results are float32, float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def has_kernel(name: str, dispatch_key: str) -> bool:
    """Whether the compiled module implements ``fastrl::name`` for a dispatch key such as ``"CPU"``."""
    return all(dispatch_key in _kernels.get(part, ()) for part in parts_of(name))


def has_triton_kernel(name: str) -> bool:
    return all(part in _triton_kernels for part in parts_of(name))


def parts_of(name: str) -> tuple[str, ...]:
    """The operators with kernels that ``name`` runs: itself unless it is a composition."""
    return compositions[name].parts if name in compositions else (name,)


def _load_compiled() -> str | None:
    """Import the compiled module, which registers its kernels; return why that failed, or None."""
    try:
        importlib.import_module("fastrl._C")
    except ImportError as error:
        return str(error)
    return None


# None when the compiled module is loaded, otherwise the reason it is not.
compiled_error: str | None = _load_compiled()

triton_installed = importlib.util.find_spec("triton") is not None
# Triton reads the variable when a kernel is defined; its kernels then run on CPU tensors, one program after another.
triton_interprets = triton_installed and os.environ.get("TRITON_INTERPRET") == "1"
