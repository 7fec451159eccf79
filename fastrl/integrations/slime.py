"""slime 0.4.0 on fastrl, without a patch: functions for its arguments.

::

    --custom-advantage-function-path        fastrl.integrations.slime.compute_advantages_and_returns
    --custom-reward-post-process-path       fastrl.integrations.slime.post_process_rewards
    --custom-tis-function-path              fastrl.integrations.slime.vanilla_tis_function   (or icepop_function)
    --custom-pg-loss-reducer-function-path  fastrl.integrations.slime.get_pg_loss_reducer    (Dr. GRPO)
    --loss-type custom_loss --custom-loss-function-path  fastrl.integrations.slime.policy_loss_function

or ``install()`` in every training actor, which leads the same functions of ``slime.backends.megatron_utils.loss``, and the
loss of the critic, which has no argument, to fastrl; with context or tensor parallelism they stay slime's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from fastrl.integrations import _patch
from fastrl.presets import slime as preset
from fastrl.presets._tokens import NotCovered
from fastrl.presets.slime import (
    compute_advantages_and_returns,
    get_pg_loss_reducer,
    icepop_function,
    policy_loss_function,
    post_process_rewards,
    vanilla_tis_function,
)

PACKAGE = "slime"
WRITTEN_AGAINST = ("0.4.0",)

__all__ = [
    "compute_advantages_and_returns",
    "get_pg_loss_reducer",
    "icepop_function",
    "install",
    "policy_loss_function",
    "post_process_rewards",
    "uninstall",
    "vanilla_tis_function",
]


def install() -> None:
    """Lead slime's loss, GAE and importance weights to fastrl. Calling it again changes nothing."""
    _patch.check_version(PACKAGE, WRITTEN_AGAINST, "written against")
    loss: Any = importlib.import_module("slime.backends.megatron_utils.loss")
    mpu: Any = importlib.import_module("megatron.core.mpu")
    lead_to_fastrl(PACKAGE, loss, mpu.get_context_parallel_world_size)
    for name in ("policy_loss_function", "value_loss_function"):
        ours = _patch.or_theirs(getattr(preset, name), getattr(loss, name))
        _patch.replace(PACKAGE, loss, name, ours)


def uninstall() -> None:
    """Put slime's own back."""
    _patch.restore(PACKAGE)


def lead_to_fastrl(package: str, loss: Any, context_parallel_size: Callable[[], int]) -> None:
    """Replace what slime and miles share in their module of losses."""
    _patch.replace(package, loss, "vanilla_tis_function", vanilla_tis_function)
    _patch.replace(package, loss, "icepop_function", icepop_function)
    name = "get_advantages_and_returns_batch"

    def of_whole_responses(*args: Any, **kwargs: Any) -> Any:
        size = context_parallel_size()
        if size != 1:
            raise NotCovered(
                f"{package}.{name}: context_parallel_size must be 1, got {size}; use the trainer's"
            )
        return preset.get_advantages_and_returns_batch(*args, **kwargs)

    _patch.replace(package, loss, name, _patch.or_theirs(of_whole_responses, getattr(loss, name)))
