"""GRPO: the advantage of a completion is its reward compared with others of the same prompt.

One number per completion, shared by all of its tokens; no critic. The KL to the reference is a term of
the loss. Dr. GRPO is grpo.scale = "none" with loss.agg = "seq_mean_token_sum_norm"; GSPO is loss.ratio
= "sequence"; DAPO is a larger loss.clip_high; RLOO is grpo.baseline = "leave_one_out" with scale "none".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastrl.train.advantages import group_advantages
from fastrl.train.batch import Batch, MicroBatch, MiniBatch, fill
from fastrl.train.config import Config
from fastrl.train.correction import correct
from fastrl.train.forward import policy_loss, policy_outputs
from fastrl.train.metrics import StepMetrics, Timer
from fastrl.train.models import Policy
from fastrl.train.world import ALONE, World

__all__ = ["GRPO"]


class Targets(NamedTuple):
    """Constants of one rollout, [B, C]."""

    old_logp: Tensor
    advantages: Tensor
    ref_logp: Tensor | None
    is_weights: Tensor | None = None


class GRPO:
    """Group-relative policy optimisation."""

    def __init__(self, config: Config, policy: Policy, timer: Timer, world: World = ALONE) -> None:
        self.config = config
        self.policy = policy
        self.timer = timer
        self.world = world
        self.reference = policy.reference() if config.kl.coef else None

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What the optimiser trains, with learning rates."""
        return [{"params": self.policy.trained(), "lr": self.config.optim.lr}]

    def networks(self) -> list[nn.Module]:
        """What is computed, trained or not."""
        return [self.policy, *([self.reference] if self.reference else [])]

    def modules(self) -> dict[str, nn.Module]:
        """What a checkpoint must hold."""
        return {"policy": self.policy.model}

    def state(self) -> dict[str, float]:
        """Numbers that a checkpoint must hold."""
        return {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Take back what `state` returned."""

    def targets(self, batch: Batch, plan: list[MiniBatch]) -> Targets:
        """Log-probabilities of the sampling policy and the reference, and the advantages."""
        policies = [self.policy, *([self.reference] if self.reference else [])]

        def logps(micro: MicroBatch) -> list[Tensor]:
            return [policy_outputs(p, micro, self.config, self.timer).logp for p in policies]

        with torch.no_grad():
            old_logp, *ref_logp = fill(batch, plan, logps, self.world)
        with self.timer("fastrl"):
            advantages = group_advantages(batch, self.config.grpo)
        advantages = advantages.to(old_logp)
        corrected = correct(self.config, batch, old_logp)
        return Targets(
            old_logp,
            advantages,
            ref_logp[0] if ref_logp else None,
            None if corrected is None else corrected.weights,
        )

    def loss(
        self, micro: MicroBatch, mini: MiniBatch, targets: Targets, metrics: StepMetrics
    ) -> Tensor:
        """The share of one micro-batch in the loss of its mini-batch."""
        options, kl = self.config.loss, self.config.kl
        old_logp, advantages = (
            t.flatten()[micro.batch_index] for t in (targets.old_logp, targets.advantages)
        )
        ref_logp, is_weights = (
            None if t is None else t.flatten()[micro.batch_index]
            for t in (targets.ref_logp, targets.is_weights)
        )
        result, _ = policy_loss(
            *(self.policy, micro, self.config, self.timer, old_logp, advantages),
            ref_logp=ref_logp,
            is_weights=is_weights,
            kl=None if ref_logp is None else kl.estimator,
            kl_grad=kl.grad,
            kl_coef=kl.coef,
            denom=mini.denominator(options.agg, self.config.rollout.max_new_tokens),
        )
        metrics.policy(result)
        return result.loss

    def finish(self, metrics: dict[str, float]) -> None:
        """Add metrics of this algorithm and adapt what adapts from step to step."""
        if self.reference is None:
            metrics.pop("kl/ref", None)
        else:
            metrics["kl/coef"] = self.config.kl.coef
