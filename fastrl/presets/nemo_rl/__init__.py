"""NeMo-RL: its advantage estimators, ``ClippedPGLossFn`` and ``MseValueLossFn``, by class, argument and attribute.

Written against ``nemo_rl/algorithms/advantage_estimator.py`` and ``loss/loss_functions.py`` (git 7ea279ab of 2026-08-22,
00925dd1, 006907a9). Masked positions hold 0 and influence nothing; all metrics of a loss leave the device together.
"""

from fastrl.presets.nemo_rl.advantages import (
    GDPOAdvantageEstimator,
    GeneralizedAdvantageEstimator,
    GRPOAdvantageEstimator,
    RawRewardAdvantageEstimator,
    ReinforcePlusPlusAdvantageEstimator,
)
from fastrl.presets.nemo_rl.losses import ClippedPGLossFn, MseValueLossFn

__all__ = [
    "ClippedPGLossFn",
    "GDPOAdvantageEstimator",
    "GRPOAdvantageEstimator",
    "GeneralizedAdvantageEstimator",
    "MseValueLossFn",
    "RawRewardAdvantageEstimator",
    "ReinforcePlusPlusAdvantageEstimator",
]
