"""Policy losses, the value loss and the KL penalty of verl."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastrl.errors import ArgumentError
from fastrl.ops.policy_loss import policy_loss
from fastrl.ops.value_loss import value_loss
from fastrl.presets._tokens import kl_by_name
from fastrl.presets.verl.common import Loss, LossCall, aggregation, factor, option
from fastrl.presets.verl.rollout import (
    compute_offpolicy_metrics,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from fastrl.surrogates import (
    clip_cov_loss,
    dppo_loss,
    dro_loss,
    gmpo_loss,
    kl_cov_loss,
    sapo_loss,
)


def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """PPO with asymmetric and dual clip."""
    call = LossCall(config, loss_agg_mode, response_mask)
    out = policy_loss(
        *(log_prob, old_log_prob, advantages, response_mask),
        dual_clip=option(config, "clip_ratio_c", 3.0),
        is_weights=rollout_is_weights,
        **(call.clips() | call.agg),
    )
    return call.result(out, "clipped", "dual_clip")


def compute_policy_loss_gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """GSPO with the gradient of GSPO-token."""
    call = LossCall(config, loss_agg_mode, response_mask)
    out = policy_loss(
        *(log_prob, old_log_prob, advantages, response_mask),
        ratio="sequence_token",
        log_ratio_clamp=10.0,
        is_weights=rollout_is_weights,
        **(call.clips() | call.agg),
    )
    return call.result(out, "clipped")


def compute_policy_loss_cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """CISPO with bounds about 1."""
    call = LossCall(config, loss_agg_mode, response_mask)
    out = policy_loss(
        *(log_prob, old_log_prob, advantages, response_mask),
        surrogate="cispo",
        is_weights=rollout_is_weights,
        **(call.clips() | call.agg),
    )
    return call.result(out, "clipped")


def compute_policy_loss_gpg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """REINFORCE."""
    call = LossCall(config, loss_agg_mode, response_mask)
    out = policy_loss(
        *(log_prob, old_log_prob, advantages, response_mask),
        surrogate="reinforce",
        is_weights=rollout_is_weights,
        **call.agg,
    )
    return out.loss * call.factor, {}


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """REINFORCE with importance weights of the rollout."""
    call = LossCall(config, loss_agg_mode, response_mask)
    out = policy_loss(
        *(log_prob, rollout_log_prob, advantages, response_mask),
        surrogate="reinforce",
        log_ratio_clamp=None,
        is_weights=rollout_is_weights,
        **call.agg,
    )
    loss, metrics = call.result(out)
    return loss, {"actor/ppo_kl": metrics["actor/ppo_kl"]}


def compute_policy_loss_sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """SAPO; the aggregation is always "seq-mean-token-mean", as in verl."""
    call = LossCall(config, "seq-mean-token-mean", response_mask)
    out = sapo_loss(
        *(log_prob, old_log_prob, advantages, response_mask),
        tau_positive=option(config, "tau_pos", 1.0),
        tau_negative=option(config, "tau_neg", 1.05),
        is_weights=rollout_is_weights,
        **call.agg,
    )
    return call.result(out)


def _dppo(
    divergence: str, arguments: tuple[Tensor, ...], mode: str, config: Any, weights: Tensor | None
) -> Loss:
    call = LossCall(config, mode, arguments[3])
    out = dppo_loss(
        *arguments,
        divergence=divergence,
        low=call.low,
        high=call.high,
        ratio_cap=option(config, "clip_ratio_c", 20.0),
        is_weights=weights,
        **call.agg,
    )
    return call.result(out, "clipped", "capped")


def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """DPPO with the binary total variation; the clip ratios are its thresholds."""
    arguments = (log_prob, old_log_prob, advantages, response_mask)
    return _dppo("tv", arguments, loss_agg_mode, config, rollout_is_weights)


def compute_policy_loss_dppo_kl(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """DPPO with the binary KL; the clip ratios are its thresholds."""
    arguments = (log_prob, old_log_prob, advantages, response_mask)
    return _dppo("kl", arguments, loss_agg_mode, config, rollout_is_weights)


def compute_policy_loss_dro(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """DRO with ``config.policy_loss.dro_beta``."""
    call = LossCall(config, loss_agg_mode, response_mask)
    out = dro_loss(
        *(log_prob, old_log_prob, advantages, response_mask),
        beta=option(config.policy_loss, "dro_beta", 0.0),
        is_weights=rollout_is_weights,
        **call.agg,
    )
    loss, metrics = call.result(out)
    return loss, {"actor/ppo_kl": metrics["actor/ppo_kl"]}


def compute_policy_loss_geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """GMPO; the mean over all rows of the micro-batch, whatever the aggregation, as in verl."""
    call = LossCall(config, "token-sum", response_mask)
    out = gmpo_loss(
        *(log_prob, old_log_prob, advantages, response_mask),
        log_clip_low=call.low,
        log_clip_high=call.high,
        is_weights=rollout_is_weights,
    )
    call.factor = 1
    return call.result(out, "clip_high", "clip_low")


def compute_policy_loss_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """Clip-Cov; draws its tokens with torch's generator, as verl does."""
    call = LossCall(config, loss_agg_mode, response_mask)
    options = config.policy_loss
    out = clip_cov_loss(
        *(log_prob, old_log_prob, advantages, response_mask),
        fraction=option(options, "clip_cov_ratio", 2e-4),
        cov_low=option(options, "clip_cov_lb", 1.0),
        cov_high=option(options, "clip_cov_ub", 5.0),
        is_weights=rollout_is_weights,
        **(call.clips() | call.agg),
    )
    loss, metrics = call.result(out, "dropped")
    del metrics["actor/pg_clipfrac_lower"]
    return loss, metrics


def compute_policy_loss_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """KL-Cov; its ``ppo_kl`` is the mean of the absolute log-ratio, as in verl."""
    call = LossCall(config, loss_agg_mode, response_mask)
    options = config.policy_loss
    out = kl_cov_loss(
        *(log_prob, old_log_prob, advantages, response_mask),
        fraction=option(options, "kl_cov_ratio", 2e-4),
        kl_coef=option(options, "ppo_kl_coef", 1.0),
        is_weights=rollout_is_weights,
        **call.agg,
    )
    loss, _ = call.result(out)
    return loss, {"actor/ppo_kl": out.metrics["abs_kl"] / out.metrics["tokens"].clamp(min=1)}


def compute_policy_loss_bypass_mode(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """``old_log_prob`` is the engine's: PPO against it, or REINFORCE with weights; rejection by ``rollout_rs``."""
    options = option(config.policy_loss, "rollout_correction")
    if options is None:
        raise ArgumentError(
            "verl bypass_mode: config.policy_loss.rollout_correction must be given, got None"
        )
    kind = option(options, "loss_type", "ppo_clip")
    if kind not in ("ppo_clip", "reinforce"):
        raise ArgumentError(
            f"verl bypass_mode: loss_type must be 'ppo_clip' or 'reinforce', got {kind!r}"
        )
    log_ratio = log_prob.detach() - old_log_prob
    mask, weights = response_mask, None
    metrics: dict[str, Tensor] = {}
    level, threshold = (
        option(options, "rollout_is"),
        option(options, "rollout_is_threshold", 2.0),
    )
    if level is not None:
        normalize = option(options, "rollout_is_batch_normalize", False)
        weights, found = compute_rollout_correction_weights(
            log_ratio, response_mask, level, threshold, normalize
        )
        metrics |= found
    rejection = option(options, "rollout_rs")
    if rejection is not None:
        limits = option(options, "rollout_rs_threshold")
        mask, found = compute_rollout_rejection_mask(log_ratio, response_mask, rejection, limits)
        metrics |= found
    metrics |= compute_offpolicy_metrics(log_prob, old_log_prob, response_mask)
    call = (old_log_prob, log_prob, advantages, mask, loss_agg_mode, config)
    if kind == "ppo_clip":
        loss, of_loss = compute_policy_loss_vanilla(*call)
    else:
        loss, of_loss = compute_policy_loss_reinforce(*call, weights)
    return loss, of_loss | {f"rollout_corr/{name}": value for name, value in metrics.items()}


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The clipped value loss and the share of clipped tokens."""
    chosen = aggregation(
        *(loss_agg_mode, response_mask, dp_size, batch_num_tokens, global_batch_size),
        loss_scale_factor,
    )
    out = value_loss(vpreds, values, returns, response_mask, clip=cliprange_value, **chosen)
    named = out.named()
    fraction = named["clipped"] / named["tokens"].clamp(min=1)
    return out.loss * factor(loss_agg_mode, dp_size), fraction


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Per-token KL; a suffix ``+`` gives the gradient of k2."""
    gradient = "k2" if kl_penalty.endswith("+") else "pathwise"
    return kl_by_name(logprob, ref_logprob, kl_penalty.removesuffix("+"), gradient)
