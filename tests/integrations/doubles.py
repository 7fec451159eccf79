"""What stands in for trainers that no package index has: modules of the shape that their sources document."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from fastrl.integrations import _patch


def package(
    patch: pytest.MonkeyPatch, name: str, version: str, modules: dict[str, dict[str, Any]]
) -> None:
    """Put modules with these contents, and their parents, in ``sys.modules``; the package ``name`` has this version."""
    for path, contents in modules.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            each = ".".join(parts[:depth])
            if each not in sys.modules:
                module = ModuleType(each)
                module.__path__ = []
                patch.setitem(sys.modules, each, module)
        vars(sys.modules[path]).update(contents)
    found = _patch.metadata.version
    patch.setattr(
        _patch.metadata, "version", lambda wanted: version if wanted == name else found(wanted)
    )
