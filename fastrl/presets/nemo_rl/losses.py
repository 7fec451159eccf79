"""NeMo-RL's clipped policy-gradient loss and its value loss, called as ``loss_fn(logprobs, data, valid_seqs, valid_toks)``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastrl._losses import TokenRows, aggregate
from fastrl.ops.policy_loss import policy_loss
from fastrl.ops.value_loss import value_loss
from fastrl.presets._tokens import OVERFLOW, NotCovered, masked_mean, masked_row_mean
from fastrl.surrogates import kl_penalty

Loss = tuple[Tensor, dict[str, Any]]


@torch.no_grad()
def _floats(metrics: dict[str, Any], device: torch.device) -> dict[str, float]:
    """Numbers, in one transfer."""
    values = [
        torch.as_tensor(value, dtype=torch.float64, device=device) for value in metrics.values()
    ]
    return dict(zip(metrics, torch.stack(values).tolist()))


class ClippedPGLossFn:
    """PPO, GRPO, GSPO, CISPO or REINFORCE with KL and importance-sampling correction, by the names of its configuration."""

    _OPTIONS = (
        *("disable_ppo_ratio", "ratio_clip_min", "ratio_clip_max", "ratio_clip_c"),
        *("reference_policy_kl_type", "kl_input_clamp_value", "kl_output_clamp_value"),
        *("use_importance_sampling_correction", "truncated_importance_sampling_type"),
        *("truncated_importance_sampling_ratio", "truncated_importance_sampling_ratio_min"),
        *("use_on_policy_kl_approximation", "force_on_policy_ratio"),
        *("sequence_level_importance_ratios", "use_cispo", "positive_example_nll_weight"),
    )

    def __init__(self, cfg: Any, use_fused_linear_logprobs: bool = False) -> None:
        for name in self._OPTIONS:
            setattr(self, name, getattr(cfg, name))
        in_reward = cfg.use_kl_in_reward
        self.reference_policy_kl_penalty = 0 if in_reward else cfg.reference_policy_kl_penalty
        self.loss_type = "TOKEN_LEVEL" if cfg.token_level_loss else "SEQUENCE_LEVEL"

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Any,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> Loss:
        return clipped_pg_loss(
            self, next_token_logprobs, data, global_valid_seqs, global_valid_toks
        )


class _Batch:
    """The tensors of a micro-batch, by the position of the token that a log-probability predicts; 0 where masked."""

    def __init__(self, options: Any, curr: Tensor, data: Any, seqs: Tensor, toks: Tensor) -> None:
        self.sample_mask = data["sample_mask"]
        self.valid = (data["token_mask"][:, 1:] * self.sample_mask.unsqueeze(-1)) != 0
        keep = data.get("curr_logprobs_keep_mask")
        self.actor = self.valid if keep is None else self.valid & (keep != 0)
        self.prev_valid = self.actor if options.force_on_policy_ratio else self.valid
        self.curr, self.advantages = curr, data["advantages"][:, 1:]
        prev = curr.detach() if options.force_on_policy_ratio else data["prev_logprobs"][:, 1:]
        self.prev = torch.where(self.prev_valid, prev, 0.0)
        self.generation = torch.where(self.valid, data["generation_logprobs"][:, 1:], 0.0)
        self.by_token = getattr(options.loss_type, "name", options.loss_type) == "TOKEN_LEVEL"
        self.seqs, self.toks = seqs, toks
        self.agg: dict[str, Any] = {
            "agg": "token_mean" if self.by_token else "seq_mean_token_mean",
            "denom": toks if self.by_token else seqs,
        }

    def per_token(self, x: Tensor, mask: Tensor) -> Tensor:
        """The sum over the valid tokens, over the number of tokens of the whole batch."""
        return torch.where(mask, x, 0.0).sum() / self.toks


def clipped_pg_loss(options: Any, curr: Tensor, data: Any, seqs: Tensor, toks: Tensor) -> Loss:
    """``ClippedPGLossFn.__call__`` for anything that has its attributes."""
    if options.disable_ppo_ratio and options.ratio_clip_c is not None:
        raise NotCovered(
            "fastrl.presets.nemo_rl: ratio_clip_c must be None with disable_ppo_ratio, got "
            f"{options.ratio_clip_c!r}; use NeMo-RL's loss"
        )
    batch = _Batch(options, curr, data, seqs, toks)
    weights, metrics = _importance(options, batch)
    sequence = options.sequence_level_importance_ratios and not options.force_on_policy_ratio
    surrogate = "cispo" if options.use_cispo else "clip"
    actor_loss = policy_loss(
        *(curr, batch.prev, batch.advantages, batch.actor),
        ratio="sequence" if sequence else "token",
        surrogate="reinforce" if options.disable_ppo_ratio else surrogate,
        clip_low=options.ratio_clip_min,
        clip_high=options.ratio_clip_max,
        dual_clip=options.ratio_clip_c,
        log_ratio_clamp=OVERFLOW,
        is_weights=weights if options.use_importance_sampling_correction else None,
        **batch.agg,
    ).loss
    kl = _kl(options, batch, data)
    loss = actor_loss + kl
    nll = torch.zeros((), device=curr.device)
    if options.positive_example_nll_weight > 0 and "rewards" in data:
        nll = masked_mean(-curr, batch.actor & (data["rewards"] > 0).unsqueeze(-1))
        loss = loss + options.positive_example_nll_weight * nll
    with torch.no_grad():
        coef = options.reference_policy_kl_penalty
        metrics |= {
            "loss": loss,
            "kl_penalty": kl / coef if coef else 0.0,
            "positive_nll_loss": nll,
            "num_valid_samples": batch.sample_mask.sum(),
        }
        metrics |= _mismatch(options, batch) | _ratios(options, batch, sequence)
    return loss, _floats(metrics, curr.device)


def _kl(options: Any, batch: _Batch, data: Any) -> Tensor:
    """The KL loss with the score-function term, times its coefficient."""
    coef = options.reference_policy_kl_penalty
    if coef == 0:
        return torch.zeros((), device=batch.curr.device)
    clamped = options.kl_output_clamp_value is not None or options.kl_input_clamp_value is None
    if options.reference_policy_kl_type != "k3" and not clamped:
        raise NotCovered(
            "fastrl.presets.nemo_rl: kl_output_clamp_value must be given for k1 and k2 with kl_input_clamp_value, "
            "got None; use NeMo-RL's loss"
        )
    curr = data.get("curr_logprobs_unfiltered", batch.curr)
    curr = torch.where(batch.valid, curr, 0.0)
    on_policy = options.use_on_policy_kl_approximation
    kl = kl_penalty(
        *(curr, data["reference_policy_logprobs"][:, 1:], batch.valid),
        estimator=options.reference_policy_kl_type,
        gradient="pathwise" if on_policy else "score",
        input_clamp=options.kl_input_clamp_value,
        clamp_value=options.kl_output_clamp_value,
    )
    if on_policy:
        kl = kl * (curr - batch.generation).clamp(-OVERFLOW, OVERFLOW).exp()
    rows = TokenRows(kl, batch.valid, None)
    return coef * aggregate(kl, rows, batch.agg["agg"], batch.agg["denom"])


@torch.no_grad()
def _importance(options: Any, batch: _Batch) -> tuple[Tensor, dict[str, Any]]:
    """Weights of the actor loss, per token, and what is logged of them."""
    log_ratio = torch.where(batch.prev_valid, batch.prev - batch.generation, 0.0)
    by_row = options.sequence_level_importance_ratios
    exponent = log_ratio.sum(-1, keepdim=True) if by_row else log_ratio
    raw = exponent.exp().nan_to_num(0.0, 0.0, 0.0)
    weights, metrics = raw, {}
    kind = options.truncated_importance_sampling_type
    if options.truncated_importance_sampling_ratio is not None:
        low = options.truncated_importance_sampling_ratio_min or 0.0
        high = options.truncated_importance_sampling_ratio
        if kind == "seq-mask-tis":
            finite = log_ratio.nan_to_num(0.0, 0.0, 0.0)
            mean = masked_row_mean(finite, batch.prev_valid).exp()
            outside = (mean < low) | (mean > high)
            dropped = outside.squeeze(-1) & (batch.sample_mask != 0)
            metrics["is_oob_ratio"] = dropped.sum() / batch.seqs
        else:
            outside = (raw < low) | (raw > high)
            spread = outside.expand_as(log_ratio).float()
            metrics["is_oob_ratio"] = batch.per_token(spread, batch.prev_valid)
        weights = raw.clamp(low, high) if kind == "tis" else torch.where(outside, 0.0, raw)
    if by_row:
        kept = weights.squeeze(-1) * (batch.sample_mask != 0)
        metrics["sampling_importance_ratio"] = kept.sum() / batch.seqs
    else:
        metrics["sampling_importance_ratio"] = batch.per_token(weights, batch.prev_valid)
    return weights.expand_as(log_ratio).contiguous(), metrics


def _mismatch(options: Any, batch: _Batch) -> dict[str, Tensor]:
    """How far trainer and generation disagree, and the entropy that they estimate."""
    prev, generation, valid = batch.prev, batch.generation, batch.prev_valid
    kind = options.reference_policy_kl_type
    mixture = torch.logaddexp(prev, generation) - math.log(2.0)
    to_mixture = [kl_penalty(mixture, x, estimator="k3") for x in (prev, generation)]
    curr = torch.where(batch.actor, batch.curr, 0.0)
    return {
        "token_mult_prob_error": batch.per_token((generation - prev).abs().exp(), valid),
        "gen_kl_error": batch.per_token(kl_penalty(generation, prev, estimator=kind), valid),
        "policy_kl_error": batch.per_token(kl_penalty(prev, generation, estimator=kind), valid),
        "js_divergence_error": batch.per_token((to_mixture[0] + to_mixture[1]) / 2, valid),
        "approx_entropy": -batch.per_token((curr - generation).exp() * curr, batch.actor),
    }


def _ratios(options: Any, batch: _Batch, sequence: bool) -> dict[str, Tensor]:
    """Mean, smallest and largest ratio, before and after the clip."""
    curr = torch.where(batch.actor, batch.curr, 0.0)
    log_ratio = torch.where(batch.actor, curr - batch.prev, 0.0)
    if sequence:
        log_ratio = masked_row_mean(log_ratio, batch.actor)
    ratio = log_ratio.clamp(-OVERFLOW, OVERFLOW).exp().expand_as(curr)
    clipped = ratio.clamp(1 - options.ratio_clip_min, 1 + options.ratio_clip_max)
    if options.disable_ppo_ratio:
        ratio = clipped = curr
    metrics = {}
    for name, x in (("probs_ratio", ratio), ("probs_ratio_clamped", clipped)):
        metrics[name] = batch.per_token(x, batch.actor)
        metrics[f"{name}_min"] = torch.where(batch.actor, x, torch.inf).amin()
        metrics[f"{name}_max"] = torch.where(batch.actor, x, -torch.inf).amax()
    return metrics


class MseValueLossFn:
    """The squared error, clipped about the old values if ``cliprange`` is given, halved and scaled."""

    def __init__(self, cfg: Any) -> None:
        self.scale, self.cliprange, self.loss_type = cfg.scale, cfg.cliprange, "TOKEN_LEVEL"

    def __call__(
        self, logits: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> Loss:
        return mse_value_loss(self, logits, data, global_valid_seqs, global_valid_toks)


def mse_value_loss(options: Any, logits: Tensor, data: Any, seqs: Tensor, toks: Tensor) -> Loss:
    """``MseValueLossFn.__call__`` for anything that has its attributes."""
    values = logits.squeeze(-1) if logits.dim() > 2 else logits
    valid = (data["token_mask"] * data["sample_mask"].unsqueeze(-1)) != 0
    clip = options.cliprange or None
    old = None if clip is None else data["values"]
    out = value_loss(values, old, data["returns"], valid, clip=clip, denom=toks)
    loss = options.scale * out.loss
    named = out.named()
    some = valid.any()
    metrics = {
        "loss": loss,
        "vf_clipfrac": named["clipped"] / toks,
        "returns_mean": named["return_sum"] / toks,
        "values_mean": named["value_sum"] / toks,
        "values_min": torch.where(some, torch.where(valid, values, torch.inf).amin(), 0.0),
        "values_max": torch.where(some, torch.where(valid, values, -torch.inf).amax(), 0.0),
        "returns_sq_mean": named["return_sq_sum"] / toks,
        "residual_sq_mean": named["error_sq_sum"] / toks,
    }
    return loss, _floats(metrics, values.device) | {"num_valid_samples": values.shape[0]}
