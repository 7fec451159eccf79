"""Credit by turn or by step of a response, for agents and process rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl import _checks
from fastrl.advantages.group import Groups, dense_ids
from fastrl.ops.discounted_returns import discounted_returns
from fastrl.ops.gae import GAE, gae
from fastrl.ops.group_advantages import group_advantages


def _turns(turn_ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Turn number of each valid token from 1 on, 0 at masked ones, and where a turn's last valid token is; ``[B, T]``.

    Neighbouring valid tokens with one id are a turn, whatever lies between them.
    """
    length = valid.shape[1]
    position = torch.arange(length, device=valid.device).expand(valid.shape)
    latest = torch.where(valid, position, -1).cummax(1).values
    before = torch.cat([latest.new_full((valid.shape[0], 1), -1), latest[:, :-1]], 1)
    same = (before >= 0) & (turn_ids.gather(1, before.clamp(min=0)) == turn_ids)
    starts = valid & ~same
    number = torch.where(valid, starts.cumsum(1), 0)
    # The last token of a turn is the valid one behind which a turn starts, or nothing follows.
    last_of = torch.zeros(valid.shape[0], length + 1, dtype=position.dtype, device=valid.device)
    last_of = last_of.scatter_reduce(1, number, torch.where(valid, position, 0), "amax")
    return number, valid & (last_of.gather(1, number) == position)


def _per_turn(x: Tensor, number: Tensor) -> Tensor:
    """The sum of ``x`` over the turn of each token."""
    total = x.new_zeros(x.shape[0], x.shape[1] + 1).scatter_add(1, number, x)
    return total.gather(1, number)


def turn_gae(
    rewards: Tensor,
    values: Tensor,
    turn_ids: Tensor,
    mask: Tensor | None = None,
    *,
    gamma: float,
    lam: float | Tensor,
    bootstrap: Tensor | None = None,
) -> GAE:
    r"""GAE whose steps are turns: a discount per turn, not per token, and one advantage for all tokens of a turn.

    With V the value at the first token of a turn and r the sum of its rewards, over the turns k of a row::

        A_k = r_k + gamma V_{k+1} - V_k + gamma lam A_{k+1}        R_k = A_k + V_k

    Args:
        rewards, values: ``[B, T]``.
        turn_ids: ``[B, T]`` integers; neighbouring valid tokens with the same id are one turn.
        mask: ``[B, T]``, non-zero is valid; masked tokens are in no turn. None: every token is valid.
        gamma, lam, bootstrap: as in :func:`fastrl.gae`.

    Returns:
        ``GAE(advantages, returns)``: A_k and R_k at each token of turn k, 0 where masked. A critic that values states
        before a turn learns R_k at the turn's first token.

    Source: turn-unit GAE of AReaL (``gae_timestep_unit="turn"``).

    >>> turns = torch.tensor([[0, 0, 1, 1]])
    >>> turn_gae(torch.tensor([[0.0, 0.0, 0.0, 1.0]]), torch.zeros(1, 4), turns, gamma=0.5, lam=1.0).advantages
    tensor([[0.5000, 0.5000, 1.0000, 1.0000]])
    """
    name = "turn_gae"
    _checks.scan_layout(name, rewards, mask, bootstrap, None, None, "carry", "zero", -1)
    _checks.same_shape(name, "turn_ids", turn_ids, rewards.shape, "rewards")
    valid = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask != 0
    number, is_last = _turns(turn_ids, valid)
    starts = valid & (
        torch.cat([number.new_zeros(len(number), 1), number.cummax(1).values], 1)[:, :-1] < number
    )
    reward = _per_turn(torch.where(valid, rewards.detach(), 0.0), number)
    value = _per_turn(torch.where(starts, values.detach(), 0.0), number)
    # The last token of a turn stands for it; what fill="carry" leaves before it is then the advantage of the turn.
    advantages = gae(
        *(reward, value, is_last), gamma=gamma, lam=lam, bootstrap=bootstrap, fill="carry"
    ).advantages
    return GAE(torch.where(valid, advantages, 0.0), torch.where(valid, advantages + value, 0.0))


def turn_group_advantages(
    rewards: Tensor,
    groups: Groups,
    turn_ids: Tensor,
    mask: Tensor | None = None,
    *,
    compare: str = "group",
    scale: str = "std",
    eps: float = 1e-6,
) -> Tensor:
    r"""GRPO whose samples are turns: the summed reward of a turn, normalised, at each of its tokens.

    Args:
        rewards: ``[N, T]``; rewards of a turn are summed.
        groups: ``[N]`` labels of the task.
        turn_ids: ``[N, T]`` integers; neighbouring valid tokens with the same id are one turn.
        mask: ``[N, T]``, non-zero is valid.
        compare: ``"group"``: a turn with all turns of its group; ``"turn"``: with the turns of the same number.
        scale, eps: as in :func:`fastrl.group_advantages`.

    Returns:
        ``[N, T]``, 0 where masked. Deterministic; a constant.

    Source: turn-level GRPO as in RLinf ``grpo_dynamic``.

    >>> rewards = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    >>> turns = torch.tensor([[0, 0, 1], [0, 0, 1]])
    >>> turn_group_advantages(rewards, [5, 5], turns, compare="turn", scale="none")
    tensor([[ 0.5000,  0.5000, -0.5000],
            [-0.5000, -0.5000,  0.5000]])
    """
    name = "turn_group_advantages"
    _checks.option(name, "compare", compare, ("group", "turn"))
    _checks.floating(name, "rewards", rewards)
    _checks.mask(name, mask, rewards, "rewards")
    valid = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask != 0
    number, is_last = _turns(turn_ids, valid)
    reward = _per_turn(torch.where(valid, rewards.detach(), 0.0), number)
    compared = dense_ids(groups, rewards.device).unsqueeze(1).expand(rewards.shape)
    if compare == "turn":
        compared = compared * (rewards.shape[1] + 1) + number
    one_per_turn = group_advantages(
        torch.where(is_last, reward, torch.nan).reshape(-1),
        compared.reshape(-1),
        scale=scale,
        eps=eps,
    )
    return _per_turn(one_per_turn.view(rewards.shape), number).masked_fill(~valid, 0.0)


def process_reward_advantages(
    step_rewards: Tensor,
    groups: Groups,
    mask: Tensor | None = None,
    *,
    eps: float = 1e-6,
    scale: str = "std",
) -> Tensor:
    r"""Rewards of reasoning steps, normalised over all steps of the group, summed from later steps.

    With r the rewards of all steps of all responses of a group::

        r~ = (r - mean(r)) / (std(r) + eps)        A_t = sum of r~ over the steps that end at token t or later

    Args:
        step_rewards: ``[N, T]``, the reward of a step at its last token, NaN at all other tokens.
        groups: ``[N]`` labels, as in :func:`fastrl.group_advantages`.
        mask: ``[N, T]``, non-zero is valid; a reward at a masked token is not counted.
        scale, eps: as in ``group_advantages``.

    Returns:
        ``[N, T]``, 0 where masked. Deterministic; a constant.

    Source: Shao et al., DeepSeekMath (2024), 4.1.3.

    >>> nan = float("nan")
    >>> steps = torch.tensor([[nan, 1.0, nan, 0.0], [nan, nan, nan, 0.5]])
    >>> process_reward_advantages(steps, [0, 0], scale="none")
    tensor([[ 0.0000,  0.0000, -0.5000, -0.5000],
            [ 0.0000,  0.0000,  0.0000,  0.0000]])
    """
    name = "process_reward_advantages"
    _checks.floating(name, "step_rewards", step_rewards)
    _checks.mask(name, mask, step_rewards, "step_rewards")
    if mask is not None:
        step_rewards = torch.where(mask != 0, step_rewards, torch.nan)
    ids = dense_ids(groups, step_rewards.device).repeat_interleave(step_rewards.shape[1])
    normalised = group_advantages(step_rewards.detach().reshape(-1), ids, scale=scale, eps=eps)
    return discounted_returns(normalised.view(step_rewards.shape), mask, gamma=1.0)
