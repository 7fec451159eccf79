"""RLinf 0.3.0: ``rlinf.algorithms.advantages``, ``losses`` and ``utils.kl_penalty`` by name and argument.

Advantages are time first, ``[T, B]``, as there; losses take any shape with a mask that broadcasts. Values are RLinf's at
valid positions; masked ones hold 0 and influence nothing. Functions swallow the keyword arguments that they do not read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastrl._losses import TokenRows, aggregate
from fastrl.errors import ArgumentError
from fastrl.ops.affine_scan import affine_scan
from fastrl.ops.discounted_returns import discounted_returns
from fastrl.ops.gae import gae
from fastrl.ops.group_advantages import group_advantages
from fastrl.ops.policy_loss import policy_loss
from fastrl.ops.value_loss import value_loss
from fastrl.ops.whiten import whiten
from fastrl.presets._tokens import (
    OVERFLOW,
    NotCovered,
    clip_terms,
    kl_by_name,
    masked_mean,
    neighbours,
)

Advantages = tuple[Tensor, Tensor | None]
Loss = tuple[Tensor, dict[str, Tensor]]


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """KL per token: "kl", "abs", "mse" or "low_var_kl", or k1 to k3."""
    return kl_by_name(logprob, ref_logprob, kl_penalty)


@torch.no_grad()
def compute_gae_advantages_and_returns(
    rewards: Tensor,
    gamma: float = 1.0,
    gae_lambda: float = 1.0,
    values: Tensor | None = None,
    normalize_advantages: bool = True,
    normalize_returns: bool = False,
    loss_mask: Tensor | None = None,
    dones: Tensor | None = None,
    **kwargs: Any,
) -> Advantages:
    """``rewards`` ``[T, B]``; ``values`` and ``dones`` ``[T + 1, B]``. Without values: plain sums of what follows.

    Masked positions are steps; the mask only says what is normalised.
    """
    if dones is None:
        raise ArgumentError("compute_gae_advantages_and_returns: dones must be given, got None")
    critic = values is not None
    advantages, returns = gae(
        *(rewards, values[:-1] if values is not None else torch.zeros_like(rewards)),
        gamma=gamma if critic else 1.0,
        lam=gae_lambda if critic else 1.0,
        bootstrap=values[-1] if values is not None else None,
        dones=dones[1:],
        time_dim=0,
    )
    if normalize_advantages:
        advantages = _normalized(advantages, loss_mask)
    if normalize_returns:
        returns = _normalized(returns, loss_mask)
    return advantages, returns


def _normalized(x: Tensor, mask: Tensor | None) -> Tensor:
    return whiten(x, mask, eps=1e-5, eps_mode="std_add")


def compute_grpo_advantages(
    rewards: Tensor, loss_mask: Tensor, group_size: int, **kwargs: Any
) -> Advantages:
    """Groups of ``group_size`` neighbours; ``loss_mask`` ``[T, B]``. A group of one gives 0."""
    scores = rewards.reshape(-1)
    groups = neighbours(scores.numel(), group_size, scores.device)
    return _to_tokens(group_advantages(scores, groups), loss_mask), None


def compute_grpo_dynamic_advantages(
    rewards: Tensor,
    loss_mask: Tensor,
    group_size: int,
    idx_to_traj: list[int],
    advantage_mode: str = "turn",
    **kwargs: Any,
) -> Advantages:
    """A row per turn: its reward among the turns of its question, or the mean of its trajectory among trajectories."""
    scores = rewards.reshape(-1)
    trajectory = torch.tensor(idx_to_traj, device=scores.device)
    if advantage_mode == "turn":
        return _to_tokens(group_advantages(scores, trajectory // group_size), loss_mask), None
    if advantage_mode != "trajectory":
        raise ArgumentError(
            f"compute_grpo_dynamic_advantages: advantage_mode must be 'turn' or 'trajectory', got {advantage_mode!r}"
        )
    number = max(idx_to_traj, default=-1) + 1
    count = scores.new_zeros(number).index_add(0, trajectory, torch.ones_like(scores))
    mean = scores.new_zeros(number).index_add(0, trajectory, scores) / count.clamp(min=1)
    groups = neighbours(number, group_size, scores.device)
    return _to_tokens(group_advantages(mean, groups)[trajectory], loss_mask), None


def _to_tokens(per_row: Tensor, mask: Tensor) -> Tensor:
    """``[B]`` to ``[T, B]``, 0 where masked."""
    return torch.where(mask != 0, per_row.unsqueeze(0), 0.0)


@torch.no_grad()
def compute_reinpp_advantages(
    rewards: Tensor,
    loss_mask: Tensor,
    group_size: int,
    use_reinpp_baseline: bool = False,
    kl_beta: float = 0.0,
    logprob: Tensor | None = None,
    ref_logprob: Tensor | None = None,
    kl_penalty_type: str = "",
    **kwargs: Any,
) -> Advantages:
    """The reward at the last valid token, less the KL of valid tokens, summed from behind and whitened."""
    scores = rewards.reshape(-1)
    if use_reinpp_baseline:
        groups = neighbours(scores.numel(), group_size, scores.device)
        scores = group_advantages(scores, groups, scale="none")
    valid = loss_mask != 0
    position = torch.arange(len(valid), device=valid.device).unsqueeze(1)
    last = torch.where(valid, position, 0).amax(0)
    token_rewards = torch.where(position == last, scores, 0.0)
    if kl_beta > 0:
        if logprob is None or ref_logprob is None:
            raise ArgumentError(
                "compute_reinpp_advantages: logprob and ref_logprob must be given for kl_beta > 0"
            )
        token_rewards = token_rewards - kl_beta * kl_penalty(logprob, ref_logprob, kl_penalty_type)
    returns = discounted_returns(token_rewards, valid, gamma=1.0, time_dim=0)
    return whiten(returns, valid, ddof=0, eps=1e-8, eps_mode="rsqrt_max"), None


def compute_raw_advantages(
    rewards: Tensor, loss_mask: Tensor, normalize_advantages: bool = False, **kwargs: Any
) -> Advantages:
    """The reward at each valid token, normalised over them if asked."""
    advantages = _to_tokens(rewards.reshape(-1), loss_mask)
    return (_normalized(advantages, loss_mask) if normalize_advantages else advantages), None


def calculate_scores(rewards: Tensor, dones: Tensor, **kwargs: Any) -> dict[str, Any]:
    """``kwargs`` with ``rewards``: the sum over the first episode of each column of ``[T, B]``, in groups."""
    sums = affine_scan((~dones[1:]).to(rewards.dtype), rewards, time_dim=0)
    return kwargs | {"rewards": sums[0].reshape(-1, kwargs["group_size"]), "dones": dones}


class _Tokens:
    """Inputs of any shape as ``[rows, T]``, with RLinf's aggregation as options of a loss of fastrl."""

    def __init__(
        self,
        like: Tensor,
        mask: Tensor | None,
        loss_agg_func: Callable[..., Tensor] | None,
        max_episode_steps: int | None,
        loss_mask_sum: Tensor | None,
    ) -> None:
        self.like = like
        self.mask = torch.ones_like(like, dtype=torch.bool) if mask is None else mask != 0
        # RLinf counts before the mask is broadcast.
        self.count = self.mask.sum().clamp(min=1)
        self.weights: Tensor | None = None
        self.agg, self.denom = "token_mean", self.count
        name = getattr(loss_agg_func, "__name__", "masked_mean")
        if mask is not None and max_episode_steps is not None and loss_mask_sum is not None:
            self.weights = self.rows(max_episode_steps / loss_mask_sum)
            self.denom = torch.tensor(max(like.numel(), 1), device=like.device)
        elif name in ("seq_mean_token_sum", "seq_mean_token_mean"):
            self.agg, self.denom = name, torch.tensor(max(len(like), 1), device=like.device)
        elif name != "masked_mean":
            raise NotCovered(
                "fastrl.presets.rlinf: loss_agg_func must be masked_mean, seq_mean_token_sum or seq_mean_token_mean, "
                f"got {name}; use RLinf's loss"
            )
        self.valid = self.rows(self.mask)

    def rows(self, x: Tensor) -> Tensor:
        """Broadcast to the shape of the log-probabilities, ``[rows, T]``."""
        x = x.expand(self.like.shape)
        return x if x.dim() == 2 else x.reshape(1, -1)

    def options(self) -> dict[str, Any]:
        return {"agg": self.agg, "denom": self.denom}

    def aggregate(self, x: Tensor) -> Tensor:
        """What the loss would be of ``x``, which is 0 at masked positions."""
        x = x if self.weights is None else x * self.weights
        return aggregate(x, TokenRows(x, self.valid, None), self.agg, self.denom)

    def mean(self, x: Tensor) -> Tensor:
        """Over the valid positions of the broadcast mask."""
        return masked_mean(x, self.valid)


def compute_ppo_actor_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    advantages: Tensor,
    loss_mask: Tensor | None = None,
    clip_ratio_c: float | None = None,
    loss_agg_func: Callable[..., Tensor] | None = None,
    max_episode_steps: int | None = None,
    loss_mask_sum: Tensor | None = None,
    critic_warmup: bool | None = False,
    clip_log_ratio_min: float | None = None,
    clip_log_ratio_max: float | None = None,
    fast_path_zero_loss_mask: bool | None = False,
    **kwargs: Any,
) -> Loss:
    """PPO with its metrics; ``fast_path_zero_loss_mask`` is not read, an empty mask is 0 anyway."""
    tokens = _Tokens(logprobs, loss_mask, loss_agg_func, max_episode_steps, loss_mask_sum)
    logp, old, advantages = (tokens.rows(x) for x in (logprobs, old_logprobs, advantages))
    old = torch.where(tokens.valid, old, 0.0)
    log_ratio = torch.where(tokens.valid, logp, 0.0) - old
    if clip_log_ratio_min is not None or clip_log_ratio_max is not None:
        log_ratio = log_ratio.clamp(clip_log_ratio_min, clip_log_ratio_max)
        logp = old + log_ratio
    bounds = (clip_ratio_low, clip_ratio_high, clip_ratio_c)
    loss = _clipped(tokens, logp, old, advantages, tokens.weights, bounds)
    with torch.no_grad():
        ratio = log_ratio.clamp(-OVERFLOW, OVERFLOW).exp()
        terms = clip_terms(ratio, advantages, tokens.valid, *bounds)
        if critic_warmup:
            loss = torch.zeros_like(loss)
        metrics = {
            "actor/policy_loss": loss.detach(),
            "actor/policy_loss_abs": tokens.aggregate(terms.loss.abs()),
            "actor/ratio": tokens.mean(ratio),
            "actor/ratio_abs": tokens.mean((ratio - 1).abs()),
            "actor/clipped_ratio": tokens.mean(ratio.clamp(1 - bounds[0], 1 + bounds[1])),
            "actor/dual_cliped_ratio": tokens.mean(torch.where(terms.is_dual_clipped, ratio, 0.0)),
            "actor/approx_kl": -log_ratio.detach().sum() / tokens.count,
            "actor/clip_fraction": terms.is_clipped.sum() / tokens.count,
        }
    return loss, metrics


def _clipped(
    tokens: _Tokens,
    logp: Tensor,
    old: Tensor,
    advantages: Tensor,
    weights: Tensor | None,
    bounds: tuple[float, float, float | None],
) -> Tensor:
    return policy_loss(
        *(logp, old, advantages, tokens.valid),
        clip_low=bounds[0],
        clip_high=bounds[1],
        dual_clip=bounds[2],
        log_ratio_clamp=OVERFLOW,
        is_weights=weights,
        **tokens.options(),
    ).loss


def compute_decoupled_ppo_actor_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    advantages: Tensor,
    proximal_logprobs: Tensor | None = None,
    versions: Tensor | None = None,
    current_version: float | None = None,
    loss_mask: Tensor | None = None,
    clip_ratio_c: float | None = None,
    loss_agg_func: Callable[..., Tensor] | None = None,
    max_episode_steps: int | None = None,
    loss_mask_sum: Tensor | None = None,
    critic_warmup: bool | None = False,
    behave_weight_threshold: float | None = None,
    **kwargs: Any,
) -> Loss:
    """PPO about the proximal policy, weighted by proximal over behaviour; without one, interpolated by the versions."""
    everything = _Tokens(logprobs, loss_mask, loss_agg_func, max_episode_steps, loss_mask_sum)
    if proximal_logprobs is None:
        proximal_logprobs = _proximal(logprobs, old_logprobs, versions, current_version)
    distance = torch.where(everything.mask, (proximal_logprobs - old_logprobs).detach(), 0.0)
    weight = distance.clamp(-OVERFLOW, OVERFLOW).exp()
    kept = everything.mask.expand(weight.shape)
    if behave_weight_threshold is not None:
        kept = kept & (weight <= behave_weight_threshold)
    tokens = everything
    if behave_weight_threshold is not None:
        steps = None if loss_mask is None else max_episode_steps
        tokens = _Tokens(logprobs, kept, loss_agg_func, steps, loss_mask_sum)
    weights = tokens.rows(weight)
    weights = weights if tokens.weights is None else weights * tokens.weights
    logp, proximal, advantages = (tokens.rows(x) for x in (logprobs, proximal_logprobs, advantages))
    bounds = (clip_ratio_low, clip_ratio_high, clip_ratio_c)
    loss = _clipped(tokens, logp, proximal, advantages, weights, bounds)
    with torch.no_grad():
        if critic_warmup:
            loss = torch.zeros_like(loss)
        valid, count = everything.valid, everything.count
        log_ratio = torch.where(valid, logp - proximal, 0.0)
        ratio = log_ratio.clamp(-OVERFLOW, OVERFLOW).exp()
        terms = clip_terms(ratio, advantages, valid, *bounds)
        metrics = {
            "actor/policy_loss": loss.detach(),
            "actor/proximal_ratio": everything.mean(ratio),
            "actor/clipped_proximal_ratio": everything.mean(
                ratio.clamp(1 - bounds[0], 1 + bounds[1])
            ),
            "actor/clip_fraction": terms.is_clipped.sum() / count,
            "actor/dual_clip_fraction": terms.is_dual_clipped.sum() / count,
            "actor/behav_clip_fraction": 1.0 - tokens.count / count,
            "actor/proximal_approx_kl": -log_ratio.sum() / count,
            "actor/behav_approx_kl": -torch.where(kept, distance, 0.0).sum() / tokens.count,
        }
        if (
            versions is not None
            and current_version is not None
            and versions.shape == everything.mask.shape
        ):
            metrics["actor/average_version"] = masked_mean(versions.float(), everything.mask)
            metrics["actor/current_version"] = torch.tensor(
                float(current_version), device=loss.device
            )
    return loss, metrics


@torch.no_grad()
def _proximal(
    logprobs: Tensor, old: Tensor, versions: Tensor | None, current_version: float | None
) -> Tensor:
    """The policy one version ago, on the line from the behaviour policy to the one in training."""
    if versions is None or current_version is None:
        return old.detach()
    age = current_version - versions.float()
    share = torch.where((age > 0) & (versions >= 0), (age - 1) / age, 0.0).clamp(0.0, 1.0)
    share = share.view(*share.shape, *[1] * (logprobs.dim() - share.dim()))
    return old + share * (logprobs - old)


def compute_ppo_critic_loss(
    values: Tensor,
    returns: Tensor,
    prev_values: Tensor,
    value_clip: float,
    huber_delta: float,
    loss_mask: Tensor | None = None,
    max_episode_steps: int | None = None,
    loss_mask_sum: Tensor | None = None,
    **kwargs: Any,
) -> Loss:
    """The clipped Huber loss. Weights by episode length (``loss_mask_sum``) are not here."""
    if loss_mask is not None and max_episode_steps is not None and loss_mask_sum is not None:
        raise NotCovered(
            "fastrl.presets.rlinf.compute_ppo_critic_loss: max_episode_steps must be None beside loss_mask_sum; "
            "use RLinf's loss"
        )
    tokens = _Tokens(values, loss_mask, None, None, None)
    rows = [tokens.rows(x) for x in (values, prev_values, returns)]
    loss = value_loss(
        *(*rows, tokens.valid),
        clip=value_clip,
        loss="huber",
        huber_delta=huber_delta,
        denom=tokens.count,
    ).loss
    with torch.no_grad():
        unexplained, total = ((x - tokens.mean(x)).square() for x in (rows[2] - rows[0], rows[2]))
        explained = 1 - tokens.mean(unexplained) / tokens.mean(total)
        moved = (prev_values + (values - prev_values).clamp(-value_clip, value_clip)) - prev_values
        metrics = {
            "critic/value_loss": loss.detach(),
            "critic/value_clip_ratio": (moved.abs() > value_clip).float().mean(),
            "critic/explained_variance": torch.where(explained.isfinite(), explained, torch.nan),
        }
    return loss, metrics


def compute_grpo_actor_loss_fn(**kwargs: Any) -> Loss:
    """The registered ``actor``."""
    return compute_ppo_actor_loss(**kwargs)


def compute_ppo_actor_critic_loss(**kwargs: Any) -> Loss:
    """The registered ``actor_critic``: the sum of both losses."""
    return _sum_of(compute_ppo_actor_loss(**kwargs), compute_ppo_critic_loss(**kwargs))


def compute_decoupled_ppo_actor_critic_loss(**kwargs: Any) -> Loss:
    """The registered ``decoupled_actor_critic``."""
    return _sum_of(compute_decoupled_ppo_actor_loss(**kwargs), compute_ppo_critic_loss(**kwargs))


def _sum_of(actor: Loss, critic: Loss) -> Loss:
    return actor[0] + critic[0], actor[1] | critic[1]
