"""Estimators along time without a group: REINFORCE++, ReMax, V-trace."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import _checks
from fastrl.ops.affine_scan import affine_scan
from fastrl.ops.discounted_returns import discounted_returns
from fastrl.ops.gae import GAE
from fastrl.ops.whiten import whiten


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> GAE:
    r"""Reward-to-go, whitened over the valid tokens of the batch. Masked tokens are no steps.

    Args:
        rewards: ``[B, T]``, a KL penalty included if there is one.
        mask: ``[B, T]``, non-zero is valid.
        gamma: discount in [0, 1].

    Returns:
        ``GAE(advantages, returns)``, 0 where masked. The returns are not whitened.

    The form with a group baseline is ``whiten(group_advantages(scores, groups, scale="none", mask=mask), mask)``.

    Source: Hu, REINFORCE++ (2025); verl ``reinforce_plus_plus``.

    >>> reinforce_plus_plus(torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[1, 0, 1]]), gamma=0.5).returns
    tensor([[0.5000, 0.0000, 1.0000]])
    """
    returns = discounted_returns(rewards.detach(), mask, gamma=gamma)
    return GAE(whiten(returns, mask), returns)


def remax(rewards: Tensor, baselines: Tensor, mask: Tensor) -> GAE:
    r"""Reward-to-go less the score of a greedy answer: ``A_t = sum of r from t on - b``, 0 where masked.

    Args:
        rewards: ``[B, T]``.
        baselines: ``[B]``, score of the greedy answer to the same prompt.
        mask: ``[B, T]``, non-zero is valid.

    Source: Li et al., ReMax (2023); verl ``remax``.

    >>> remax(torch.tensor([[0.0, 1.0]]), torch.tensor([0.25]), torch.tensor([[1, 1]])).advantages
    tensor([[0.7500, 0.7500]])
    """
    _checks.same_shape("remax", "baselines", baselines, rewards.shape[:1], "one per row")
    returns = discounted_returns(rewards.detach(), mask, gamma=1.0)
    return GAE(torch.where(mask != 0, returns - baselines.unsqueeze(1), 0.0), returns)


class VTrace(NamedTuple):
    """Both have the shape of the rewards."""

    advantages: Tensor
    targets: Tensor


def vtrace(
    rewards: Tensor,
    values: Tensor,
    log_ratio: Tensor,
    mask: Tensor | None = None,
    *,
    gamma: float,
    lam: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    bootstrap: Tensor | None = None,
) -> VTrace:
    r"""Targets of the value function, and advantages, from data of another policy.

    With rho_t = min(exp(log_ratio_t), rho_clip), c_t = lam * min(exp(log_ratio_t), c_clip), V' the value of the next valid
    token, ``bootstrap`` (or 0) past the last::

        v_t = V_t + rho_t (r_t + gamma V'_t - V_t) + gamma c_t (v'_t - V'_t)
        A_t = rho_t (r_t + gamma v'_t - V_t)

    Args:
        rewards, values, log_ratio: ``[B, T]``; log_ratio = log pi - log mu of the chosen tokens.
        mask: ``[B, T]``, non-zero is valid; masked tokens are no steps and give 0. None: every token is valid.
        gamma, lam: in [0, 1].
        rho_clip, c_clip: at least 0.
        bootstrap: ``[B]``, value after the last token of a row that was cut off.

    With log_ratio 0 the targets are the returns of ``fastrl.gae`` for the same lam. A constant: no gradient flows.

    Source: Espeholt et al., IMPALA (2018).

    >>> ones = torch.ones(1, 2)
    >>> vtrace(ones, 0 * ones, torch.tensor([[0.0, -0.6931472]]), gamma=1.0).targets
    tensor([[1.5000, 0.5000]])
    """
    name = "vtrace"
    _checks.scan_layout(name, rewards, mask, bootstrap, None, None, "carry", "zero", -1)
    _checks.like(name, "values", values, rewards, "rewards")
    _checks.like(name, "log_ratio", log_ratio, rewards, "rewards")
    gamma = _checks.number(name, "gamma", gamma, 0.0, 1.0)
    lam = _checks.number(name, "lam", lam, 0.0, 1.0)
    valid = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask != 0
    last = torch.zeros_like(values[:, 0]) if bootstrap is None else bootstrap
    last = last.detach()

    def select(x: Tensor) -> Tensor:
        return torch.where(valid, x.detach(), 0.0)

    def following(x: Tensor) -> Tensor:
        """What stands at the next valid token."""
        held = affine_scan((~valid).to(x.dtype), x, initial=last.to(x.dtype))
        return torch.cat([held[:, 1:], last.to(held.dtype).unsqueeze(1)], 1)

    r, v, ratio = select(rewards), select(values), select(log_ratio).exp()
    rho, c = ratio.clamp(max=rho_clip), lam * ratio.clamp(max=c_clip)
    delta = torch.where(valid, rho * (r + gamma * following(v) - v), 0.0)
    error = affine_scan(torch.where(valid, gamma * c, 1.0), delta)
    targets = torch.where(valid, v + error, 0.0)
    return VTrace(torch.where(valid, rho * (r + gamma * following(targets) - v), 0.0), targets)
