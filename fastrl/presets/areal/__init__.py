"""AReaL 1.0.4: ``areal.utils.functional``, ``Normalization``, ``KLEstimator`` and ``PPOActor._compute_advantages``.

Tensors are padded ``[B, S]`` or packed ``[N]`` with ``cu_seqlens``, as there. Values are AReaL's at valid tokens; masked
positions hold 0 and influence nothing. A share that AReaL reads off the device is a 0-d tensor here.
"""

from fastrl.presets.areal.advantages import (
    KLEstimator,
    Normalization,
    compute_advantages,
    masked_normalization,
    reward_overlong_penalty,
)
from fastrl.presets.areal.logprobs import gather_logprobs, gather_logprobs_entropy
from fastrl.presets.areal.losses import ppo_actor_loss_fn, ppo_critic_loss_fn, sapo_loss_fn
from fastrl.presets.areal.rejection import RejectionSamplingResult, apply_rejection_sampling

__all__ = [
    "KLEstimator",
    "Normalization",
    "RejectionSamplingResult",
    "apply_rejection_sampling",
    "compute_advantages",
    "gather_logprobs",
    "gather_logprobs_entropy",
    "masked_normalization",
    "ppo_actor_loss_fn",
    "ppo_critic_loss_fn",
    "reward_overlong_penalty",
    "sapo_loss_fn",
]
