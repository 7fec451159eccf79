"""Estimators that compare the samples of a group beyond a baseline and a scale."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from fastrl import _checks
from fastrl.errors import ArgumentError
from fastrl.ops.group_advantages import group_advantages
from fastrl.ops.group_ids import group_ids
from fastrl.ops.whiten import whiten

Groups = Tensor | Sequence[Hashable]


def dense_ids(groups: Groups, device: torch.device) -> Tensor:
    """``[N]`` int64 ids from 0 on."""
    return group_ids(groups).to(device)


def two_largest(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the largest value of each group, ``[G]`` in the order of ids, and the second largest, -inf if there is none."""
    order = torch.argsort(values, descending=True, stable=True)
    order = order[torch.argsort(ids[order], stable=True)]
    of_group = ids[order]
    is_first = torch.ones_like(of_group, dtype=torch.bool)
    is_first[1:] = of_group[1:] != of_group[:-1]
    next_value = torch.full_like(values, -torch.inf)
    next_value[:-1] = torch.where(is_first[1:], -torch.inf, values[order][1:])
    return order[is_first], next_value[is_first]


def to_tokens(per_sample: Tensor, mask: Tensor | None) -> Tensor:
    """``[N]`` as it is without a mask, else ``[N, T]`` with 0 at masked positions."""
    return per_sample if mask is None else torch.where(mask != 0, per_sample.unsqueeze(1), 0.0)


def pass_at_k_advantages(
    rewards: Tensor,
    groups: Groups,
    *,
    scale: str = "std",
    eps: float = 1e-6,
    singleton: str = "zero",
    mask: Tensor | None = None,
) -> Tensor:
    r"""Only the best sample of a group has an advantage: its lead over the second best.

    ::

        A_i = (s_i - second largest s) / (std + eps)   for the first sample with the largest s of its group, else 0

    Args:
        rewards: ``[N]``, one score per sample. NaN: not scored.
        groups: as in :func:`fastrl.group_advantages`.
        scale: ``"std"`` or ``"none"``, as in ``group_advantages``.
        eps: added to the standard deviation.
        singleton: ``"zero"``, or ``"error"`` to refuse a group of one.
        mask: ``[N, T]``, non-zero is valid; asks for one advantage per token.

    Returns:
        ``[N]``, or ``[N, T]`` with a mask, 0 where masked; float32, float64 for float64. Deterministic; a constant.

    Source: Tang et al., Optimizing Language Models for Inference Time Objectives using RL (2025); verl ``grpo_passk``.

    >>> pass_at_k_advantages(torch.tensor([1.0, 0.0, 0.5]), [7, 7, 7], scale="none")
    tensor([0.5000, 0.0000, 0.0000])
    """
    _checks.option("pass_at_k_advantages", "scale", scale, ("std", "none"))
    _checks.option("pass_at_k_advantages", "singleton", singleton, ("zero", "error"))
    # Both scores are shifted and scaled by the same numbers, so their difference needs no statistics of its own.
    scaled = group_advantages(rewards, groups, scale=scale, eps=eps, singleton=singleton)
    scaled = torch.where(rewards.isnan(), -torch.inf, scaled)
    best, second = two_largest(scaled, dense_ids(groups, rewards.device))
    lead = torch.where(second.isneginf() | scaled[best].isneginf(), 0.0, scaled[best] - second)
    return to_tokens(torch.zeros_like(scaled).index_copy(0, best, lead), mask)


def gpg_advantages(
    rewards: Tensor, groups: Groups, *, singleton: str = "zero", mask: Tensor | None = None
) -> Tensor:
    r"""Centred rewards, scaled up by the share of samples with a reward: ``A_i = N / max(nonzero, 1) * (s_i - mean)``.

    Arguments as in :func:`pass_at_k_advantages`; ``singleton="raw"`` gives a group of one its score, as verl does.

    Source: Chu et al., GPG: A Simple and Strong Reinforcement Learning Baseline (2025); verl ``gpg``.

    >>> gpg_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), ["a", "a", "b", "b"])
    tensor([ 2., -2.,  0.,  0.])
    """
    centred = group_advantages(rewards, groups, scale="none", singleton=singleton)
    alpha = rewards.shape[0] / torch.count_nonzero(rewards).clamp(min=1)
    return to_tokens(centred * alpha.to(centred.dtype), mask)


def gdpo_advantages(
    rewards: Tensor,
    groups: Groups,
    weights: Tensor | Sequence[float],
    *,
    mask: Tensor | None = None,
    over: str = "responses",
    eps: float = 1e-6,
    singleton: str = "zero",
    scale: str = "std",
) -> Tensor:
    r"""Several rewards, each normalised in its group, summed by weight, then normalised over the batch.

    Args:
        rewards: ``[N, K]``. NaN: this objective of this sample is not scored.
        groups, weights, eps, singleton, scale: as in :func:`fastrl.group_advantages`.
        mask: ``[N, T]``, non-zero is valid; asks for one advantage per token.
        over: ``"tokens"`` whitens over valid tokens, where a long response counts more (verl); ``"responses"`` whitens
            over samples with at least one score; ``"none"`` leaves the sum.

    Returns:
        ``[N]``, or ``[N, T]`` with a mask, 0 where masked and for samples without a score. Deterministic; a constant.

    Source: GDPO (2026); verl ``gdpo``.

    >>> rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 10.0], [0.0, 0.0]])
    >>> gdpo_advantages(rewards, [0, 0, 1, 1], [1.0, 1.0], over="none")
    tensor([ 0.7071, -0.7071,  0.7071, -0.7071])
    """
    _checks.option("gdpo_advantages", "over", over, ("responses", "tokens", "none"))
    if over == "tokens" and mask is None:
        raise ArgumentError(
            'gdpo_advantages: mask must be given for over="tokens", got None; pass it, or over="responses"'
        )
    summed = group_advantages(
        rewards, groups, weights=weights, eps=eps, singleton=singleton, scale=scale
    )
    if over == "tokens" and mask is not None:
        return whiten(to_tokens(summed, mask), mask)
    if over == "responses":
        summed = whiten(summed, ~rewards.isnan().all(1))
    return to_tokens(summed, mask)


def once_per_episode(
    groups: Groups, episodes: Groups, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Which row is the first of its (group, episode), ``[N]`` bool, and the index of that row for each row, ``[N]``.

    When an episode became several rows, pass the first as ``valid=`` to ``group_advantages`` and index its result with
    the second: each episode then counts once in the statistics of its group, however many rows it has.

    >>> once_per_episode(["q", "q", "q"], [0, 0, 1], torch.device("cpu"))
    (tensor([ True, False,  True]), tensor([0, 0, 2]))
    """
    pair = _pairs(dense_ids(groups, device), dense_ids(episodes, device))
    rows = torch.arange(pair.shape[0], device=device)
    count = int(pair.max()) + 1 if pair.numel() else 0
    first = torch.full((count,), pair.shape[0], device=device)
    first = first.scatter_reduce(0, pair, rows, "amin")[pair]
    return first == rows, first


def gigpo_advantages(
    episode_rewards: Tensor,
    step_returns: Tensor,
    groups: Groups,
    episodes: Groups,
    states: Groups,
    *,
    step_weight: float = 1.0,
    scale: str = "std",
    eps: float = 1e-6,
    mask: Tensor | None = None,
) -> Tensor:
    r"""Group-in-group advantages: of the episode among its group, plus of the step among steps from the same state.

    ::

        A = A_episode + step_weight * A_step

    One row per step. A_episode compares the rewards of the episodes of a group, each episode counted once; A_step compares
    the step returns of all steps of the group that started from the same anchor state. A state met once gives 0.

    Args:
        episode_rewards: ``[N]``, the reward of the row's episode, the same in all of its rows.
        step_returns: ``[N]``, the discounted return of the step.
        groups, episodes, states: ``[N]`` labels: the task, the episode (unique within its task), the anchor state.
        step_weight, scale, eps: see above and ``group_advantages``.
        mask: ``[N, T]``, non-zero is valid; asks for one advantage per token.

    Source: Feng et al., Group-in-Group Policy Optimization for LLM Agent Training (2025).

    >>> gigpo_advantages(
    ...     torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.9, 1.0, 0.0]), [0, 0, 0], [0, 0, 1], ["s", "t", "s"], scale="none"
    ... )
    tensor([ 0.9500,  0.5000, -0.9500])
    """
    device = episode_rewards.device
    tasks = dense_ids(groups, device)
    is_first, first = once_per_episode(tasks, episodes, device)
    episode = group_advantages(episode_rewards, tasks, scale=scale, eps=eps, valid=is_first)[first]
    anchors = _pairs(tasks, dense_ids(states, device))
    step = group_advantages(step_returns, anchors, scale=scale, eps=eps)
    return to_tokens(episode + step_weight * step, mask)


def _pairs(a: Tensor, b: Tensor) -> Tensor:
    """Dense ids of the pairs (a_i, b_i) of dense ids."""
    if not a.numel():
        return a
    return dense_ids(a * (int(b.max()) + 1) + b, a.device)
