"""Advantages by group: what is compared with what, for episodes, single turns, and turns by number.

Rows of one episode (there are several when a history was rewritten on the way) count once in the
statistics of their group, and all get the episode's advantage.

    outcome  A_i = (R_i - m) / d over the rewards R of the group, the same for all tokens of an episode
    process  every reward r of a turn of the group is normalised over all of them, (r - m) / d; a token
             gets the sum of those of its own turn and later ones (DeepSeekMath, process supervision)
    turn     G_k, the sum of the rewards of turn k and later ones, is compared with G_k of the group's
             other episodes that had a turn k
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

import fastrl
from fastrl.train.batch import Batch
from fastrl.train.config import GRPOConfig

__all__ = ["group_advantages"]


def group_advantages(batch: Batch, options: GRPOConfig) -> Tensor:
    """Advantages [B, C] of the trained tokens of `batch`, float64, 0 elsewhere."""
    if options.credit == "outcome":
        return _outcome(batch, options)
    return _turns(batch, options)


def _compare(
    scores: Tensor,
    groups: Tensor,
    options: GRPOConfig,
    *,
    mask: Tensor | None = None,
    weights: Sequence[float] | None = None,
) -> Tensor:
    return fastrl.group_advantages(
        scores,
        groups,
        baseline=options.baseline,
        scale=options.scale,
        ddof=options.ddof,
        eps=options.eps,
        weights=weights,
        mask=mask,
    )


def _outcome(batch: Batch, options: GRPOConfig) -> Tensor:
    scores = batch.rewards if options.normalise_each else batch.totals
    weights = batch.weights if options.normalise_each else None
    first = first_rows(batch.episodes)
    if len(first) == len(scores):
        return _compare(scores, batch.groups, options, mask=batch.mask, weights=weights)
    # Lengths of an episode are those of all of its rows.
    lengths = torch.zeros(len(first), dtype=torch.int64)
    lengths.index_add_(0, batch.episodes, batch.mask.sum(1))
    spread = torch.arange(max(int(lengths.max()), 1)) < lengths[:, None]
    compared = _compare(scores[first], batch.groups[first], options, mask=spread, weights=weights)
    return torch.where(batch.mask, compared[:, :1][batch.episodes], 0.0)


def first_rows(episodes: Tensor) -> Tensor:
    """The first row of each episode, for dense episode numbers [B] in order of first appearance."""
    count = int(episodes.max()) + 1 if len(episodes) else 0
    rows = torch.arange(len(episodes))
    first = torch.full((count,), len(episodes))
    return first.scatter_reduce_(0, episodes, rows, "amin")


def _turns(batch: Batch, options: GRPOConfig) -> Tensor:
    """Process and turn credit. Turns of rows that count for nothing (NaN) join no statistics."""
    if not batch.turn_ends.any():
        return torch.zeros_like(batch.token_rewards)
    # Entry j is the turn of row `row[j]` whose last token stands in column `column[j]`.
    row, column = batch.turn_ends.nonzero(as_tuple=True)
    counted = ~batch.totals.isnan()[row]
    rewards = batch.token_rewards[row, column]
    groups = batch.groups[row]
    if options.credit == "process":
        scores = torch.where(counted & batch.turn_scored[row, column], rewards, math.nan)
        normalised = torch.zeros_like(batch.token_rewards)
        normalised[row, column] = _compare(scores, groups, options)
        result = _from_here_on(normalised, batch.mask)
    else:
        returns = _from_here_on(batch.token_rewards, batch.mask)[row, column]
        number = batch.turn_of[row, column]
        same_turn = groups * (int(number.max()) + 1) + number
        compared = torch.zeros_like(batch.token_rewards)
        compared[row, column] = _compare(
            torch.where(counted, returns, math.nan), same_turn, options
        )
        # Every token of a turn has the advantage of the turn, which stands at its last one.
        result = compared.gather(1, _turn_end(batch))
    return torch.where(batch.mask & ~batch.totals.isnan()[:, None], result, 0.0)


def _from_here_on(rewards: Tensor, mask: Tensor) -> Tensor:
    """Sums of the rewards [B, C] from each token on, without discount; tool tokens are no steps."""
    return fastrl.discounted_returns(rewards, mask, gamma=1.0)


def _turn_end(batch: Batch) -> Tensor:
    """For each token the column of the last token of its turn; any column where there is none."""
    width = batch.mask.shape[1]
    ends = torch.where(batch.turn_ends, torch.arange(width), width - 1)
    return ends.flip(1).cummin(1).values.flip(1)
