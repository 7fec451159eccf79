"""Names that docstring and README examples may use; examples are tests."""

from __future__ import annotations

import pytest
import torch

import fastrl


@pytest.fixture(autouse=True)
def _example_names(doctest_namespace: dict[str, object]) -> None:
    torch.manual_seed(0)
    doctest_namespace.update(fastrl=fastrl, torch=torch)
