"""SkyRL 0.4.0 on fastrl: estimators under ``fastrl_...`` names, policy and value losses, log-probabilities.

``install()`` before Ray starts, or followed by SkyRL's ``sync_registries()``; then set ``advantage_estimator:
fastrl_grpo`` and ``policy_loss_type`` as usual. SkyRL dispatches losses by ``policy_loss_type``, which the losses read
too, so those take the place of SkyRL's own.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from fastrl.integrations import _patch
from fastrl.presets import skyrl as preset

PACKAGE = "skyrl"
TESTED = ("0.4.0",)

_ESTIMATORS = {
    "fastrl_gae": preset.compute_gae_advantage_return,
    "fastrl_grpo": preset.compute_grpo_outcome_advantage,
    "fastrl_rloo": preset.compute_rloo_outcome_advantage,
    "fastrl_maxrl": preset.compute_maxrl_advantage,
    "fastrl_reinforce++": preset.compute_reinforce_plus_plus_outcome_advantage,
}
# SkyRL corrects these for the rollout engine, the others not.
_CORRECTED = {
    "regular": preset.ppo_policy_loss,
    "dual_clip": preset.ppo_policy_loss,
    "gspo": preset.gspo_policy_loss,
    "cispo": preset.compute_policy_loss_cispo,
    "sapo": preset.sapo_policy_loss,
    "dppo": preset.dppo_policy_loss,
    "rollout_is": preset.rollout_is_policy_loss,
}
_LOSSES = {
    "clip_cov": preset.compute_policy_loss_clip_cov,
    "kl_cov": preset.compute_policy_loss_kl_cov,
    "importance_sampling": preset.importance_sampling_loss,
    "cross_entropy": preset.cross_entropy_loss,
}


def install() -> None:
    """Register the estimators, replace losses and log-probabilities; before SkyRL's workers are imported, or after."""
    _patch.check_version(PACKAGE, TESTED)
    utils: Any = importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")
    for name, function in _ESTIMATORS.items():
        _patch.replace(PACKAGE, utils.AdvantageEstimatorRegistry._functions, name, function)
    registry = utils.PolicyLossRegistry._functions
    for name, function in _CORRECTED.items():
        if not isinstance(registry[name], _WithCorrection):
            _patch.replace(PACKAGE, registry, name, _WithCorrection(function))
    for name, function in _LOSSES.items():
        _patch.replace(PACKAGE, registry, name, function)
    tensors: Any = importlib.import_module("skyrl.backends.skyrl_train.utils.torch_utils")
    for owner, name in ((utils, "ppo_critic_loss"), (tensors, "logprobs_from_logits")):
        _patch.replace_everywhere(PACKAGE, name, getattr(owner, name), getattr(preset, name))


def uninstall() -> None:
    """Put SkyRL's own back."""
    _patch.restore(PACKAGE)


class _WithCorrection:
    """fastrl's loss with the weights, the mask and the metrics of SkyRL's off-policy correction. Picklable."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        config: Any,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> Any:
        weights, extra = None, {}
        if rollout_logprobs is not None:
            correction: Any = importlib.import_module(
                "skyrl.backends.skyrl_train.utils.off_policy_correction_utils"
            )
            weights, extra, kept = correction.compute_off_policy_correction(
                old_log_probs, rollout_logprobs, loss_mask, config.off_policy_correction
            )
            if kept is not loss_mask:
                # The mask of the ratios and metrics stays; what the correction drops has weight 0.
                dropped = torch.where(kept != 0, 1.0, 0.0)
                weights = dropped if weights is None else dropped * weights
            if weights is not None:
                weights = weights.expand(log_probs.shape)
        loss, metrics = self._loss(
            *(log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs), weights
        )
        return loss, metrics | extra
