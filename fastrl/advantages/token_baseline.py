"""A baseline per token position, weighted by how much each trajectory moves the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl import _checks
from fastrl.advantages.group import Groups, dense_ids, two_largest
from fastrl.ops.discounted_returns import discounted_returns
from fastrl.ops.gae import GAE


def optimal_token_baseline(
    rewards: Tensor,
    groups: Groups,
    logp: Tensor,
    sum_pi_squared: Tensor,
    mask: Tensor,
    *,
    is_weights: Tensor | None = None,
    compact: bool = False,
    zero_tail: bool = True,
    eps: float = 1e-8,
) -> GAE:
    r"""Reward-to-go less the baseline of its position that minimises the variance of the gradient.

    With G the reward-to-go and W the accumulated squared norm of the score function, at position t of a group::

        w_t = 1 - 2 pi_t + sum_v pi_v^2  (times is_weights^2)      W_t = w_1 + ... + w_t over valid tokens
        B_t = sum_i G_it W_it / (sum_i W_it + eps)                  A_it = G_it - B_t

    A group of one has B = 0.

    Args:
        rewards: ``[N, T]``.
        groups: ``[N]`` labels, as in :func:`fastrl.group_advantages`.
        logp: ``[N, T]``, log pi of the chosen tokens.
        sum_pi_squared: ``[N, T]``, sum over the vocabulary of the squared probabilities.
        mask: ``[N, T]``, non-zero is valid.
        is_weights: ``[N, T]``, truncated importance weights of the rollout.
        compact: count positions over valid tokens only, so that tool output does not move a trajectory against the others;
            rows without a valid token then leave their group.
        zero_tail: B = 0 where the longest trajectory of a group is alone.
        eps: see above.

    Returns:
        ``GAE(advantages, returns)``, float32 (float64 for float64 rewards), 0 where masked. Sums over a group run in float64.
        Deterministic; a constant.

    Source: the optimal token baseline of verl (``optimal_token_baseline``, compact: ``tir_optimal_token_baseline``).

    >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    >>> half = torch.full((2, 2), 0.5)
    >>> optimal_token_baseline(rewards, [0, 0], half.log(), half, torch.ones(2, 2)).advantages
    tensor([[ 0.5000,  0.5000],
            [-0.5000, -0.5000]])
    """
    name = "optimal_token_baseline"
    _checks.mask(name, mask, rewards, "rewards")
    valid = mask != 0
    num_rows, length = rewards.shape
    returns = discounted_returns(rewards.detach(), mask, gamma=1.0)
    energy = 1 - 2 * logp.detach().exp() + sum_pi_squared
    if is_weights is not None:
        energy = energy * is_weights.square()
    weight = torch.where(valid, energy, 0.0).double().cumsum(1)

    # Column of each token in the table of its group; the last column collects what counts nowhere.
    column = valid.cumsum(1) - 1 if compact else torch.arange(length, device=rewards.device)
    column = torch.where(valid, column, length)
    ids = dense_ids(groups, rewards.device)
    lengths = valid.sum(1)
    counted = lengths > 0 if compact else torch.ones_like(lengths, dtype=torch.bool)
    num_groups = int(ids.max()) + 1 if num_rows else 0
    cells = ids.unsqueeze(1) * (length + 1) + column

    def table(x: Tensor) -> Tensor:
        empty = torch.zeros(num_groups * (length + 1), dtype=torch.float64, device=x.device)
        return empty.index_add(0, cells.reshape(-1), x.reshape(-1))

    numerator = table(torch.where(valid, returns.double() * weight, 0.0))
    baseline = numerator / (table(torch.where(valid, weight, 0.0)) + eps)
    size = torch.zeros(num_groups, dtype=torch.int64, device=ids.device)
    size = size.index_add(0, ids, counted.long())
    has_baseline = (size > 1)[ids].unsqueeze(1)
    if zero_tail and num_rows:
        counts = torch.where(counted, lengths, -1).double()
        longest, second = two_largest(counts, ids)
        start = torch.full((num_rows,), length, dtype=torch.float64, device=ids.device)
        # Two longest trajectories of one length share their tail, even where holes move it behind that length.
        second = torch.where(second < counts[longest], second, length)
        start = start.index_copy(0, longest, second)
        has_baseline = has_baseline & (column < start.unsqueeze(1))
    shared = torch.where(has_baseline, baseline[cells], 0.0).to(returns.dtype)
    return GAE(torch.where(valid, returns - shared, 0.0), returns)
