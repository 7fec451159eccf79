"""AReaL 1.0.4 on fastrl: actor, SAPO and critic loss, normalisation, KL, advantages, log-probabilities.

``install()`` in the trainer and in every worker, at any time: names that AReaL's modules took from one another are
replaced in each module that is loaded, and later ones take the new.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fastrl.integrations import _patch
from fastrl.presets import areal as preset

PACKAGE = "areal"
TESTED = ("1.0.4",)

_FUNCTIONS = (
    *("ppo_actor_loss_fn", "sapo_loss_fn", "ppo_critic_loss_fn"),
    *("apply_rejection_sampling", "masked_normalization", "reward_overlong_penalty"),
)
_LOGPROBS = ("gather_logprobs", "gather_logprobs_entropy")
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
            _patch.replace_everywhere(PACKAGE, name, getattr(owner, name), getattr(preset, name))
    for name in _LOGPROBS:
        theirs = getattr(functional, name)
        if not isinstance(theirs, _WholeVocabulary):
            ours = _WholeVocabulary(getattr(preset, name), theirs)
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


class _WholeVocabulary:
    """fastrl's log-probabilities, or AReaL's own where the vocabulary is split over ranks."""

    def __init__(self, ours: Any, theirs: Any) -> None:
        self._ours, self._theirs = ours, theirs

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        temperature: float = 1.0,
        tp_group: dist.ProcessGroup | None = None,
        chunk_size: int = 1024,
    ) -> Any:
        is_split = tp_group is not None and dist.get_world_size(tp_group) > 1
        chosen = self._theirs if is_split else self._ours
        return chosen(logits, labels, temperature, tp_group, chunk_size)
