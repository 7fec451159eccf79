"""Where hypothesis is not installed its tests are skipped and say so; every other test runs."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any
from unittest import mock

import pytest


def _given(*_: Any, **__: Any) -> Any:
    @pytest.mark.skip(reason="hypothesis is not installed")
    def test() -> None:
        pass

    return lambda _: test


def install() -> None:
    """Let ``import hypothesis`` succeed; strategies are only built and passed on, so anything does for them."""
    if importlib.util.find_spec("hypothesis") is not None:
        return
    hypothesis, strategies = ModuleType("hypothesis"), mock.MagicMock()
    vars(hypothesis).update(
        given=_given, settings=lambda *_, **__: lambda test: test, strategies=strategies
    )
    # torch asks whether it is there, and importlib answers from this.
    hypothesis.__spec__ = importlib.machinery.ModuleSpec("hypothesis", None)
    sys.modules |= {"hypothesis": hypothesis, "hypothesis.strategies": strategies}
