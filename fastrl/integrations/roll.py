"""ROLL on fastrl: KL, GAE, returns, whitening, reward normalisation and aggregation of ``roll.utils.functionals``.

ROLL runs from its checkout and has no version: ``install()`` compares the arguments of each function with those of git
090ac946, and replaces it in every module of ROLL that is loaded. Its losses, inside its workers, stay its own.
"""

from __future__ import annotations

from fastrl.integrations import _patch
from fastrl.presets import roll as preset

PACKAGE = "roll"

_FUNCTIONS = (
    *("compute_approx_kl", "compute_gae_advantage_return", "compute_reinforce_return"),
    *("masked_whiten", "reward_norm", "agg_loss"),
)


def install() -> None:
    """Lead ROLL's functions to fastrl. Calling it again changes nothing."""
    functionals = _patch.import_checkout(
        PACKAGE, "roll.utils.functionals", "put the checkout of alibaba/ROLL on PYTHONPATH"
    )
    pairs = [(name, getattr(functionals, name), getattr(preset, name)) for name in _FUNCTIONS]
    for _, theirs, ours in pairs:
        _patch.check_arguments(PACKAGE, theirs, ours)
    for name, theirs, ours in pairs:
        _patch.replace_everywhere(PACKAGE, name, theirs, ours)


def uninstall() -> None:
    """Put ROLL's own back."""
    _patch.restore(PACKAGE)
