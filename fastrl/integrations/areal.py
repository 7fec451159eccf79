"""AReaL 1.0.4 on fastrl: actor, SAPO and critic loss, normalisation, KL, advantages, log-probabilities.

``install()`` in the trainer and in every worker, at any time: names that AReaL's modules took from one another are
replaced in each module that is loaded, and later ones take the new.
"""

from __future__ import annotations

import importlib
from typing import Any

from fastrl.integrations import _patch
from fastrl.presets import areal as preset

PACKAGE = "areal"
TESTED = ("1.0.4",)

# With the vocabulary over ranks they stay AReaL's.
_LOGPROBS = ("gather_logprobs", "gather_logprobs_entropy")
_FUNCTIONS = (
    *("ppo_actor_loss_fn", "sapo_loss_fn", "ppo_critic_loss_fn", *_LOGPROBS),
    *("apply_rejection_sampling", "masked_normalization", "reward_overlong_penalty"),
)
_CLASSES = ("Normalization", "KLEstimator")


def install() -> None:
    """Lead AReaL's functions to fastrl. Calling it again changes nothing."""
    _patch.check_version(PACKAGE, TESTED)
    functional: Any = importlib.import_module("areal.utils.functional")
    data: Any = importlib.import_module("areal.utils.data")
    actor: Any = importlib.import_module("areal.trainer.ppo.actor")
    importlib.import_module("areal.trainer.ppo.critic")
    for owner, names in ((functional, _FUNCTIONS), (data, _CLASSES)):
        for name in names:
            theirs, ours = getattr(owner, name), getattr(preset, name)
            if name in _LOGPROBS:
                ours = _patch.or_theirs(ours, theirs)
            _patch.replace_everywhere(PACKAGE, name, theirs, ours)
    _patch.replace(PACKAGE, actor.PPOActor, "_compute_advantages", _compute_advantages)


def uninstall() -> None:
    """Put AReaL's own back."""
    _patch.restore(PACKAGE)


def _compute_advantages(self: Any, data: dict[str, Any]) -> dict[str, Any]:
    return preset.compute_advantages(
        data,
        self.config,
        kl_estimator=self.kl_estimator,
        reward_norm=self.reward_norm,
        adv_norm=self.adv_norm,
    )
