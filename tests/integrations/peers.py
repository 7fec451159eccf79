"""Modules of trainers whose packages import engines that are not installed here: their parents are left bare."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import pytest


def _bare(name: str) -> ModuleType:
    """A package that finds its submodules and runs nothing of its own."""
    top, *rest = name.split(".")
    found = PathFinder.find_spec(top)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{top} is not installed: requirements/peers-no-deps.txt")
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = ["/".join([next(iter(found.submodule_search_locations)), *rest])]
    return module


def _empty(name: str) -> ModuleType:
    """Something to import names from, all of them empty classes."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []

    def missing(key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return type(key, (), {})

    module.__getattr__ = missing  # type: ignore[method-assign]
    return module


def load(
    name: str,
    bare: tuple[str, ...],
    empty: tuple[str, ...],
    given: dict[str, ModuleType] | None = None,
) -> Any:
    """Import module ``name``; skip with the reason when it cannot be.

    ``given`` modules take the place of those that do not work without their packages. The bare parents stay in
    ``sys.modules``. What stood in for absent packages does not: others look for those.
    """
    stand_ins = [each for each in (*empty, *(given or {})) if each not in sys.modules]
    for make, names in ((_bare, bare), (_empty, stand_ins)):
        for each in names:
            if each not in sys.modules:
                sys.modules[each] = (given or {}).get(each) or make(each)
    try:
        return importlib.import_module(name)
    except Exception as error:  # a peer may fail in any way while it is imported
        pytest.skip(f"{name} cannot be imported here: {error}")
    finally:
        for each in stand_ins:
            del sys.modules[each]
