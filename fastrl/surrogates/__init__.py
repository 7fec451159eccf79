"""Policy losses beyond the options of ``fastrl.policy_loss``, corrections of off-policy rollouts, and KL controllers.

The table in ``fastrl/surrogates/README.md`` names formula, options and source of every loss, those of ``policy_loss``
included.
"""

from fastrl.surrogates.controllers import AdaptiveKL, FixedKL
from fastrl.surrogates.correction import (
    RolloutCorrection,
    high_entropy_mask,
    off_policy_mask,
    rejection_mask,
    rollout_correction,
    vespo_weights,
)
from fastrl.surrogates.covariance import clip_cov_loss, kl_cov_loss
from fastrl.surrogates.kl import kl_penalty
from fastrl.surrogates.losses import SurrogateLoss, dppo_loss, dro_loss, gmpo_loss, sapo_loss

__all__ = [
    "AdaptiveKL",
    "FixedKL",
    "RolloutCorrection",
    "SurrogateLoss",
    "clip_cov_loss",
    "dppo_loss",
    "dro_loss",
    "gmpo_loss",
    "high_entropy_mask",
    "kl_cov_loss",
    "kl_penalty",
    "off_policy_mask",
    "rejection_mask",
    "rollout_correction",
    "sapo_loss",
    "vespo_weights",
]
