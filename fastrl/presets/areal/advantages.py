"""AReaL's way from rewards to advantages: normalisation by levels, the KL reward, GAE over the trainable tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastrl import _checks
from fastrl.errors import ArgumentError
from fastrl.ops.gae import gae
from fastrl.ops.group_advantages import group_advantages
from fastrl.ops.whiten import whiten
from fastrl.presets._tokens import OVERFLOW, neighbours
from fastrl.surrogates import kl_penalty


@torch.no_grad()
def masked_normalization(
    x: Tensor,
    mask: Tensor | None = None,
    dim: tuple[int, ...] | None = None,
    unbiased: bool = False,
    eps: float = 1e-5,
    high_precision: bool = True,
    all_reduce: bool = True,
    reduce_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """``(x - mean) / (std + eps)`` over ``dim`` (all of them), over every rank unless ``all_reduce`` is False.

    ``high_precision`` is not read: the moments are float64 always.
    """
    group = _ranks(reduce_group) if all_reduce else None
    ddof = int(unbiased)
    if dim is None:
        out = whiten(x, mask, ddof=ddof, eps=eps, eps_mode="std_add", process_group=group)
        return out.float()
    if group is not None:
        raise ArgumentError(
            "fastrl.presets.areal.masked_normalization: dim must be None across ranks, got "
            f"{dim!r}; pass all_reduce=False"
        )
    dims = {d % x.dim() for d in dim}
    inside = x.new_zeros([1 if d in dims else size for d, size in enumerate(x.shape)])
    ids = torch.arange(inside.numel(), device=x.device).view(inside.shape).expand(x.shape)
    valid = None if mask is None else mask.expand(x.shape).reshape(-1)
    flat = group_advantages(x.reshape(-1), ids.reshape(-1), ddof=ddof, eps=eps, valid=valid)
    return flat.view(x.shape).float()


class Normalization:
    """Mean and standard deviation each over the batch, over ``group_size`` neighbouring rows, or not at all.

    The deviation is taken about the chosen mean. A group of one row has leave-one-out mean 0 and unbiased deviation 1,
    however many tokens the row has. Rows behind the last full group are a smaller group of their own.
    """

    def __init__(self, config: Any) -> None:
        for name in ("mean_level", "std_level"):
            if getattr(config, name) is not None:
                _checks.option(
                    "areal.Normalization", name, getattr(config, name), ("batch", "group")
                )
        self.mean_level, self.std_level = config.mean_level, config.std_level
        self.mean_leave1out = config.mean_leave1out
        self.std_unbiased = config.std_unbiased
        self.group_size = config.group_size
        self.eps = config.eps

    @torch.no_grad()
    def __call__(
        self,
        x: Tensor,
        loss_mask: Tensor | None = None,
        high_precision: bool = True,
        reduce_group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """``x`` is ``[B]`` or ``[B, S]``, ``loss_mask`` like it; float32, 0 where masked."""
        ranks = _ranks(reduce_group)
        valid = torch.ones_like(x, dtype=torch.bool) if loss_mask is None else loss_mask != 0
        ddof = int(self.std_unbiased)
        levels = (self.mean_level, self.std_level)
        if not self.mean_leave1out and levels == ("batch", "batch"):
            out = whiten(x, valid, ddof=ddof, eps=self.eps, eps_mode="std_add", process_group=ranks)
            return out.float()
        ids = neighbours(x.shape[0], self.group_size, x.device)
        ids = ids.view(-1, *[1] * (x.dim() - 1)).expand(x.shape).reshape(-1)
        flat, of_flat = x.reshape(-1), valid.reshape(-1)
        no_deviation = self.std_level == "group" and self.std_unbiased and self.group_size == 1
        if not self.mean_leave1out and levels == ("group", "group") and not no_deviation:
            out = group_advantages(flat, ids, ddof=ddof, eps=self.eps, valid=of_flat)
            return out.view(x.shape).float()
        centred = self._centred(flat.double(), ids, of_flat, ranks)
        if no_deviation:
            centred = centred / (1 + self.eps)
        elif self.std_level is not None:
            square, count = _sums(centred.square(), ids, of_flat, self.std_level, ranks)
            deviation = (square / (count - ddof).clamp(min=1)).sqrt()
            centred = centred / (torch.where(count > ddof, deviation, 1.0) + self.eps)
        return centred.view(x.shape).float()

    def _centred(self, x: Tensor, ids: Tensor, valid: Tensor, ranks: Any) -> Tensor:
        x = torch.where(valid, x, 0.0)
        no_others = self.mean_level == "group" and self.mean_leave1out and self.group_size == 1
        if self.mean_level is None or no_others:
            return x
        total, count = _sums(x, ids, valid, self.mean_level, ranks)
        if self.mean_leave1out:
            total, count = torch.where(count > 1, total - x, 0.0), count - 1
        return torch.where(valid, x - total / count.clamp(min=1), 0.0)


def _sums(x: Tensor, ids: Tensor, valid: Tensor, level: str, ranks: Any) -> tuple[Tensor, Tensor]:
    """Sum and number of the valid elements of its group, or of the batch on all ranks, for each element."""
    parts = torch.stack([torch.where(valid, x, 0.0), valid.to(x.dtype)])
    if level == "batch":
        sums = parts.sum(1, keepdim=True)
        if ranks is not None:
            dist.all_reduce(sums, group=ranks)
        return sums[0].expand_as(x), sums[1].expand_as(x)
    sums = parts.new_zeros(2, int(ids[-1]) + 1 if ids.numel() else 0).index_add(1, ids, parts)
    return sums[0][ids], sums[1][ids]


def _ranks(reduce_group: dist.ProcessGroup | None) -> Any:
    """The process group to reduce over, None in a single process."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.group.WORLD if reduce_group is None else reduce_group


class KLEstimator:
    """KL per token, "k1", "k2" or "k3", clamped at 10 unless ``apply_clamp`` is False."""

    def __init__(self, kl_estimator: str = "k1", apply_clamp: bool = True) -> None:
        _checks.option("areal.KLEstimator", "kl_estimator", kl_estimator, ("k1", "k2", "k3"))
        self.kl_estimator, self.apply_clamp = kl_estimator, apply_clamp

    def __call__(self, log_probs: Tensor, log_probs_base: Tensor) -> Tensor:
        return self._compute_approx_kl(
            log_probs, log_probs_base, self.kl_estimator, self.apply_clamp
        )

    @staticmethod
    def _compute_approx_kl(
        log_probs: Tensor,
        log_probs_base: Tensor,
        kl_estimator: str = "k1",
        apply_clamp: bool = True,
    ) -> Tensor:
        return kl_penalty(
            *(log_probs.float(), log_probs_base.float()),
            estimator=kl_estimator,
            input_clamp=OVERFLOW,
            clamp_value=10.0 if apply_clamp else None,
        )


def reward_overlong_penalty(
    data: dict[str, Any],
    overlong_tokens: int,
    overlong_penalty_factor: float,
    max_response_length: int,
) -> dict[str, Any]:
    """DAPO's soft punishment of the last ``overlong_tokens`` of a response, added to ``data["rewards"]``."""
    length = data["loss_mask"].sum(-1).long()
    excess = length - (max_response_length - overlong_tokens)
    data["rewards"] += (-excess / overlong_tokens * overlong_penalty_factor).clamp(max=0.0)
    return data


@torch.no_grad()
def compute_advantages(
    data: dict[str, Any],
    config: Any,
    *,
    kl_estimator: Callable[[Tensor, Tensor], Tensor],
    reward_norm: Callable[[Tensor], Tensor] | None = None,
    adv_norm: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> dict[str, Any]:
    """``PPOActor._compute_advantages``: fills ``advantages``, ``returns``, ``kl_rewards`` and ``tot_rewards`` of ``data``.

    ``data`` has ``input_ids``, ``attention_mask``, ``loss_mask``, ``logprobs`` ``[B, S]``, ``rewards`` ``[B]`` and, if
    there are any, ``values``, ``ref_logp``, ``prox_logp``; ``config`` is AReaL's ``PPOActorConfig``. Column t stands for
    the choice of token t + 1. A row that fills its width has not ended: its last value is bootstrapped.
    """
    if config.overlong_reward_penalty:
        data = reward_overlong_penalty(
            data, config.overlong_tokens, config.overlong_penalty_factor, config.max_new_tokens
        )
    scores = (data["rewards"] + config.reward_bias) * config.reward_scaling
    scores = scores.clip(-config.reward_clip, config.reward_clip)
    if reward_norm is not None:
        scores = reward_norm(scores)

    valid = data["loss_mask"].roll(-1, -1) != 0
    old_logp = torch.where(valid, _old_logp(data, config), 0.0)
    if not config.use_decoupled_loss:
        data["prox_logp"] = old_logp
    ref_logp = data.get("ref_logp")
    if ref_logp is not None:
        ref_logp = data["ref_logp"] = torch.where(valid, ref_logp, 0.0)
    kl = kl_estimator(old_logp, torch.zeros_like(old_logp) if ref_logp is None else ref_logp)
    kl_rewards = -config.kl_ctl * kl

    lengths = data["attention_mask"].sum(-1).long()
    cut_off = lengths == data["attention_mask"].shape[1]
    rewards = kl_rewards.scatter(1, (lengths - 1).unsqueeze(1), 0.0)
    if config.mask_no_eos_with_zero:
        scores = torch.where(cut_off, 0.0, scores)
    last = (lengths - 2).clamp(min=0).unsqueeze(1)
    rewards = rewards.scatter_add(1, last, scores.to(rewards.dtype).unsqueeze(1))

    values = data.get("values")
    values = torch.zeros_like(rewards) if values is None else values
    advantages, returns = gae(
        *(rewards[:, :-1], values[:, :-1], valid[:, :-1]),
        gamma=config.discount,
        lam=config.gae_lambda,
        bootstrap=torch.where(cut_off, values[:, -1], 0.0),
    )
    advantages, returns = (torch.nn.functional.pad(x, (0, 1)) for x in (advantages, returns))
    loss_mask = valid.float()
    data["returns"] = returns
    data["advantages"] = advantages if adv_norm is None else adv_norm(advantages, loss_mask)
    data["kl_rewards"], data["tot_rewards"] = kl_rewards, rewards
    data["loss_mask"], data["logprobs"] = loss_mask, old_logp
    return data


def _old_logp(data: dict[str, Any], config: Any) -> Tensor:
    """The policy that the KL reward and the loss start from, by column of the choice."""
    logp: Tensor | None
    if config.use_decoupled_loss or not config.recompute_logprob:
        logp = data["logprobs"].roll(-1, -1)
    else:
        logp = data["prox_logp"]
    if logp is None:
        raise ArgumentError(
            "areal.compute_advantages: prox_logp must be given for recompute_logprob=True, got None; "
            "call compute_logp() first"
        )
    return logp
