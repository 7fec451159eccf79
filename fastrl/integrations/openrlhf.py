"""OpenRLHF 0.11.2 on fastrl: policy and value loss, KL, GAE and reward-to-go.

``install()`` before the trainers are imported, since they take the names from the modules patched here.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from fastrl.integrations import _patch
from fastrl.presets import openrlhf as preset

PACKAGE = "openrlhf"
TESTED = ("0.11.2",)


def install() -> None:
    """Lead OpenRLHF's losses and KL to fastrl. Calling it again changes nothing."""
    _patch.check_version(PACKAGE, TESTED)
    loss: Any = importlib.import_module("openrlhf.models.loss")
    utils: Any = importlib.import_module("openrlhf.models.utils")
    models: Any = importlib.import_module("openrlhf.models")
    for name in ("PolicyLoss", "ValueLoss"):
        for owner in (loss, models):
            if hasattr(owner, name):
                _patch.replace(PACKAGE, owner, name, getattr(preset, name))
    _patch.replace(PACKAGE, utils, "compute_approx_kl", preset.compute_approx_kl)


def install_experience_maker(maker: Any) -> None:
    """Lead GAE and reward-to-go of an experience maker class to fastrl."""
    _patch.replace(PACKAGE, maker, "get_advantages_and_returns", _advantages)
    _patch.replace(PACKAGE, maker, "get_cumulative_returns", _returns)


def uninstall() -> None:
    """Put OpenRLHF's own back."""
    _patch.restore(PACKAGE)


def _advantages(
    self: Any, values: Tensor, rewards: Tensor, action_mask: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    return preset.get_advantages_and_returns(values, rewards, action_mask, gamma, lambd)


def _returns(self: Any, rewards: Tensor, action_mask: Tensor, gamma: float) -> Tensor:
    return preset.get_cumulative_returns(rewards, action_mask, gamma)
