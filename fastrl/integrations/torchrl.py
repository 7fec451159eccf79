"""torchrl 0.14.1 on fastrl: GAE, TD(0), TD(1), TD(lambda), V-trace and reward-to-go behind its value estimators.

``install()`` at any time; ``torchrl.objectives.value.GAE``, ``TDLambdaEstimator``, ``VTrace`` and the losses that use them
then run on fastrl. Calls with ``rolling_gamma=False`` stay torchrl's.
"""

from __future__ import annotations

import functools
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
            if hasattr(theirs, "fastrl"):
                continue
            ours = _unless_gamma_stands_still(ours, theirs)
        _patch.replace_everywhere(PACKAGE, name, theirs, ours)


def uninstall() -> None:
    """Put torchrl's own back."""
    _patch.restore(PACKAGE)


def _unless_gamma_stands_still(ours: Any, theirs: Any) -> Any:
    """fastrl's function, or torchrl's for ``rolling_gamma=False``, which uses one gamma for all that follows a step."""
    position = 7 if "advantage" in theirs.__name__ else 6
    position -= "td1" in theirs.__name__

    @functools.wraps(theirs)
    def choose(*args: Any, **kwargs: Any) -> Any:
        rolling = args[position] if len(args) > position else kwargs.get("rolling_gamma")
        return (theirs if rolling is False else ours)(*args, **kwargs)

    choose.fastrl = ours  # type: ignore[attr-defined]
    return choose
