"""The ops as a trainer would write them with torch alone: the "eager" rows, and what torch.compile is given.

They follow fastrl's conventions, so that results can be compared element by element, and are written for speed: no loop
but the one over time that GAE needs outside `gae_by_scan`, nothing computed twice, float32.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

Results = tuple[Tensor, ...]


def gae_loop(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Results:
    """Right to left over time; masked tokens are jumped over."""
    following = torch.zeros_like(values[:, 0])
    advantage = torch.zeros_like(following)
    columns = []
    for t in reversed(range(rewards.shape[1])):
        valid = mask[:, t]
        delta = rewards[:, t] + gamma * following - values[:, t]
        advantage = torch.where(valid, delta + gamma * lam * advantage, advantage)
        following = torch.where(valid, values[:, t], following)
        columns.append(advantage)
    advantages = torch.stack(columns[::-1], 1) * mask
    return advantages, (advantages + values) * mask


def gae_float64(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Results:
    """The same in numpy and float64, quick enough for the longest rows: what the others are checked against."""
    r, v, valid = (x.numpy().T.copy() for x in (rewards.double(), values.double(), mask))
    advantages = np.zeros_like(r)
    advantage, following = np.zeros(r.shape[1]), np.zeros(r.shape[1])
    for t in reversed(range(len(r))):
        step = r[t] + gamma * following - v[t] + gamma * lam * advantage
        advantage = np.where(valid[t], step, advantage)
        following = np.where(valid[t], v[t], following)
        advantages[t] = advantage
    advantages *= valid
    returns = (advantages + v) * valid
    return torch.from_numpy(advantages.T.copy()), torch.from_numpy(returns.T.copy())


def gae_by_scan(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    combine_mode: str = "generic",
) -> Results:
    """Logarithmic depth: one associative scan finds the next valid value, a second one the advantages.

    combine_mode "pointwise" becomes one kernel; only GPUs have it.
    """
    from torch._higher_order_ops.associative_scan import associative_scan

    def compose(right: Results, left: Results) -> Results:
        """x -> a x + b, the map of the tokens on the right applied first."""
        return right[0] * left[0], left[0] * right[1] + left[1]

    def scan(a: Tensor, b: Tensor) -> Tensor:
        result: Tensor = associative_scan(
            compose, (a, b), dim=1, reverse=True, combine_mode=combine_mode
        )[1]
        return result

    valid = mask.to(rewards.dtype)
    nearest = scan(1 - valid, values * valid)
    following = torch.cat([nearest[:, 1:], torch.zeros_like(nearest[:, :1])], 1)
    delta = (rewards + gamma * following - values) * valid
    advantages = scan(1 - valid + gamma * lam * valid, delta) * valid
    return advantages, (advantages + values) * valid


def group_advantages(rewards: Tensor, groups: Tensor) -> Results:
    """(reward - mean) / (std + 1e-6) within groups of any size, through scatter-adds; ids are dense."""
    num_groups = int(groups.max()) + 1
    zeros = rewards.new_zeros(num_groups)
    count = zeros.index_add(0, groups, torch.ones_like(rewards))
    mean = zeros.index_add(0, groups, rewards) / count
    centred = rewards - mean[groups]
    squares = zeros.index_add(0, groups, centred * centred)
    std = (squares / (count - 1).clamp_min(1)).sqrt()
    return (centred / (std[groups] + 1e-6),)


def whiten(x: Tensor, mask: Tensor) -> Results:
    """Mean 0 and variance 1 over the valid elements."""
    count = mask.sum()
    mean = (x * mask).sum() / count
    variance = ((x - mean).square() * mask).sum() / (count - 1)
    return ((x - mean) * torch.rsqrt(variance + 1e-8) * mask,)


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    ref_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    kl_coef: float,
) -> Results:
    """Dual-clipped loss with a k3 penalty, and its metrics as means over the valid tokens."""
    count = mask.sum()
    log_ratio = (logp - old_logp).clamp(-20, 20)
    ratio = log_ratio.exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)
    outer = torch.maximum(plain, clipped)
    policy = torch.where(advantages < 0, torch.minimum(-advantages * 3.0, outer), outer)
    to_ref = (ref_logp - logp).clamp(-20, 20)
    kl = (to_ref.exp() - to_ref - 1).clamp(-10, 10)
    mean_kl = (kl * mask).sum() / count
    loss = (policy * mask).sum() / count + kl_coef * mean_kl
    with torch.no_grad():
        clip_fraction = ((clipped > plain) * mask).sum() / count
        approx_kl = (-log_ratio * mask).sum() / count
    return loss, clip_fraction, approx_kl, mean_kl.detach()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor) -> Results:
    """Half the larger of the squared errors with and without clipping."""
    near = torch.clamp(values, old_values - 0.5, old_values + 0.5)
    plain, clipped = (values - returns).square(), (near - returns).square()
    count = mask.sum()
    loss = 0.5 * (torch.maximum(plain, clipped) * mask).sum() / count
    return loss, ((clipped > plain) * mask).sum() / count


def token_logprobs(logits: Tensor, tokens: Tensor) -> Results:
    """Log-probability of each token and entropy of each row, in float32 as trainers do it."""
    log_p = torch.log_softmax(logits.float(), -1)
    logp = log_p.gather(-1, tokens[:, None]).squeeze(-1)
    return logp, -(log_p.exp() * log_p).sum(-1)
