"""Importance weights of what another sampler sampled: what they multiply, and what they need."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

from fastrl.train.batch import make_batch, plan_updates
from fastrl.train.collect import collect, make_task
from fastrl.train.config import Config
from fastrl.train.grpo import GRPO
from fastrl.train.metrics import StepMetrics, Timer
from fastrl.train.models import load_policy
from fastrl.train.options import CorrectionConfig
from fastrl.train.ppo import PPO
from fastrl.train.rollout import TransformersGenerator
from tests.train.test_rollout import spread

CPU = torch.device("cpu")


def gradient(config: Config, shift: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the policy of a step whose sampler gave every token `shift` nats less, and the weights."""
    policy = spread(load_policy(config.model, seed=0, device=CPU))
    generator = TransformersGenerator(policy, config.model, batch_size=64)
    task = make_task(config)
    batch = make_batch(collect(config, task, policy, generator, Timer(), step=0), ["task"])
    plan = plan_updates(batch, config, step=0, epoch=0, device=CPU)
    algorithm = {"grpo": GRPO, "ppo": PPO}[config.algorithm](config, policy, Timer())
    uncorrected = dataclasses.replace(config, correction=CorrectionConfig())
    before = type(algorithm)(uncorrected, policy, Timer()).targets(batch, plan)
    logp = None if shift is None else before.old_logp - shift
    batch = dataclasses.replace(batch, sampled_logp=logp)
    targets = algorithm.targets(batch, plan)
    for micro in plan[0].micro_batches:
        algorithm.loss(micro, plan[0], targets, StepMetrics()).backward()
    grads = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
    weights = (
        torch.ones_like(targets.old_logp) if targets.is_weights is None else targets.is_weights
    )
    return torch.cat(grads), weights[batch.mask]


@pytest.mark.parametrize("head", ["fused", "eager"])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_weights_multiply_the_loss(small: Callable[..., Config], algorithm: str, head: str) -> None:
    def run(*options: str) -> tuple[torch.Tensor, torch.Tensor]:
        ppo = ("ppo.value_coef=0.0", "ppo.warmup_steps=0", "loss.entropy_coef=0.0")
        one = ("optim.mini_batches=1", f"model.head={head}", "rollout.max_new_tokens=3")
        return gradient(small(algorithm, *ppo, *one, *options), math.log(2))

    plain, _ = run()
    assert plain.abs().max() > 0
    # The trainer gives every token twice the sampler's probability.
    for options, weight in (
        (("correction.kind=tis", "correction.high=5.0"), 2.0),
        (("correction.kind=tis", "correction.high=1.5"), 1.5),
        (("correction.kind=mis", "correction.high=1.5"), 0.0),
        (("correction.kind=mis", "correction.high=3.0"), 2.0),
        (("correction.kind=icepop", "correction.low=0.5", "correction.high=5.0"), 2.0),
        (("correction.kind=icepop", "correction.low=2.5", "correction.high=5.0"), 0.0),
        (("correction.kind=tis", "correction.level=geometric", "correction.high=5.0"), 2.0),
    ):
        found, weights = run(*options)
        torch.testing.assert_close(weights, torch.full_like(weights, weight))
        torch.testing.assert_close(found, weight * plain, rtol=1e-4, atol=1e-6)
    # Completions of one to three tokens: 2, 4 or 8, cut at 5.
    _, weights = run("correction.kind=tis", "correction.level=sequence", "correction.high=5.0")
    assert {round(w, 3) for w in weights.tolist()} <= {2.0, 4.0, 5.0}
    assert weights.max() == 5.0


def test_a_correction_needs_the_samplers_logprobs(small: Callable[..., Config]) -> None:
    with pytest.raises(ValueError, match=r"must be known for every completion.*kind = .none."):
        gradient(small("grpo", "correction.kind=tis", "optim.mini_batches=1"), None)
