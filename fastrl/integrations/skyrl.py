"""SkyRL 0.4.0 on fastrl: estimators and losses in its registries under ``fastrl_...`` names.

``install()`` before Ray starts, or followed by SkyRL's ``sync_registries()``; then set ``advantage_estimator:
fastrl_grpo`` and ``policy_loss_type`` as usual. SkyRL dispatches losses by ``policy_loss_type``, which the losses read
too, so those take the place of SkyRL's own.
"""

from __future__ import annotations

import importlib
from typing import Any

from fastrl.integrations import _patch
from fastrl.presets import skyrl as preset

PACKAGE = "skyrl"
TESTED = ("0.4.0",)

_ESTIMATORS = {
    "fastrl_gae": preset.compute_gae_advantage_return,
    "fastrl_grpo": preset.compute_grpo_outcome_advantage,
    "fastrl_rloo": preset.compute_rloo_outcome_advantage,
    "fastrl_maxrl": preset.compute_maxrl_advantage,
}
_LOSSES = {"regular": preset.ppo_policy_loss, "dual_clip": preset.ppo_policy_loss}


def install() -> None:
    """Register the estimators, replace the clipped losses. Runs with an off-policy correction keep SkyRL's losses."""
    _patch.check_version(PACKAGE, TESTED)
    utils: Any = importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")
    for name, function in _ESTIMATORS.items():
        _patch.replace(PACKAGE, utils.AdvantageEstimatorRegistry._functions, name, function)
    for name, function in _LOSSES.items():
        registry = utils.PolicyLossRegistry._functions
        if not isinstance(registry[name], _WithCorrection):
            wrapped = _WithCorrection(function, registry[name])
            _patch.replace(PACKAGE, registry, name, wrapped)


def uninstall() -> None:
    """Put SkyRL's own back."""
    _patch.restore(PACKAGE)


class _WithCorrection:
    """fastrl's loss, or SkyRL's own where rollout log-probabilities ask for its correction. Picklable like both."""

    def __init__(self, ours: Any, theirs: Any) -> None:
        self._ours, self._theirs = ours, theirs

    def __call__(
        self,
        log_probs: Any,
        old_log_probs: Any,
        advantages: Any,
        config: Any,
        loss_mask: Any = None,
        rollout_logprobs: Any = None,
    ) -> Any:
        chosen = self._ours if rollout_logprobs is None else self._theirs
        return chosen(log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs)
