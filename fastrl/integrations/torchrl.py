"""torchrl 0.14.1 on fastrl: GAE, TD(0), TD(1), TD(lambda), V-trace and reward-to-go behind its value estimators.

``install()`` at any time; ``torchrl.objectives.value.GAE``, ``TDLambdaEstimator``, ``VTrace`` and the losses that use them
then run on fastrl. Calls with ``rolling_gamma=False`` stay torchrl's.
"""

from __future__ import annotations

import importlib
from typing import Any

from fastrl.integrations import _patch
from fastrl.presets import torchrl as preset

PACKAGE = "torchrl"
TESTED = ("0.14.1",)

_WITH_ROLLING_GAMMA = tuple(
    f"{vectorised}{kind}_{what}_estimate"
    for vectorised in ("", "vec_")
    for kind in ("td1", "td_lambda")
    for what in ("return", "advantage")
)
_OTHERS = (
    *("generalized_advantage_estimate", "vec_generalized_advantage_estimate"),
    *("td0_return_estimate", "td0_advantage_estimate", "vtrace_advantage_estimate", "reward2go"),
)


def install() -> None:
    """Lead torchrl's value functionals to fastrl. Calling it again changes nothing."""
    _patch.check_version(PACKAGE, TESTED)
    functional: Any = importlib.import_module("torchrl.objectives.value.functional")
    importlib.import_module("torchrl.objectives.value.advantages")
    for name in (*_OTHERS, *_WITH_ROLLING_GAMMA):
        theirs, ours = getattr(functional, name), getattr(preset, name)
        if name in _WITH_ROLLING_GAMMA:
            ours = _patch.or_theirs(ours, theirs)
        _patch.replace_everywhere(PACKAGE, name, theirs, ours)


def uninstall() -> None:
    """Put torchrl's own back."""
    _patch.restore(PACKAGE)
