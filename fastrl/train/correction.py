"""Importance weights for tokens that other weights, another precision or another engine sampled.

The log-probabilities of the trainer are computed anew when a step begins, so the clipped ratio of the
loss compares policies of one step (decoupled PPO, Hilton et al. 2022), and the distance from there to
the sampler is a constant weight of each token.
"""

from __future__ import annotations

from torch import Tensor

from fastrl.surrogates import RolloutCorrection, rollout_correction
from fastrl.train.batch import Batch
from fastrl.train.config import Config

__all__ = ["correct", "ratios"]


def correct(config: Config, batch: Batch, old_logp: Tensor) -> RolloutCorrection | None:
    """The weights [B, C] of `[correction]`, 0 where nothing is trained on; None without a correction.

    Raises ValueError when the sampler did not record log-probabilities.
    """
    options = config.correction
    if options.kind == "none":
        return None
    return rollout_correction(
        old_logp,
        _sampled(batch, old_logp),
        batch.mask.to(old_logp.device),
        level=options.level,
        low=options.low,
        high=options.high,
        beyond="clamp" if options.kind == "tis" else "zero",
    )


def ratios(batch: Batch, old_logp: Tensor) -> RolloutCorrection:
    """The ratios of single tokens without any bound: how far apart sampler and trainer are."""
    mask = batch.mask.to(old_logp.device)
    return rollout_correction(old_logp, _sampled(batch, old_logp), mask, high=None)


def _sampled(batch: Batch, old_logp: Tensor) -> Tensor:
    if batch.sampled_logp is None:
        raise ValueError(
            "correction: the log-probabilities of the sampler must be known for every completion, got "
            'none for some; set correction.kind = "none", or sample with an engine that returns them'
        )
    return batch.sampled_logp.to(old_logp)
