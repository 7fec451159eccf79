"""ROLL (git 090ac946; it has no versions): ``roll.utils.functionals`` by name and argument.

Its losses are put together inside its workers; ``fastrl.policy_loss`` with ``dual_clip=1 + 2 * pg_clip`` is its PPO. Masked
positions hold 0 and influence nothing, and an empty mask gives 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl._losses import TokenRows, aggregate
from fastrl.errors import ArgumentError
from fastrl.ops.discounted_returns import discounted_returns
from fastrl.ops.gae import gae
from fastrl.ops.group_advantages import group_advantages
from fastrl.ops.whiten import whiten
from fastrl.presets._tokens import OVERFLOW, neighbours
from fastrl.surrogates import kl_penalty as kl_per_token

_ESTIMATORS = {"kl": "k1", "mse": "k2"}
_AGGREGATION = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "token_mean",
}


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    action_mask: Tensor | None = None,
    kl_penalty: str = "kl",
) -> Tensor:
    """KL per token: "kl", "abs", "mse" or "k3", clamped at 10."""
    return kl_per_token(
        *(log_probs, log_probs_base, action_mask),
        estimator=_ESTIMATORS.get(kl_penalty, kl_penalty),
        input_clamp=OVERFLOW,
        clamp_value=10.0 if kl_penalty == "k3" else None,
    )


@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """GAE in which every position is a step; ROLL masks rewards and values before."""
    return gae(token_level_rewards, values, gamma=float(gamma), lam=float(lambd))


@torch.no_grad()
def compute_reinforce_return(
    token_level_rewards: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Reward-to-go, as advantages and as returns."""
    returns = discounted_returns(token_level_rewards, gamma=float(gamma))
    return returns, returns


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Zero mean and unit variance over the valid tokens; fewer than two give 0."""
    return whiten(values.detach(), mask, shift_mean=shift_mean)


def reward_norm(
    response_level_rewards: Tensor,
    n_sample: int = -1,
    running_ctrl: dict[str, Any] | None = None,
    norm_mean_type: str | None = None,
    norm_std_type: str | None = None,
) -> Tensor:
    """Rewards less a mean, over a deviation plus 1e-6; each of the batch, of the ``n_sample`` neighbours, running, or none."""
    rewards = response_level_rewards
    kinds = (norm_mean_type, norm_std_type)
    if "running" in kinds:
        if running_ctrl is None:
            raise ArgumentError("reward_norm: running_ctrl must be given for 'running', got None")
        running = running_ctrl["domain"]
        running.update(rewards)
    flat = rewards.reshape(-1)
    everyone = torch.zeros(flat.numel(), dtype=torch.int64, device=flat.device)
    groups = {
        "batch": everyone,
        "group": neighbours(flat.numel(), max(n_sample, 1), flat.device),
    }
    if norm_mean_type == "group" and norm_std_type in ("group", "batch"):
        # The deviation of the batch is that of the rewards as they came.
        scale = "std" if norm_std_type == "group" else "batch_std"
        return group_advantages(flat, groups["group"], scale=scale).view(rewards.shape)
    if norm_mean_type == "running":
        flat = flat - running.mean
    elif norm_mean_type is not None:
        flat = group_advantages(flat, groups[norm_mean_type], scale="none")
    if norm_std_type == "running":
        flat = flat / (running.std + 1e-6)
    elif norm_std_type is not None:
        flat = group_advantages(flat, groups[norm_std_type], baseline="none")
    return flat.view(rewards.shape)


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    batch_num_tokens: float | Tensor | None = None,
    global_valid_samples: float | Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """The loss of a batch ``[B, T]``, masked in every mode; ``weights`` is ``[B]``."""
    if loss_agg_mode not in _AGGREGATION:
        raise ArgumentError(
            f"agg_loss: loss_agg_mode must be one of {', '.join(_AGGREGATION)}, got {loss_agg_mode!r}"
        )
    rows = TokenRows(loss_mat, loss_mask, None)
    denom = rows.num_tokens() if batch_num_tokens is None else batch_num_tokens
    if loss_agg_mode == "seq-mean-token-sum-norm":
        denom = loss_mask.shape[-1]
    elif loss_agg_mode != "token-mean":
        denom = loss_mat.shape[0] if global_valid_samples is None else global_valid_samples
    masked = torch.where(rows.valid, loss_mat, 0.0)
    masked = masked if weights is None else masked * weights.unsqueeze(-1)
    denom = torch.as_tensor(denom, device=loss_mat.device).clamp(min=1)
    return aggregate(masked, rows, _AGGREGATION[loss_agg_mode], denom)
