"""Inputs that the tests of the two losses share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastrl
from tests.helpers import leaf

# Ratios at which a branch of the loss changes, in the tests' options; comparisons in another precision keep away.
EDGES = (0.8, 0.9, 1.1, 1.2, 1.3, 1.4, 1.5, 2.0, 3.0, 0.67032, 1.49182)
FLIP_BAND = 2e-3


class Batch(NamedTuple):
    """What policy_loss reads; ``ref_logp`` is passed on only where the options name a KL."""

    logp: Tensor
    old_logp: Tensor
    advantages: Tensor
    ref_logp: Tensor
    is_weights: Tensor | None = None
    entropy: Tensor | None = None

    def map(self, change: Any) -> Batch:
        return Batch(*(None if x is None else change(x) for x in self))

    def double(self) -> Batch:
        return self.map(Tensor.double)


def batch(
    shape: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    is_weights: bool = False,
    entropy: bool = False,
) -> Batch:
    """Log-probabilities with ratios on both sides of every edge, none within the flip band of one."""
    logp = (-3 * torch.rand(shape)).to(dtype)
    old_logp = (logp.double() + 0.5 * torch.randn(shape)).to(dtype)
    for _ in range(3):
        ratio = (logp.double() - old_logp.double()).exp()
        near = torch.stack([(ratio - edge).abs() < FLIP_BAND for edge in EDGES]).any(0)
        old_logp = torch.where(near, old_logp - 0.03, old_logp)
    return Batch(
        logp,
        old_logp,
        torch.randn(shape).to(dtype),
        (logp.double() + 0.5 * torch.randn(shape)).to(dtype),
        torch.rand(shape).to(dtype) if is_weights else None,
        torch.rand(shape).to(dtype) if entropy else None,
    )


def run_policy(impl: str, data: Batch, mask: Tensor | None, **options: Any) -> list[Tensor]:
    """Loss, metrics, gradient of logp and, with an entropy, its gradient."""
    logp = leaf(data.logp)
    entropy = None if data.entropy is None else leaf(data.entropy)
    out = fastrl.policy_loss(
        *(logp, data.old_logp, data.advantages, mask),
        ref_logp=data.ref_logp if options.get("kl") else None,
        is_weights=options.pop("is_weights", data.is_weights),
        entropy=entropy,
        impl=impl,
        **options,
    )
    out.loss.backward()
    grads = [x.grad for x in (logp, entropy) if x is not None]
    assert all(grad is not None for grad in grads)
    return [out.loss.detach(), out.metrics, *grads]  # type: ignore[list-item]


def metric(out: fastrl.PolicyLoss | fastrl.ValueLoss, name: str) -> float:
    return float(out.named()[name])
