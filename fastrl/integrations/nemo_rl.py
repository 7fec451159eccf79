"""NeMo-RL on fastrl: the advantage estimators, the clipped policy-gradient loss and the value loss, method by method.

Its main branch carries the number of its last release, and what its package index has is empty: ``install()``, in the driver
and in every worker, compares the arguments of each method with those of git 7ea279ab instead of a version. Options that only
its own loss has stay its own.
"""

from __future__ import annotations

from fastrl.integrations import _patch
from fastrl.presets import nemo_rl as preset

PACKAGE = "nemo_rl"

_ESTIMATORS = (
    *("GRPOAdvantageEstimator", "GDPOAdvantageEstimator", "ReinforcePlusPlusAdvantageEstimator"),
    *("RawRewardAdvantageEstimator", "GeneralizedAdvantageEstimator"),
)
_LOSSES = ("ClippedPGLossFn", "MseValueLossFn")


def install() -> None:
    """Lead NeMo-RL's estimators and losses to fastrl. Calling it again changes nothing."""
    how = "install NVIDIA-NeMo/RL from its repository"
    estimators, losses = (
        _patch.import_checkout(PACKAGE, f"nemo_rl.algorithms.{module}", how)
        for module in ("advantage_estimator", "loss.loss_functions")
    )
    methods = [(getattr(estimators, name), name, "compute_advantage") for name in _ESTIMATORS]
    methods += [(getattr(losses, name), name, "__call__") for name in _LOSSES]
    replacements = []
    for owner, name, method in methods:
        theirs, ours = getattr(owner, method), getattr(getattr(preset, name), method)
        if hasattr(theirs, "fastrl"):
            continue
        _patch.check_arguments(PACKAGE, theirs, ours)
        if name in _LOSSES:
            ours = _patch.or_theirs(ours, theirs)
        replacements.append((owner, method, ours))
    for owner, method, ours in replacements:
        _patch.replace(PACKAGE, owner, method, ours)


def uninstall() -> None:
    """Put NeMo-RL's own back."""
    _patch.restore(PACKAGE)
