"""stable-baselines3 2.9.2 on fastrl: GAE over the ``[T, N]`` rollout buffer of on-policy algorithms."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from fastrl.integrations import _patch
from fastrl.ops.gae import gae

PACKAGE = "stable-baselines3"
TESTED = ("2.9.2",)


def install() -> None:
    """Lead ``RolloutBuffer.compute_returns_and_advantage`` to fastrl. Calling it again changes nothing."""
    _patch.check_version(PACKAGE, TESTED)
    buffers: Any = importlib.import_module("stable_baselines3.common.buffers")
    _patch.replace(PACKAGE, buffers.RolloutBuffer, "compute_returns_and_advantage", _compute)


def uninstall() -> None:
    """Put stable-baselines3's own back."""
    _patch.restore(PACKAGE)


def _compute(self: Any, last_values: torch.Tensor, dones: Any) -> None:
    """Fill ``advantages`` and ``returns`` of the buffer; ``last_values`` follow its last step, ``dones`` end it."""
    starts = torch.from_numpy(self.episode_starts)
    ends = torch.cat([starts[1:], torch.as_tensor(dones, dtype=starts.dtype).view(1, -1)])
    out = gae(
        torch.from_numpy(self.rewards),
        torch.from_numpy(self.values),
        gamma=self.gamma,
        lam=self.gae_lambda,
        bootstrap=last_values.detach().clone().cpu().flatten(),
        dones=ends,
        time_dim=0,
    )
    self.advantages, self.returns = (x.contiguous().numpy() for x in out)
