"""torchrl 0.14.1: the value functionals of ``torchrl.objectives.value.functional`` by name and argument.

Tensors are ``[*B, T, F]``, or have their time elsewhere with ``time_dim``; gamma and lambda are numbers or tensors that
broadcast. ``terminated`` bootstraps nothing, ``done`` alone ends a trajectory and bootstraps ``next_state_value``. What
runs along time is one affine scan; the vectorised names are the same functions. ``rolling_gamma=False`` is not here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.errors import ArgumentError
from fastrl.ops.affine_scan import affine_scan
from fastrl.presets._tokens import NotCovered

Number = float | Tensor


def generalized_advantage_estimate(
    gamma: Number,
    lmbda: Number,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """``(advantage, value_target)``."""
    goes_on, bootstraps = _flags(reward, done, terminated)
    _same_shape(state_value, next_state_value, reward)
    delta = reward + gamma * bootstraps * next_state_value - state_value
    advantage = _scan(gamma * lmbda * goes_on, delta, None, time_dim)
    return advantage, advantage + state_value


def td0_return_estimate(
    gamma: Number,
    next_state_value: Tensor,
    reward: Tensor,
    terminated: Tensor | None = None,
    *,
    done: Tensor | None = None,
) -> Tensor:
    """The reward and the discounted next value."""
    ends = done if terminated is None else terminated
    if ends is None:
        raise ArgumentError("td0_return_estimate: terminated must be given, got None; pass it")
    _same_shape(next_state_value, reward, ends)
    return reward + gamma * (~ends).to(reward.dtype) * next_state_value


def td0_advantage_estimate(
    gamma: Number,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
) -> Tensor:
    """The error of the value by its next value."""
    return td0_return_estimate(gamma, next_state_value, reward, terminated, done=done) - state_value


def td1_return_estimate(
    gamma: Number,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    *,
    time_dim: int = -2,
) -> Tensor:
    """Discounted returns of the whole trajectory, which ends where it is terminated, done or not."""
    ends = done if terminated is None else done | terminated
    return td_lambda_return_estimate(
        *(gamma, 1.0, next_state_value, reward, ends, terminated, rolling_gamma), time_dim=time_dim
    )


def td1_advantage_estimate(
    gamma: Number,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    time_dim: int = -2,
) -> Tensor:
    """The same less the value."""
    _same_shape(state_value, reward)
    returns = td1_return_estimate(
        *(gamma, next_state_value, reward, done, terminated, rolling_gamma), time_dim=time_dim
    )
    return returns - state_value


def td_lambda_return_estimate(
    gamma: Number,
    lmbda: Number,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    *,
    time_dim: int = -2,
) -> Tensor:
    """Returns mixed with the next values by lambda; what follows the last step is its next value."""
    if rolling_gamma is False:
        raise NotCovered(
            "td_lambda_return_estimate: rolling_gamma must be True or None, got False; use torchrl's function"
        )
    goes_on, bootstraps = _flags(reward, done, terminated)
    _same_shape(next_state_value, reward)
    following = bootstraps * next_state_value
    mixed = reward + gamma * (1 - lmbda * goes_on) * following
    last = following.select(time_dim, -1)
    return _scan(gamma * lmbda * goes_on, mixed, last, time_dim)


def td_lambda_advantage_estimate(
    gamma: Number,
    lmbda: Number,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    time_dim: int = -2,
) -> Tensor:
    """The same less the value."""
    _same_shape(state_value, reward)
    returns = td_lambda_return_estimate(
        *(gamma, lmbda, next_state_value, reward, done, terminated, rolling_gamma),
        time_dim=time_dim,
    )
    return returns - state_value


def vtrace_advantage_estimate(
    gamma: Number,
    log_pi: Tensor,
    log_mu: Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rho_thresh: Number = 1.0,
    c_thresh: Number = 1.0,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """``(advantage, value_target)`` of data from the policy mu."""
    goes_on, bootstraps = _flags(reward, done, terminated)
    _same_shape(state_value, next_state_value, reward)
    ratio = (log_pi - log_mu).exp()
    rho, c = ratio.clamp(max=rho_thresh), ratio.clamp(max=c_thresh)
    delta = rho * (reward + gamma * bootstraps * next_state_value - state_value)
    target = state_value + _scan(gamma * c * goes_on, delta, None, time_dim)
    last = next_state_value.narrow(time_dim, next_state_value.shape[time_dim] - 1, 1)
    following = torch.cat([target.narrow(time_dim, 1, target.shape[time_dim] - 1), last], time_dim)
    following = torch.where(done, next_state_value, following)
    return rho * (reward + gamma * bootstraps * following - state_value), target


def reward2go(reward: Tensor, done: Tensor, gamma: Number, *, time_dim: int = -2) -> Tensor:
    """Discounted sums of the rewards up to the end of the trajectory."""
    goes_on, _ = _flags(reward, done, None)
    return _scan(gamma * goes_on, reward, None, time_dim)


vec_generalized_advantage_estimate = generalized_advantage_estimate
vec_td1_return_estimate = td1_return_estimate
vec_td1_advantage_estimate = td1_advantage_estimate
vec_td_lambda_return_estimate = td_lambda_return_estimate
vec_td_lambda_advantage_estimate = td_lambda_advantage_estimate


def _flags(reward: Tensor, done: Tensor, terminated: Tensor | None) -> tuple[Tensor, Tensor]:
    """1 where the trajectory goes on, 1 where the next value counts."""
    terminated = done if terminated is None else terminated
    _same_shape(reward, done, terminated)
    return (~done).to(reward.dtype), (~terminated).to(reward.dtype)


def _same_shape(first: Tensor, *others: Tensor) -> None:
    for other in others:
        if other.shape != first.shape:
            raise ArgumentError(
                "fastrl.presets.torchrl: values, rewards and flags must have one shape, got "
                f"{list(first.shape)} and {list(other.shape)}; expand them"
            )


def _scan(a: Tensor, b: Tensor, after: Tensor | None, time_dim: int) -> Tensor:
    """``x_t = a_t x_{t+1} + b_t`` along ``time_dim``, ``after`` behind the last step."""
    moved = b.movedim(time_dim, -1)
    rows = moved.reshape(-1, moved.shape[-1])
    factors = a.expand(b.shape).movedim(time_dim, -1).reshape(rows.shape).to(rows.dtype)
    initial = None if after is None else after.reshape(-1)
    return (
        affine_scan(factors, rows, initial=initial)
        .to(b.dtype)
        .view(moved.shape)
        .movedim(-1, time_dim)
    )
