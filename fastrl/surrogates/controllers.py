"""Coefficients of the KL penalty: fixed, or steered towards a target."""

from __future__ import annotations

from dataclasses import dataclass

from fastrl import _checks


@dataclass
class FixedKL:
    """A constant coefficient with the interface of :class:`AdaptiveKL`.

    >>> controller = FixedKL(0.1)
    >>> controller.update(3.0, 64)
    >>> controller.value
    0.1
    """

    value: float

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing: the coefficient is fixed."""


@dataclass
class AdaptiveKL:
    """Multiplies its coefficient by ``1 + clip(kl / target - 1, -0.2, 0.2) * n_steps / horizon`` at each update.

    ``n_steps`` counts what ``horizon`` counts, in verl and SkyRL the samples of the batch.

    Source: Ziegler et al., Fine-Tuning Language Models from Human Preferences (2019).

    >>> controller = AdaptiveKL(0.1, target=6.0, horizon=1000)
    >>> controller.update(12.0, 500)
    >>> round(controller.value, 6)
    0.11
    """

    value: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        _checks.number("AdaptiveKL", "target", self.target, 1e-12)
        _checks.number("AdaptiveKL", "horizon", self.horizon, 1e-12)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move the coefficient after a batch with mean KL ``current_kl``."""
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon
