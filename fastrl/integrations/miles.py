"""miles (miles-rl 0.0.2) on fastrl, by the same arguments as slime with ``fastrl.integrations.miles``.

``compute_advantages_and_returns`` treats masked tokens as miles does since its change of 2026: they are no steps, and the
reward lies on the last trainable token. ``install()`` leads GAE and the importance weights of miles-rl 0.0.2 to fastrl; its
advantages are not among its arguments there, and its own GAE still counts masked tokens as steps.
"""

from __future__ import annotations

import importlib
from typing import Any

from fastrl.integrations import _patch
from fastrl.integrations.slime import lead_to_fastrl
from fastrl.presets import slime as preset
from fastrl.presets.slime import (
    get_pg_loss_reducer,
    icepop_function,
    policy_loss_function,
    post_process_rewards,
    vanilla_tis_function,
)

PACKAGE = "miles-rl"
WRITTEN_AGAINST = ("0.0.2",)

__all__ = [
    "compute_advantages_and_returns",
    "get_pg_loss_reducer",
    "icepop_function",
    "install",
    "policy_loss_function",
    "post_process_rewards",
    "uninstall",
    "vanilla_tis_function",
]


def compute_advantages_and_returns(args: Any, rollout_data: dict[str, Any]) -> None:
    """``--custom-advantage-function-path``: over the trainable tokens alone."""
    preset.compute_advantages_and_returns(args, rollout_data, holes="carry")


def install() -> None:
    """Lead GAE and the importance weights of miles to fastrl. Calling it again changes nothing."""
    _patch.check_version(PACKAGE, WRITTEN_AGAINST, "written against")
    loss: Any = importlib.import_module("miles.backends.training_utils.loss")
    lead_to_fastrl(PACKAGE, loss, lambda: int(loss.get_parallel_state().cp.size))


def uninstall() -> None:
    """Put miles' own back."""
    _patch.restore(PACKAGE)
