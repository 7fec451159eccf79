"""slime 0.4.0 (and its fork miles): the functions that its ``--custom-*-path`` arguments take, and GAE over its lists.

Rollouts are lists of one tensor per response; here they lie end to end with ``cu_seqlens``. Written against
``slime/backends/megatron_utils/loss.py``, ``slime/utils/ppo_utils.py`` and ``examples/DrGRPO`` of slime (git 624b824a of
2026-08-21 and 00c2d6db), and ``miles/backends/training_utils/loss.py`` of miles-rl 0.0.2. Context and tensor parallel size
must be 1. Masked positions hold 0.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl._losses import TokenRows
from fastrl.errors import ArgumentError
from fastrl.ops.discounted_returns import discounted_returns
from fastrl.ops.gae import gae
from fastrl.ops.group_advantages import group_advantages
from fastrl.ops.policy_loss import policy_loss
from fastrl.ops.token_logprobs import token_logprobs
from fastrl.presets._tokens import OVERFLOW, NotCovered, clip_terms, end_to_end, offsets_of
from fastrl.surrogates import kl_penalty, rollout_correction

BY_GROUP = ("grpo", "gspo", "cispo")
Reducer = Callable[[Tensor], Tensor]
Corrected = tuple[Tensor, list[Tensor], dict[str, Tensor]]


def _refuse(args: Any, name: str, **allowed: Any) -> None:
    for key, value in allowed.items():
        found = getattr(args, key, value)
        if found != value and found is not None:
            raise NotCovered(
                f"fastrl.presets.slime.{name}: {key} must be {value}, got {found!r}; use the trainer's function"
            )


def compute_approx_kl(
    log_probs: Tensor,
    log_probs_base: Tensor,
    kl_loss_type: str,
    importance_ratio: Tensor | None = None,
) -> Tensor:
    """KL per token, "k1", "k2", "k3", or "low_var_kl": k3 times the ratio, clamped at 10."""
    kl = kl_penalty(
        *(log_probs.float(), log_probs_base.float()),
        estimator=kl_loss_type.replace("low_var_kl", "k3"),
        input_clamp=OVERFLOW,
    )
    kl = kl if importance_ratio is None else importance_ratio * kl
    return kl.clamp(-10, 10) if kl_loss_type == "low_var_kl" else kl


@torch.no_grad()
def get_advantages_and_returns_batch(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    values_list: Sequence[Tensor],
    rewards_list: Sequence[Tensor],
    gamma: float,
    lambd: float,
    chunked: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:
    """GAE of each response, every token a step; ``total_lengths`` and ``chunked`` are not needed."""
    out = gae(
        *(end_to_end(rewards_list), end_to_end(values_list)),
        gamma=gamma,
        lam=lambd,
        cu_seqlens=offsets_of(response_lengths, values_list[0].device),
    )
    advantages, returns = (list(x.split(list(response_lengths))) for x in out)
    return advantages, returns


@torch.no_grad()
def compute_advantages_and_returns(
    args: Any, rollout_data: dict[str, Any], holes: str = "ignore"
) -> None:
    """``--custom-advantage-function-path``: fills ``advantages`` and ``returns`` of ``rollout_data``.

    By ``args.advantage_estimator``: "grpo", "gspo", "cispo", "ppo", "reinforce_plus_plus" or
    "reinforce_plus_plus_baseline". Masked tokens are steps as in slime, or none with ``holes="carry"`` as in miles; either
    way their KL is no reward. The trainer whitens afterwards if it is told to.
    """
    name = "compute_advantages_and_returns"
    _refuse(args, name, context_parallel_size=1)
    masks, lengths = rollout_data["loss_masks"], rollout_data["response_lengths"]
    kl = torch.where(mask := end_to_end(masks) != 0, _kl(args, rollout_data), 0.0)
    cu_seqlens = offsets_of(lengths, kl.device)
    rewards = torch.tensor(rollout_data["rewards"], dtype=torch.float32, device=kl.device)
    rows = TokenRows(kl, mask, cu_seqlens)
    estimator = args.advantage_estimator
    penalty = -args.kl_coef * kl
    scan: dict[str, Any] = {"gamma": args.gamma, "holes": holes, "cu_seqlens": cu_seqlens}
    if estimator in BY_GROUP:
        advantages = returns = torch.where(mask, rows.spread(rewards), 0.0)
    elif estimator == "reinforce_plus_plus_baseline":
        advantages = returns = torch.where(mask, rows.spread(rewards) + penalty, 0.0)
    elif estimator in ("ppo", "reinforce_plus_plus"):
        # slime's PPO pays at the last token, its REINFORCE++ and miles at the last valid one.
        to_any = estimator == "ppo" and holes == "ignore"
        last = cu_seqlens[1:].long() - 1 if to_any else _last_valid(mask, rows)
        token_rewards = penalty.index_add(
            0, last.clamp(min=0), torch.where(last >= 0, rewards, 0.0)
        )
        if estimator == "ppo":
            values = end_to_end(rollout_data["values"])
            advantages, returns = gae(token_rewards, values, mask, lam=args.lambd, **scan)
        else:
            advantages = returns = discounted_returns(token_rewards, mask, **scan)
    else:
        raise ArgumentError(
            f"fastrl.presets.slime.{name}: advantage_estimator must be one that slime has, got {estimator!r}"
        )
    rollout_data["advantages"], rollout_data["returns"] = (
        list(x.split(list(lengths))) for x in (advantages, returns)
    )


def _kl(args: Any, rollout_data: dict[str, Any]) -> Tensor:
    """What slime has left in ``kl``, or the same from the log-probabilities."""
    if "kl" in rollout_data:
        return end_to_end(rollout_data["kl"])
    by_rollout = getattr(args, "use_rollout_logprobs", False)
    log_probs = rollout_data.get("rollout_log_probs" if by_rollout else "log_probs")
    if args.kl_coef == 0 or not log_probs:
        return torch.zeros_like(
            end_to_end(log_probs or rollout_data["values"]), dtype=torch.float32
        )
    base = end_to_end(rollout_data["ref_log_probs"])
    return compute_approx_kl(end_to_end(log_probs), base, args.kl_loss_type)


def _last_valid(mask: Tensor, rows: TokenRows) -> Tensor:
    """``[B]``: position of the last valid token of each row, -1 for a row without one."""
    assert rows.cu_seqlens is not None
    position = torch.where(mask, torch.arange(len(mask), device=mask.device), -1)
    lengths = rows.cu_seqlens.diff().long()
    last = torch.segment_reduce(position.double(), "max", lengths=lengths, initial=-1.0)
    return last.long()


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """``--custom-reward-post-process-path``: raw rewards, and rewards compared within ``sample.group_index``.

    Groups may differ in size and lie in any order; a group of one gets 0.
    """
    raw = [sample.get_reward_value(args) for sample in samples]
    compared = args.advantage_estimator in (*BY_GROUP, "reinforce_plus_plus_baseline")
    if not (compared and args.rewards_normalization):
        return raw, raw
    by_std = args.advantage_estimator in BY_GROUP and args.grpo_std_normalization
    groups = [
        index // args.n_samples_per_prompt if sample.group_index is None else sample.group_index
        for index, sample in enumerate(samples)
    ]
    rewards = torch.tensor(raw, dtype=torch.float32)
    return raw, group_advantages(rewards, groups, scale="std" if by_std else "none").tolist()


def vanilla_tis_function(args: Any, **batch: Any) -> Corrected:
    """``--custom-tis-function-path``: the loss times the importance weight, clamped to ``tis_clip_low`` and ``tis_clip``."""
    return _corrected(args, "clamp", **batch)


def icepop_function(args: Any, **batch: Any) -> Corrected:
    """The same with weight 0 beyond the bounds."""
    return _corrected(args, "zero", **batch)


def _corrected(
    args: Any,
    beyond: str,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: list[Tensor],
    **kwargs: Any,
) -> Corrected:
    mask = end_to_end(loss_masks) != 0
    # With context parallelism the masks are those of whole responses, the rest is this rank's part.
    mask = mask if mask.shape == pg_loss.shape else torch.ones_like(pg_loss, dtype=torch.bool)
    train, rollout = end_to_end(train_log_probs), end_to_end(rollout_log_probs)
    weights, metrics = _importance(args, beyond, train, rollout, mask)
    return torch.where(mask, pg_loss, 0.0) * weights, loss_masks, metrics


def _importance(
    args: Any, beyond: str, train: Tensor, rollout: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights per token, and what slime logs of them; both 0 where masked."""
    out = rollout_correction(
        *(x.unsqueeze(0) for x in (train, rollout, mask)),
        low=args.tis_clip_low,
        high=args.tis_clip,
        beyond=beyond,
        log_clamp=OVERFLOW,
    )
    weights, raw = out.weights[0], out.raw[0]
    metrics = {"tis": raw, "tis_clipfrac": (weights != raw).float(), "tis_abs": (raw - 1).abs()}
    return weights, {name: torch.where(mask, x, 0.0) for name, x in metrics.items()}


def dr_grpo_reducer(divisor: float) -> Callable[..., Reducer]:
    """A function for ``--custom-pg-loss-reducer-function-path`` that divides each response by a constant (Dr. GRPO)."""

    def get_pg_loss_reducer(
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        loss_masks: Sequence[Tensor],
        calculate_per_token_loss: bool = False,
    ) -> Reducer:
        valid = end_to_end(loss_masks) != 0

        def reduce(x: Tensor) -> Tensor:
            total = torch.where(valid, x, 0.0).sum()
            return total if calculate_per_token_loss else total / divisor

        return reduce

    return get_pg_loss_reducer


# The divisor of slime's own example.
get_pg_loss_reducer = dr_grpo_reducer(1000.0)


def policy_loss_function(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, dict[str, Tensor]]:
    """``--loss-type custom_loss --custom-loss-function-path``: from packed logits ``[1, T, V]`` to the loss and its metrics.

    PPO, GSPO or CISPO with slime's importance weights, off-policy sequence mask, KL and entropy.
    """
    name = "policy_loss_function"
    _refuse(args, name, context_parallel_size=1, tensor_model_parallel_size=1, rollout_top_p=1.0)
    _refuse(args, name, custom_tis_function_path=None, qkv_format="thd")
    _refuse(args, name, use_score_centering=False, true_on_policy_mode=False)
    logp, entropy = _response_logprobs(args, batch, logits)
    mask = end_to_end(batch["loss_masks"]) != 0
    rows = TokenRows(logp, mask, offsets_of(batch["response_lengths"], logp.device))
    train = batch.get("log_probs") or None
    train = logp.detach() if train is None else end_to_end(train)
    rollout = batch.get("rollout_log_probs") or None
    rollout = None if rollout is None else end_to_end(rollout)
    old = rollout if args.use_rollout_logprobs else train
    if old is None:
        raise ArgumentError(
            f"fastrl.presets.slime.{name}: rollout_log_probs must be given, got None"
        )
    advantages = end_to_end(batch["advantages"])

    reducer = sum_of_sample_mean
    custom = getattr(args, "custom_pg_loss_reducer_function_path", None)
    if custom is not None:
        reducer = _loaded(custom)(
            *(batch["total_lengths"], batch["response_lengths"], batch["loss_masks"]),
            args.calculate_per_token_loss,
        )
    weights = _weights_of(reducer, logp)
    metrics: dict[str, Tensor] = {}
    new, base = rows.select(logp, torch.float32), rows.select(old, torch.float32)
    with torch.no_grad():
        log_ratio = new - base
        by_row = rows.sums(log_ratio) / rows.counts.clamp(min=1).float()
        if args.use_opsm:
            dropped = mask & (advantages < 0) & (rows.spread(-by_row) > args.opsm_delta)
            metrics["opsm_clipfrac"] = (
                rows.sums(dropped.float()) / rows.counts.clamp(min=1).float()
            ).sum()
            weights = torch.where(dropped, 0.0, weights)
        if args.advantage_estimator == "gspo":
            log_ratio = torch.where(mask, rows.spread(by_row), 0.0)
        ratio = log_ratio.clamp(-OVERFLOW, OVERFLOW).exp()
        if args.use_tis or args.get_mismatch_metrics:
            if rollout is None:
                raise ArgumentError(
                    f"fastrl.presets.slime.{name}: rollout_log_probs must be given for use_tis"
                )
            factor, logged = _importance(args, "clamp", train, rollout, mask)
            weights = weights * factor
            logged["ois"] = torch.where(mask, ratio, 0.0)
            metrics |= {name: sum_of_sample_mean(x) for name, x in logged.items()}
        bounds = (args.eps_clip, args.eps_clip_high, getattr(args, "eps_clip_c", None))
        is_clipped = clip_terms(ratio, advantages, mask, *bounds).is_clipped
        if args.advantage_estimator == "cispo":
            is_clipped = mask & (ratio != ratio.clamp(1 - bounds[0], 1 + bounds[1]))

    pg_loss = policy_loss(
        *(logp, old, advantages, mask),
        ratio="sequence" if args.advantage_estimator == "gspo" else "token",
        surrogate="cispo" if args.advantage_estimator == "cispo" else "clip",
        clip_low=bounds[0],
        clip_high=bounds[1],
        dual_clip=None if args.advantage_estimator == "cispo" else bounds[2],
        log_ratio_clamp=OVERFLOW,
        is_weights=weights,
        agg="token_sum",
        cu_seqlens=rows.cu_seqlens,
    ).loss
    entropy_loss = sum_of_sample_mean(torch.where(mask, entropy, 0.0))
    loss = pg_loss - args.entropy_coef * entropy_loss
    metrics |= {
        "pg_loss": pg_loss.detach(),
        "entropy_loss": entropy_loss.detach(),
        "pg_clipfrac": sum_of_sample_mean(is_clipped.float()),
        "ppo_kl": sum_of_sample_mean(-log_ratio),
    }
    if args.use_kl_loss:
        ref = rows.select(end_to_end(batch["ref_log_probs"]), torch.float32)
        unbiased = (new - base).clamp(max=OVERFLOW).exp() if args.use_unbiased_kl else None
        kl_loss = sum_of_sample_mean(compute_approx_kl(new, ref, args.kl_loss_type, unbiased))
        loss = loss + args.kl_loss_coef * kl_loss
        metrics["kl_loss"] = kl_loss.detach()
    if rollout is not None:
        compared = (new if args.use_rollout_logprobs else base).detach()
        difference = (compared - rows.select(rollout, torch.float32)).abs()
        metrics["train_rollout_logprob_abs_diff"] = sum_of_sample_mean(difference)
    metrics["loss"] = loss.detach()
    return loss, metrics


def value_loss_function(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's loss from packed values ``[1, T, 1]``: the larger squared error, not halved.

    A composition in torch: ``fastrl.value_loss`` has no weights, and a rollout of several responses shares one divisor.
    """
    _refuse(args, "value_loss_function", context_parallel_size=1, qkv_format="thd")
    mask = end_to_end(batch["loss_masks"]) != 0
    values = torch.cat([rows.reshape(-1) for rows, _ in _responses(batch, logits)])
    values, old, returns = (
        torch.where(mask, x, 0.0)
        for x in (values, end_to_end(batch["values"]), end_to_end(batch["returns"]))
    )
    clipped = old + (values - old).clamp(-args.value_clip, args.value_clip)
    error = torch.maximum((values - returns).square(), (clipped - returns).square())
    loss = sum_of_sample_mean(torch.where(mask, error, 0.0))
    is_clipped = (values - old).abs() > args.value_clip
    return loss, {
        "value_loss": loss.detach(),
        "value_clipfrac": sum_of_sample_mean(is_clipped.float()).detach(),
    }


def _responses(batch: dict[str, Any], logits: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of the logits, and tokens, of each response; those of a token are at the one before it."""
    end = 0
    for tokens, total, length in zip(
        batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"]
    ):
        end += total
        yield logits[0, end - length - 1 : end - 1], tokens[total - length :]


def _response_logprobs(args: Any, batch: dict[str, Any], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the response tokens."""
    parts = [
        token_logprobs(rows, tokens, temperature=args.rollout_temperature, entropy=True)
        for rows, tokens in _responses(batch, logits)
    ]
    entropies = [part.entropy for part in parts if part.entropy is not None]
    return torch.cat([part.logp for part in parts]), torch.cat(entropies)


def _weights_of(reducer: Reducer, like: Tensor) -> Tensor:
    """A reducer is linear, so its gradient is the weight that it gives each token."""
    with torch.enable_grad():
        x = torch.zeros_like(like, dtype=torch.float32).requires_grad_()
        (weights,) = torch.autograd.grad(reducer(x), x)
    return weights


def _loaded(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
