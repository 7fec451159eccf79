"""OpenRLHF 0.11.2: ``openrlhf.models.loss``, ``compute_approx_kl`` and the estimators along time, by name and argument."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastrl.ops.discounted_returns import discounted_returns
from fastrl.ops.gae import gae
from fastrl.ops.group_advantages import group_advantages
from fastrl.ops.policy_loss import policy_loss
from fastrl.ops.value_loss import value_loss
from fastrl.ops.whiten import whiten
from fastrl.presets._logits import entropy_from_logits, logprobs_from_logits
from fastrl.presets._tokens import OVERFLOW, masked_mean, masked_row_mean
from fastrl.surrogates import kl_penalty

KL_WEIGHT_CLIP = 10.0


def _aggregation(
    token_level_loss: bool,
    dp_size: int,
    batch_num_tokens: float | Tensor | None,
    global_batch_size: float | Tensor | None,
) -> tuple[str, float | Tensor | None]:
    count = batch_num_tokens if token_level_loss else global_batch_size
    agg = "token_mean" if token_level_loss else "seq_mean_token_mean"
    return agg, None if count is None else count / dp_size


class PolicyLoss(nn.Module):
    """``(loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio)``; the last two are None without a correction."""

    def __init__(
        self,
        clip_eps_low: float = 0.2,
        clip_eps_high: float = 0.2,
        dual_clip: float | None = None,
        token_level_loss: bool = True,
        policy_loss_type: str = "ppo",
        is_correction_level: str = "off",
        is_correction_mode: str = "mask",
        is_correction_gating: str = "ratio",
        is_correction_threshold: Sequence[float] = (0.5, 5.0),
    ) -> None:
        super().__init__()
        self.clip_eps_low, self.clip_eps_high = clip_eps_low, clip_eps_high
        self.dual_clip = dual_clip
        self.token_level_loss = token_level_loss and policy_loss_type != "gspo"
        self.policy_loss_type = policy_loss_type
        self.is_correction_level = is_correction_level
        self.is_correction_mode = is_correction_mode
        self.is_correction_gating = is_correction_gating
        self.is_correction_threshold = is_correction_threshold

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | Tensor | None = None,
        global_batch_size: float | Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        is_gspo = self.policy_loss_type == "gspo"
        base, weights, vllm_kl, filtered = old_log_probs, None, None, None
        if rollout_log_probs is not None and self.is_correction_level != "off":
            if is_gspo:
                base = rollout_log_probs
            else:
                weights, filtered = self._correction(old_log_probs, rollout_log_probs, action_mask)
                vllm_kl = masked_mean(rollout_log_probs - old_log_probs, action_mask)
        agg, denom = _aggregation(
            self.token_level_loss, dp_size, batch_num_tokens, global_batch_size
        )
        out = policy_loss(
            *(log_probs, base, advantages, action_mask),
            ratio="sequence" if is_gspo else "token",
            log_ratio_clamp=None if is_gspo else 20.0,
            clip_low=self.clip_eps_low,
            clip_high=self.clip_eps_high,
            dual_clip=self.dual_clip,
            is_weights=weights,
            agg=agg,
            denom=denom,
        )
        named = out.named()
        ppo_kl = masked_mean(old_log_probs - log_probs.detach(), action_mask)
        return out.loss, named["clipped"] / named["tokens"].clamp(min=1), ppo_kl, vllm_kl, filtered

    @torch.no_grad()
    def _correction(self, old: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Importance weights per token, and the share of tokens (of rows at "seq" level) beyond the thresholds."""
        low, high = self.is_correction_threshold
        valid = mask != 0
        log_ratio = torch.where(valid, old - rollout, 0.0)
        by_row = self.is_correction_level == "seq"
        if self.is_correction_gating == "ratio":
            statistic = (masked_row_mean(log_ratio, valid) if by_row else log_ratio).exp()
        else:
            p = torch.where(valid, rollout, 0.0).exp().clamp(1e-6, 1 - 1e-6)
            q = torch.where(valid, old, 0.0).exp().clamp(1e-6, 1 - 1e-6)
            statistic = (p - q).abs()
            if self.is_correction_gating == "binary_kl":
                statistic = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
            statistic = masked_row_mean(statistic, valid) if by_row else statistic
        beyond = (statistic < low) | (statistic > high)
        if self.is_correction_mode == "clip":
            weights = statistic.clamp(low, high)
        else:
            weights = torch.where(beyond, 0.0, log_ratio.exp())
        share = beyond.float().mean() if by_row else masked_mean(beyond.float(), mask)
        return weights, share


class ValueLoss(nn.Module):
    """The clipped value loss, or the plain one for ``clip_eps=None``."""

    def __init__(self, clip_eps: float | None = None, token_level_loss: bool = True) -> None:
        super().__init__()
        self.clip_eps, self.token_level_loss = clip_eps, token_level_loss

    def forward(
        self,
        values: Tensor,
        old_values: Tensor,
        returns: Tensor,
        action_mask: Tensor,
        dp_size: int = 1,
        batch_num_tokens: float | Tensor | None = None,
        global_batch_size: float | Tensor | None = None,
    ) -> Tensor:
        agg, denom = _aggregation(
            self.token_level_loss, dp_size, batch_num_tokens, global_batch_size
        )
        return value_loss(
            *(values, old_values, returns, action_mask), clip=self.clip_eps, agg=agg, denom=denom
        ).loss


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    log_probs_old: Tensor | None = None,
    kl_estimator: str = "k1",
    unbiased_gradient: bool = False,
) -> Tensor:
    """Per-token KL, clamped at 10; ``unbiased_gradient``: that of k2 times a bounded importance weight."""
    weight = None
    if unbiased_gradient and log_probs_old is not None:
        weight = (
            (log_probs.detach().float() - log_probs_old.float()).exp().clamp(max=KL_WEIGHT_CLIP)
        )
    return kl_penalty(
        *(log_probs.float(), log_probs_base.float()),
        estimator=kl_estimator,
        gradient="k2" if unbiased_gradient else "pathwise",
        weight=weight,
        input_clamp=OVERFLOW,  # beyond it the value is clamped anyway, and exp would overflow
        clamp_value=10.0,
    )


@torch.no_grad()
def get_advantages_and_returns(
    values: Tensor, rewards: Tensor, action_mask: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """GAE in which a masked token is a step without value and reward."""
    return gae(rewards, values, action_mask, gamma=gamma, lam=lambd, holes="zero_step")


@torch.no_grad()
def get_cumulative_returns(rewards: Tensor, action_mask: Tensor, gamma: float) -> Tensor:
    """Reward-to-go in which a masked token is a step without reward."""
    return discounted_returns(rewards, action_mask, gamma=gamma, holes="zero_step")


def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of ``labels``; divides the logits in place, as OpenRLHF does, whose entropy reads them afterwards."""
    if temperature != 1.0:
        logits.div_(temperature)
    return logprobs_from_logits(logits, labels)


compute_entropy = entropy_from_logits


@torch.no_grad()
def baseline_rewards(rewards: Tensor, groups: Tensor, estimator: str) -> Tensor:
    """``[N]`` rewards less the baseline of ``algo.advantage.estimator``; those without a baseline leave them as they are."""
    if estimator == "flash_reinforce":
        return rewards - rewards.mean()
    if estimator not in _BASELINES:
        return rewards
    baseline, scale = _BASELINES[estimator]
    return group_advantages(rewards, groups, baseline=baseline, scale=scale, eps=1e-9)


_BASELINES = {
    "rloo": ("leave_one_out", "none"),
    "reinforce_baseline": ("mean", "none"),
    "dr_grpo": ("mean", "none"),
    "group_norm": ("mean", "std"),
}


@torch.no_grad()
def normalize_advantages(
    advantages: Sequence[Tensor], masks: Sequence[Tensor], no_std_norm: bool = False
) -> list[Tensor]:
    """Centred, and unless ``no_std_norm`` divided by the standard deviation, over all valid tokens of all experiences."""
    flat = torch.cat([x.flatten() for x in advantages]).float()
    mask = torch.cat([x.flatten() for x in masks])
    if no_std_norm:
        flat = torch.where(mask != 0, flat - masked_mean(flat, mask), 0.0)
    else:
        flat = whiten(flat, mask, ddof=0, eps=1e-8, eps_mode="rsqrt_max")
    parts = flat.split([x.numel() for x in advantages])
    return [part.view(x.shape) for part, x in zip(parts, advantages)]
