"""verl 0.9.1 on fastrl: advantages, policy, value and KL losses, log-probabilities, and the way from jagged to padded rows.

``install()`` in the driver and in every worker; the entry point ``verl.plugins`` does it where verl loads plugins.
``FASTRL_VERL=0`` turns the entry point off.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch import Tensor

from fastrl.integrations import _patch
from fastrl.presets import verl as preset

PACKAGE = "verl"
TESTED = ("0.9.1",)

_ESTIMATORS = {
    "gae": "compute_gae_advantage_return",
    "grpo": "compute_grpo_outcome_advantage",
    "grpo_vectorized": "compute_grpo_vectorized_outcome_advantage",
    "grpo_passk": "compute_grpo_passk_outcome_advantage",
    "gdpo": "compute_gdpo_outcome_advantage",
    "rloo": "compute_rloo_outcome_advantage",
    "rloo_vectorized": "compute_rloo_vectorized_outcome_advantage",
    "reinforce_plus_plus": "compute_reinforce_plus_plus_outcome_advantage",
    "reinforce_plus_plus_baseline": "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "remax": "compute_remax_outcome_advantage",
    "opo": "compute_opo_outcome_advantage",
    "gpg": "compute_gpg_outcome_advantage",
    "optimal_token_baseline": "compute_optimal_token_baseline_advantage",
    "tir_optimal_token_baseline": "compute_multi_turn_optimal_token_baseline_advantage",
}
_LOSSES = (
    *("vanilla", "gspo", "sapo", "cispo", "gpg", "dro", "dppo_tv", "dppo_kl", "geo_mean"),
    *("clip_cov", "kl_cov"),
)
# Imported by name where the losses are put together.
_BY_NAME = ("agg_loss", "compute_value_loss", "kl_penalty")
_OF_LOGITS = ("logprobs_from_logits", "entropy_from_logits", "entropy_from_logits_with_chunking")


def install() -> None:
    """Lead verl's estimators and losses to fastrl. Calling it again changes nothing."""
    _patch.check_version(PACKAGE, TESTED)
    core_algos: Any = importlib.import_module("verl.trainer.ppo.core_algos")
    losses: Any = importlib.import_module("verl.workers.utils.losses")
    for name, function in _ESTIMATORS.items():
        ours = getattr(preset, function)
        # compute_advantage finds GAE and GRPO as attributes of the module, all others in the registry.
        _patch.replace(PACKAGE, core_algos, function, ours)
        _patch.replace(PACKAGE, core_algos.ADV_ESTIMATOR_REGISTRY, name, ours)
    for name in _LOSSES:
        ours = getattr(preset, f"compute_policy_loss_{name}")
        _patch.replace(PACKAGE, core_algos, f"compute_policy_loss_{name}", ours)
        _patch.replace(PACKAGE, core_algos.POLICY_LOSS_REGISTRY, name, ours)
    _patch.replace(
        *(PACKAGE, core_algos, "compute_policy_loss_reinforce"),
        preset.compute_policy_loss_reinforce,
    )
    for name in _BY_NAME:
        _patch.replace_everywhere(PACKAGE, name, getattr(core_algos, name), getattr(preset, name))
    _patch.replace(PACKAGE, losses, "no_padding_2_padding", no_padding_2_padding)
    # verl's bypass_mode stays: it finds these, and the losses above, as attributes of their modules.
    helper: Any = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    for name in ("compute_rollout_correction_weights", "compute_offpolicy_metrics"):
        _patch.replace(PACKAGE, helper, name, getattr(preset, name))
    functional: Any = importlib.import_module("verl.utils.torch_functional")
    for name in _OF_LOGITS:
        _patch.replace_everywhere(PACKAGE, name, getattr(functional, name), getattr(preset, name))


def uninstall() -> None:
    """Put verl's own functions back."""
    _patch.restore(PACKAGE)


def plugin() -> None:
    """What the entry point calls; nothing with FASTRL_VERL=0."""
    if os.environ.get("FASTRL_VERL", "1") != "0":
        install()


def no_padding_2_padding(tensor: Tensor, data: Any) -> Tensor:
    """Values of whole sequences end to end, ``[N, ...]`` or jagged, as ``[B, T, ...]`` of the responses, padded with 0.

    The value at a token is the one before it: log-probabilities stand where they predict. One gather instead of verl's loop
    over rows.
    """
    values = tensor.values() if tensor.is_nested else tensor
    prompts, responses = data["prompts"], data["responses"]
    if prompts.is_nested:
        prompt_lengths, lengths = prompts.offsets().diff(), responses.offsets().diff()
        width = _width(data)
        width = int(lengths.max()) if width < 0 else width
    else:
        attention = data["attention_mask"]
        prompt_lengths = attention[:, : prompts.shape[1]].sum(1)
        lengths = attention[:, prompts.shape[1] :].sum(1)
        width = responses.shape[1]
    ends = (prompt_lengths + lengths).cumsum(0)
    column = torch.arange(width, device=values.device)
    index = (ends - lengths - 1).unsqueeze(1) + column
    valid = column < lengths.unsqueeze(1)
    padded = values[torch.where(valid, index, 0)]
    shape = valid.shape + (1,) * (values.dim() - 1)
    return torch.where(
        valid.view(shape), padded, torch.zeros((), dtype=values.dtype, device=values.device)
    )


def _width(data: Any) -> int:
    utils: Any = importlib.import_module("verl.utils.tensordict_utils")
    return int(utils.get_non_tensor_data(data=data, key="max_response_len", default=-1))
