"""Names that docstring and README examples may use; examples are tests."""

from __future__ import annotations

import os

import pytest
import torch

import fastrl

# verl loads the plugin of an installed fastrl by itself; in the tests its own functions are the oracle.
os.environ.setdefault("FASTRL_VERL", "0")
# These import or change a trainer and hold no examples.
collect_ignore = ["fastrl/integrations/trl.py", "fastrl/integrations/verl_plugin.py"]


@pytest.fixture(autouse=True)
def _example_names(doctest_namespace: dict[str, object]) -> None:
    torch.manual_seed(0)
    doctest_namespace.update(fastrl=fastrl, torch=torch)
