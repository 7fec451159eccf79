"""prime-rl 0.5.0 on fastrl, without a patch: import paths for its configuration.

::

    [trainer.loss]
    type = "custom"
    import_path = "fastrl.integrations.prime_rl.default_loss_fn"
    kwargs = { dppo_mask_low = 0.2, dppo_mask_high = 0.2 }

    [orchestrator.advantage]
    type = "custom"
    import_path = "fastrl.integrations.prime_rl.grpo"          # or max_rl
    kwargs = { scale = "std" }                                 # options of fastrl.group_advantages

or ``install()`` in the trainer, which leads its default and its reference-KL loss to fastrl.
"""

from __future__ import annotations

import importlib
from typing import Any

from fastrl.integrations import _patch
from fastrl.presets import prime_rl as preset
from fastrl.presets.prime_rl import default_loss_fn, grpo, max_rl, ref_kl_loss_fn

PACKAGE = "prime-rl"
WRITTEN_AGAINST = ("0.5.0",)

__all__ = ["default_loss_fn", "grpo", "install", "max_rl", "ref_kl_loss_fn", "uninstall"]


def install() -> None:
    """Lead prime-rl's losses to fastrl. Calling it again changes nothing."""
    _patch.check_version(PACKAGE, WRITTEN_AGAINST, "written against")
    loss: Any = importlib.import_module("prime_rl.trainer.rl.loss")
    _patch.replace(PACKAGE, loss, "default_loss_fn", _by_config)
    _patch.replace(PACKAGE, loss, "ref_kl_loss_fn", ref_kl_loss_fn)


def uninstall() -> None:
    """Put prime-rl's own back."""
    _patch.restore(PACKAGE)


def _by_config(inputs: Any, loss_config: Any) -> preset.LossOutputs:
    """The default loss with prime-rl's own configuration."""
    names = ("dppo_mask_low", "dppo_mask_high", "adv_tau", "kl_tau")
    return default_loss_fn(inputs, **{name: getattr(loss_config, name) for name in names})
