"""Options and aggregations of verl in the terms of fastrl."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl.errors import ArgumentError
from fastrl.ops.policy_loss import PolicyLoss, policy_loss
from fastrl.surrogates import SurrogateLoss

Advantages = tuple[Tensor, Tensor]
Loss = tuple[Tensor, dict[str, Any]]

AGGREGATIONS = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}


def option(config: Any, name: str, default: Any = None) -> Any:
    """An option of a dataclass, of a mapping, or of what verl makes of either; None means the default."""
    get = getattr(config, "get", None)
    value = get(name, default) if get is not None else getattr(config, name, default)
    return default if value is None else value


def aggregation(
    mode: str,
    mask: Tensor,
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> dict[str, Any]:
    """``agg`` and ``denom`` of fastrl for an aggregation of verl, without the factor that "token-sum" needs."""
    if mode not in AGGREGATIONS:
        raise ArgumentError(
            f"verl: loss_agg_mode must be one of {', '.join(AGGREGATIONS)}, got {mode!r}"
        )
    count = batch_num_tokens if mode == "token-mean" else global_batch_size
    if mode != "token-sum" and count is None and dp_size > 1:
        needed = "batch_num_tokens" if mode == "token-mean" else "global_batch_size"
        raise ArgumentError(f"verl: {needed} must be given when dp_size > 1, got None")
    denom: float | Tensor | None = None
    if mode == "seq-mean-token-sum-norm":
        if count is not None or loss_scale_factor is not None:
            if count is None:
                count = (mask != 0).any(-1).sum()
            scale = mask.shape[-1] if loss_scale_factor is None else loss_scale_factor
            denom = count * scale / dp_size
    elif mode != "token-sum" and count is not None:
        denom = count / dp_size
    if isinstance(denom, Tensor):
        denom = denom.to(mask.device)
    return {"agg": AGGREGATIONS[mode], "denom": denom}


def factor(mode: str, dp_size: int) -> int:
    return dp_size if mode == "token-sum" else 1


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """A masked matrix of losses as one number. Differentiable; an empty mask gives 0."""
    chosen = aggregation(
        *(loss_agg_mode, loss_mask, dp_size, batch_num_tokens, global_batch_size),
        loss_scale_factor,
    )
    # Minus one times the loss of a policy whose "log-probability" is the matrix: aggregation in one pass.
    ones = torch.ones_like(loss_mat[:, 0])
    loss = policy_loss(
        *(loss_mat, loss_mat.detach(), -ones, loss_mask), surrogate="reinforce", **chosen
    ).loss
    return loss * factor(loss_agg_mode, dp_size)


class LossCall:
    """The arguments that all policy losses of verl share."""

    def __init__(self, config: Any, mode: str, mask: Tensor) -> None:
        if config is None:
            raise ArgumentError("verl policy loss: config must be given, got None")
        info = dict(option(config, "global_batch_info", {}))
        self.factor = factor(mode, info.get("dp_size", 1))
        self.agg = aggregation(mode, mask, **info)
        clip = option(config, "clip_ratio", 0.2)
        self.low = option(config, "clip_ratio_low", clip)
        self.high = option(config, "clip_ratio_high", clip)

    def clips(self) -> dict[str, Any]:
        return {"clip_low": self.low, "clip_high": self.high}

    def result(
        self, out: PolicyLoss | SurrogateLoss, clipped: str | None = None, lower: str | None = None
    ) -> Loss:
        named = out.named() if isinstance(out, PolicyLoss) else out.metrics
        count = named["tokens"].clamp(min=1)
        zero = torch.zeros_like(count)
        metrics = {
            "actor/pg_clipfrac": zero if clipped is None else named[clipped] / count,
            "actor/ppo_kl": named["approx_kl"] / count,
            "actor/pg_clipfrac_lower": zero if lower is None else named[lower] / count,
        }
        return out.loss * self.factor, metrics
