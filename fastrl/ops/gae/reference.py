"""The definition of generalised advantage estimation in plain torch, one step at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl._library import result_dtype


def gae_reference(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None,
    dones: Tensor | None,
    bootstrap: Tensor | None,
    lam: float | Tensor,
    returns_lam: float | Tensor,
    cu_seqlens: Tensor | None,
    gamma: float,
    holes: str,
    fill: str,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of ``[B, T]`` rows, or of ``[N]`` packed rows with ``cu_seqlens``."""
    if cu_seqlens is not None:
        return _packed(
            *(rewards, values, mask, dones, bootstrap, lam, returns_lam, cu_seqlens, gamma),
            *(holes, fill),
        )
    dtype = result_dtype(rewards.dtype)
    r, v = rewards.to(dtype), values.to(dtype)
    is_valid = torch.ones_like(r, dtype=torch.bool) if mask is None else mask != 0
    is_done = torch.zeros_like(is_valid) if dones is None else dones != 0
    zero = r.new_zeros(r.shape[0])
    next_value = zero if bootstrap is None else bootstrap.to(dtype)
    carry_a, carry_r = zero, zero

    advantages, returns = [zero] * r.shape[1], [zero] * r.shape[1]
    for t in reversed(range(r.shape[1])):
        valid, done = is_valid[:, t], is_done[:, t]
        reward, value = r[:, t], v[:, t]
        if holes != "ignore":  # select before any arithmetic: a NaN in a hole must not be read
            reward = torch.where(valid, reward, zero)
            step_value = torch.where(valid, value, zero)
            done = done & valid
        else:
            step_value = value
        is_step = valid if holes == "carry" else torch.ones_like(valid)
        following = torch.where(done, zero, next_value)
        delta = reward + gamma * following - step_value
        step_a = delta + gamma * lam * torch.where(done, zero, carry_a)
        step_r = delta + gamma * returns_lam * torch.where(done, zero, carry_r)
        carry_a = torch.where(is_step, step_a, carry_a)
        carry_r = torch.where(is_step, step_r, carry_r)
        next_value = torch.where(is_step, step_value, next_value)
        # A hole that keeps the running value shows it on top of its own, unused value.
        shown = value if holes == "carry" and fill == "carry" else step_value
        advantages[t], returns[t] = carry_a, carry_r + shown
        if fill == "zero":
            advantages[t] = torch.where(valid, advantages[t], zero)
            returns[t] = torch.where(valid, returns[t], zero)
        else:  # masked outputs are constants
            advantages[t] = torch.where(valid, advantages[t], advantages[t].detach())
            returns[t] = torch.where(valid, returns[t], returns[t].detach())
    if not advantages:
        return r + v, r + v  # no elements, but part of the graph
    return torch.stack(advantages, 1), torch.stack(returns, 1)


def _packed(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None,
    dones: Tensor | None,
    bootstrap: Tensor | None,
    lam: float | Tensor,
    returns_lam: float | Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    holes: str,
    fill: str,
) -> tuple[Tensor, Tensor]:
    bounds = cu_seqlens.tolist()
    rows = [slice(a, b) for a, b in zip(bounds[:-1], bounds[1:])]

    def cut(x: Tensor | None, row: slice) -> Tensor | None:
        return None if x is None else x[row].unsqueeze(0)

    def pick(x: float | Tensor, index: int) -> float | Tensor:
        return x[index : index + 1] if isinstance(x, Tensor) else x

    parts = [
        gae_reference(
            rewards[row].unsqueeze(0),
            values[row].unsqueeze(0),
            cut(mask, row),
            cut(dones, row),
            None if bootstrap is None else bootstrap[i : i + 1],
            pick(lam, i),
            pick(returns_lam, i),
            None,
            gamma,
            holes,
            fill,
        )
        for i, row in enumerate(rows)
    ]
    empty = rewards.new_zeros(0, dtype=result_dtype(rewards.dtype))
    advantages = torch.cat([empty, *(a.squeeze(0) for a, _ in parts)])
    returns = torch.cat([empty, *(r.squeeze(0) for _, r in parts)])
    return advantages, returns
