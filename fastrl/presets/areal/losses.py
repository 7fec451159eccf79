"""AReaL's losses, ``(loss, stat)``: the loss in one pass, the per-token tensors of ``stat`` beside it without a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl._losses import TokenRows
from fastrl.ops.policy_loss import policy_loss
from fastrl.ops.value_loss import value_loss
from fastrl.presets._tokens import OVERFLOW, clip_terms
from fastrl.presets.areal.rejection import apply_rejection_sampling, packed_offsets
from fastrl.surrogates import sapo_loss

Loss = tuple[Tensor, dict[str, Any]]


def ppo_actor_loss_fn(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    eps_clip: float,
    loss_mask: Tensor,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    rejection_sampling: Any = None,
    importance_sampling_level: str = "token",
    cu_seqlens: Tensor | None = None,
) -> Loss:
    """Decoupled PPO: the ratio to the proximal policy is clipped, the one to the behaviour policy is a weight.

    The divisor counts the tokens before rejection. At "sequence" level ratio and advantage are means over the sequence.
    """
    count = (loss_mask != 0).sum().clamp(min=1)
    original_mask, rejected = loss_mask, None
    if rejection_sampling is not None:
        rejected = apply_rejection_sampling(
            proximal_logprobs, old_logprobs, loss_mask, cu_seqlens, rejection_sampling
        )
        loss_mask = rejected.loss_mask
    tokens = _Tokens(
        logprobs, proximal_logprobs, advantages, loss_mask, importance_sampling_level, cu_seqlens
    )
    high = eps_clip if eps_clip_higher is None else eps_clip_higher
    weights = None if rejected is None else rejected.behave_imp_weight
    loss = policy_loss(
        *(logprobs, proximal_logprobs, tokens.advantages, loss_mask),
        ratio=importance_sampling_level,
        log_ratio_clamp=OVERFLOW,
        clip_low=eps_clip,
        clip_high=high,
        dual_clip=c_clip,
        is_weights=weights,
        denom=count,
        cu_seqlens=tokens.cu_seqlens,
    ).loss
    terms = clip_terms(tokens.ratio, tokens.per_token, tokens.valid, eps_clip, high, c_clip)
    stat: dict[str, Any] = {
        "loss": terms.loss,
        "importance_weight": tokens.ratio,
        "approx_kl": tokens.log_ratio,
        "clip_mask": terms.is_clipped,
        "dual_clip_mask": terms.is_dual_clipped,
    }
    if rejected is not None:
        # AReaL logs it over the tokens that it rejects, too.
        log_ratio = (logprobs - proximal_logprobs).detach()
        stat["approx_kl"] = torch.where(original_mask != 0, log_ratio, 0.0)
        kept = (rejected.behave_imp_weight > 0) & tokens.valid
        stat["loss"] = stat["loss"] * rejected.behave_imp_weight
        stat["behave_approx_kl"] = torch.where(kept, (proximal_logprobs - old_logprobs).detach(), 0)
        stat["behave_imp_weight"] = rejected.behave_imp_weight
        stat["behave_mask"] = kept
        stat["filtered_fraction"] = rejected.filtered_fraction
    return loss, stat


def sapo_loss_fn(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    tau_pos: float,
    tau_neg: float,
    loss_mask: Tensor,
    importance_sampling_level: str = "token",
    cu_seqlens: Tensor | None = None,
) -> Loss:
    """SAPO: sigmoid gates in place of the clip, averaged over tokens."""
    tokens = _Tokens(
        logprobs, old_logprobs, advantages, loss_mask, importance_sampling_level, cu_seqlens
    )
    loss = sapo_loss(
        *(logprobs, old_logprobs, tokens.advantages, loss_mask),
        tau_positive=tau_pos,
        tau_negative=tau_neg,
        ratio=importance_sampling_level,
        log_ratio_clamp=OVERFLOW,
        agg="token_mean",
        cu_seqlens=tokens.cu_seqlens,
    ).loss
    with torch.no_grad():
        gates = [
            tokens.blank(torch.sigmoid(tau * (tokens.ratio - 1)) * 4 / tau)
            for tau in (tau_pos, tau_neg)
        ]
        gate = torch.where(tokens.per_token > 0, gates[0], gates[1])
        nothing = torch.zeros_like(tokens.valid)
        stat = {
            "loss": -gate * tokens.per_token,
            "importance_weight": tokens.ratio,
            "approx_kl": tokens.log_ratio,
            "clip_mask": nothing,
            "dual_clip_mask": nothing,
            "sapo_soft_gate": gate,
            "sapo_scaled_gate_pos": gates[0],
            "sapo_scaled_gate_neg": gates[1],
        }
    return loss, stat


def ppo_critic_loss_fn(
    value: Tensor,
    old_value: Tensor,
    target_value: Tensor,
    value_eps_clip: float,
    loss_mask: Tensor | None = None,
    loss_fn_type: str = "mse",
) -> Loss:
    """The clipped value loss, "mse" or "huber" with delta 10; no valid token gives 0."""
    cu_seqlens = packed_offsets(value, "token", None)
    loss = value_loss(
        *(value, old_value, target_value, loss_mask),
        clip=value_eps_clip,
        loss=loss_fn_type,
        huber_delta=10.0,
        cu_seqlens=cu_seqlens,
    ).loss
    with torch.no_grad():
        moved = old_value + (value - old_value).clamp(-value_eps_clip, value_eps_clip)
        errors = [_error(x - target_value, loss_fn_type) for x in (value, moved)]
        valid = torch.ones_like(value, dtype=torch.bool) if loss_mask is None else loss_mask != 0
        stat = {
            "clip_mask": (errors[1] > errors[0]) & valid,
            "loss": torch.where(valid, torch.maximum(*errors), 0.0),
        }
    return loss, stat


def _error(x: Tensor, kind: str) -> Tensor:
    if kind == "huber":
        return torch.nn.functional.huber_loss(x, torch.zeros_like(x), reduction="none", delta=10.0)
    return x.square() / 2


class _Tokens:
    """The ratio and the advantage of each token as AReaL logs them, and the advantage as the losses take it."""

    @torch.no_grad()
    def __init__(
        self,
        logprobs: Tensor,
        old: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
        level: str,
        cu_seqlens: Tensor | None,
    ) -> None:
        self.cu_seqlens = packed_offsets(logprobs, level, cu_seqlens)
        self.valid = loss_mask != 0
        self.log_ratio = self.blank((logprobs - old).float())
        self.advantages = self.per_token = self.blank(advantages.detach().float())
        exponent = self.log_ratio
        if level == "sequence":
            rows = TokenRows(logprobs, loss_mask, self.cu_seqlens)
            count = rows.counts.clamp(min=1).float()
            exponent = rows.spread(rows.sums(self.log_ratio) / count)
            self.advantages = rows.sums(self.per_token) / count
            self.per_token = self.blank(rows.spread(self.advantages))
        self.ratio = self.blank(exponent.clamp(-OVERFLOW, OVERFLOW).exp())

    def blank(self, x: Tensor) -> Tensor:
        """``x`` at valid tokens, 0 elsewhere."""
        return torch.where(self.valid, x, 0.0)
