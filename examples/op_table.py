"""Each fastrl op beside the same computation in plain PyTorch, timed on this machine in a few seconds.

The plain versions are what a trainer would write with torch alone: no loops but the one over time that
GAE needs, float32, autograd for the gradients. Both are run in turn and their medians compared, so a
machine that gets slower half-way slows both. `benchmarks/` measures the same with more care, at larger
sizes and against the functions of real trainers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import fastrl

Results = tuple[Tensor, ...]


class Case(NamedTuple):
    """One op at one size: two functions that return the same tensors."""

    name: str
    size: str
    ours: Callable[[], Results]
    plain: Callable[[], Results]


class Measurement(NamedTuple):
    """Medians in milliseconds, and the largest difference of results, relative where above 1."""

    name: str
    size: str
    ours_ms: float
    plain_ms: float
    difference: float

    @property
    def ratio(self) -> float:
        return self.plain_ms / self.ours_ms


# --- plain PyTorch -----------------------------------------------------------------------------


def plain_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Results:
    """Generalised advantage estimation, right to left; `mask` is 1 up to each row's last token."""
    following = torch.zeros_like(values[:, 0])
    advantage = torch.zeros_like(following)
    columns = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * following - values[:, t]
        advantage = torch.where(mask[:, t], delta + gamma * lam * advantage, advantage)
        following = torch.where(mask[:, t], values[:, t], following)
        columns.append(advantage)
    advantages = torch.stack(columns[::-1], 1) * mask
    return advantages, (advantages + values) * mask


def plain_group_advantages(rewards: Tensor, groups: Tensor) -> Results:
    """(reward - mean) / (std + 1e-6) within groups of any size, through scatter-adds."""
    num_groups = int(groups.max()) + 1
    count = torch.zeros(num_groups).index_add(0, groups, torch.ones_like(rewards))
    mean = torch.zeros(num_groups).index_add(0, groups, rewards) / count
    centred = rewards - mean[groups]
    squares = torch.zeros(num_groups).index_add(0, groups, centred * centred)
    std = (squares / (count - 1).clamp_min(1)).sqrt()
    return (centred / (std[groups] + 1e-6),)


def plain_whiten(x: Tensor, mask: Tensor) -> Results:
    """Mean 0 and variance 1 over the valid elements."""
    count = mask.sum()
    mean = (x * mask).sum() / count
    variance = ((x - mean).square() * mask).sum() / (count - 1)
    return ((x - mean) * torch.rsqrt(variance + 1e-8) * mask,)


def plain_token_logprobs(logits: Tensor, tokens: Tensor) -> Results:
    """Log-probability of each token, the entropy, and the gradient of the sum of both."""
    logits = logits.detach().requires_grad_()
    log_p = torch.log_softmax(logits, -1)
    logp = log_p.gather(-1, tokens[:, None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    (logp.sum() + entropy.sum()).backward()
    return logp.detach(), entropy.detach(), logits.grad


def plain_policy_loss(
    logp: Tensor, old_logp: Tensor, ref_logp: Tensor, advantages: Tensor, mask: Tensor
) -> Results:
    """PPO's clipped loss with a k3 penalty, its gradient, and the usual metrics."""
    logp = logp.detach().requires_grad_()
    count = mask.sum()
    log_ratio = (logp - old_logp).clamp(-20, 20)
    ratio = log_ratio.exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)
    to_ref = (ref_logp - logp).clamp(-20, 20)
    kl = (to_ref.exp() - to_ref - 1).clamp(-10, 10)
    loss = ((torch.maximum(unclipped, clipped) + 0.01 * kl) * mask).sum() / count
    loss.backward()
    with torch.no_grad():
        clip_count = ((clipped > unclipped) & mask).sum()
        approx_kl = (-log_ratio * mask).sum()
        ref_kl = (kl * mask).sum()
    return loss.detach(), logp.grad, clip_count, approx_kl, ref_kl


def plain_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor) -> Results:
    """Half the larger of the squared errors with and without clipping, and its gradient."""
    values = values.detach().requires_grad_()
    near = torch.clamp(values, old_values - 0.5, old_values + 0.5)
    errors = torch.maximum((values - returns).square(), (near - returns).square())
    loss = 0.5 * (errors * mask).sum() / mask.sum()
    loss.backward()
    return loss.detach(), values.grad


# --- cases -------------------------------------------------------------------------------------


def cases(scale: float = 1.0) -> list[Case]:
    """The table's ops on random data from a fixed seed; `scale` shortens it for a quick look."""
    source = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source)

    rows, columns = 256, max(int(1024 * scale), 2)
    shape = f"{rows} x {columns}"
    lengths = torch.randint(columns // 2, columns + 1, (rows, 1), generator=source)
    mask = torch.arange(columns) < lengths
    rewards, values, returns = randn(rows, columns), randn(rows, columns), randn(rows, columns)
    logp, advantages = randn(rows, columns) - 2, randn(rows, columns)
    old_logp, ref_logp = logp + 0.1 * randn(rows, columns), logp + 0.1 * randn(rows, columns)
    old_values = values + 0.3 * randn(rows, columns)
    scores = randn(rows * 32)
    groups = torch.arange(rows * 4).repeat(8)
    words = max(int(49152 * scale), 2)
    logits, tokens = randn(128, words), torch.randint(words, (128,), generator=source)

    def token_logprobs() -> Results:
        leaf = logits.detach().requires_grad_()
        out = fastrl.token_logprobs(leaf, tokens, entropy=True)
        assert out.entropy is not None
        (out.logp.sum() + out.entropy.sum()).backward()
        return out.logp.detach(), out.entropy.detach(), leaf.grad

    def policy_loss() -> Results:
        leaf = logp.detach().requires_grad_()
        options = {"ref_logp": ref_logp, "kl": "k3", "kl_coef": 0.01}
        out = fastrl.policy_loss(leaf, old_logp, advantages, mask, **options)
        out.loss.backward()
        named = out.named()
        metrics = (named[name] for name in ("clipped", "approx_kl", "ref_kl"))
        return out.loss.detach(), leaf.grad, *metrics

    def value_loss() -> Results:
        leaf = values.detach().requires_grad_()
        out = fastrl.value_loss(leaf, old_values, returns, mask)
        out.loss.backward()
        return out.loss.detach(), leaf.grad

    return [
        Case(
            "gae",
            shape,
            lambda: tuple(fastrl.gae(rewards, values, mask, gamma=0.99, lam=0.95)),
            lambda: plain_gae(rewards, values, mask, 0.99, 0.95),
        ),
        Case(
            "group_advantages",
            f"{len(scores)} in groups of 8",
            lambda: (fastrl.group_advantages(scores, groups),),
            lambda: plain_group_advantages(scores, groups),
        ),
        Case(
            "whiten",
            shape,
            lambda: (fastrl.whiten(rewards, mask),),
            lambda: plain_whiten(rewards, mask),
        ),
        Case(
            "token_logprobs + backward",
            f"128 x {words}",
            token_logprobs,
            lambda: plain_token_logprobs(logits, tokens),
        ),
        Case(
            "policy_loss + backward",
            shape,
            policy_loss,
            lambda: plain_policy_loss(logp, old_logp, ref_logp, advantages, mask),
        ),
        Case(
            "value_loss + backward",
            shape,
            value_loss,
            lambda: plain_value_loss(values, old_values, returns, mask),
        ),
    ]


# --- timing ------------------------------------------------------------------------------------


def measure(case: Case, *, seconds: float = 0.8, rounds: int = 5) -> Measurement:
    """`case` timed for about `seconds`, but for at least `rounds` rounds; one round warms up."""
    difference = _difference(case.ours(), case.plain())
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    end = time.perf_counter() + seconds
    while len(times["ours"]) < rounds or time.perf_counter() < end:
        for name, function in (("ours", case.ours), ("plain", case.plain)):
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    ours, plain = (1e3 * statistics.median(times[name]) for name in ("ours", "plain"))
    return Measurement(case.name, case.size, ours, plain, difference)


def _difference(ours: Results, plain: Results) -> float:
    """Largest difference over all results, relative to the value where that is above 1."""
    return max(
        float(((a - b).abs() / b.abs().clamp_min(1)).max())
        for a, b in ((a.double(), b.double()) for a, b in zip(ours, plain, strict=True))
    )


def table(measurements: list[Measurement]) -> str:
    """The measurements as aligned text, one op a line."""
    head = f"{'op':<27}{'size':<24}{'fastrl ms':>10}{'torch ms':>10}{'ratio':>8}{'difference':>12}"
    lines = [
        f"{m.name:<27}{m.size:<24}{m.ours_ms:>10.3f}{m.plain_ms:>10.3f}{m.ratio:>7.1f}x"
        f"{m.difference:>12.0e}"
        for m in measurements
    ]
    return "\n".join([head, *lines])


if __name__ == "__main__":
    print(table([measure(case) for case in cases()]))
