"""RLinf 0.3.0 on fastrl: the advantages and policy losses of its registries, and its KL.

``install()`` in every worker, before or after RLinf's modules are loaded. Losses that weight by episode length for a
critic, or aggregate by a function of the caller's own, stay RLinf's.
"""

from __future__ import annotations

import importlib
from typing import Any

from fastrl.integrations import _patch
from fastrl.presets import rlinf as preset

PACKAGE = "rlinf"
TESTED = ("0.3.0",)

_ADVANTAGES = {
    "gae": "compute_gae_advantages_and_returns",
    "grpo": "compute_grpo_advantages",
    "grpo_dynamic": "compute_grpo_dynamic_advantages",
    "reinpp": "compute_reinpp_advantages",
    "raw": "compute_raw_advantages",
}
_LOSSES = {
    "actor": "compute_grpo_actor_loss_fn",
    "actor_critic": "compute_ppo_actor_critic_loss",
    "decoupled_actor_critic": "compute_decoupled_ppo_actor_critic_loss",
}
_PARTS = ("compute_ppo_actor_loss", "compute_decoupled_ppo_actor_loss", "compute_ppo_critic_loss")


def install() -> None:
    """Register fastrl's functions under RLinf's names. Calling it again changes nothing."""
    _patch.check_version(PACKAGE, TESTED)
    advantages: Any = importlib.import_module("rlinf.algorithms.advantages")
    losses: Any = importlib.import_module("rlinf.algorithms.losses")
    registry: Any = importlib.import_module("rlinf.algorithms.registry")
    utils: Any = importlib.import_module("rlinf.algorithms.utils")
    for name, function in _ADVANTAGES.items():
        ours = getattr(preset, function)
        _patch.replace_everywhere(PACKAGE, function, getattr(advantages, function), ours)
        _patch.replace(PACKAGE, registry.ADV_REGISTRY, name, ours)
    for function in (*_PARTS, *_LOSSES.values()):
        theirs = getattr(losses, function)
        ours = _patch.or_theirs(getattr(preset, function), theirs)
        _patch.replace_everywhere(PACKAGE, function, theirs, ours)
    for name, function in _LOSSES.items():
        _patch.replace(PACKAGE, registry.LOSS_REGISTRY, name, getattr(losses, function))
    for name in ("kl_penalty", "calculate_scores"):
        _patch.replace_everywhere(PACKAGE, name, getattr(utils, name), getattr(preset, name))


def uninstall() -> None:
    """Put RLinf's own back."""
    _patch.restore(PACKAGE)
