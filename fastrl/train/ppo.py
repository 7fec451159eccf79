"""PPO: a critic predicts the return at every token, and GAE turns its errors into token advantages.

The KL to the reference is taken from the reward, token by token, with a fixed weight or one that a
controller steers to a target. The critic is a value head on the policy's trunk or a model of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fastrl
from fastrl.advantages import turn_gae
from fastrl.train.batch import Batch, MicroBatch, MiniBatch, fill
from fastrl.train.config import Config
from fastrl.train.correction import correct
from fastrl.train.forward import policy_loss, policy_outputs, values_of
from fastrl.train.metrics import StepMetrics, Timer
from fastrl.train.models import Policy, ValueModel
from fastrl.train.world import ALONE, World

__all__ = ["PPO"]


class Targets(NamedTuple):
    """Constants of one rollout, [B, C]."""

    old_logp: Tensor
    advantages: Tensor
    old_values: Tensor
    returns: Tensor
    is_weights: Tensor | None = None


class PPO:
    """Proximal policy optimisation with a critic."""

    def __init__(self, config: Config, policy: Policy, timer: Timer, world: World = ALONE) -> None:
        self.config = config
        self.policy = policy
        self.timer = timer
        self.world = world
        self.reference = policy.reference() if config.kl.coef else None
        trunk = copy.deepcopy(policy.trunk) if config.ppo.critic == "separate" else None
        self.critic = ValueModel(policy.hidden_size, trunk).to(policy.device).eval()
        self.kl_coef = config.kl.coef
        self.num_steps = 0
        self._measured_kl = 0.0
        self._num_tokens = 0

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What the optimiser trains, with learning rates."""
        lr = self.config.optim.lr
        critic_lr = lr if self.config.ppo.critic_lr is None else self.config.ppo.critic_lr
        return [
            {"params": self.policy.trained(), "lr": lr},
            {"params": [p for p in self.critic.parameters() if p.requires_grad], "lr": critic_lr},
        ]

    def networks(self) -> list[nn.Module]:
        """What is computed, trained or not."""
        return [self.policy, self.critic, *([self.reference] if self.reference else [])]

    def modules(self) -> dict[str, nn.Module]:
        """What a checkpoint must hold."""
        return {"policy": self.policy.model, "critic": self.critic}

    def state(self) -> dict[str, float]:
        """Numbers that a checkpoint must hold."""
        return {"kl_coef": self.kl_coef, "num_steps": self.num_steps}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Take back what `state` returned."""
        self.kl_coef = state["kl_coef"]
        self.num_steps = int(state["num_steps"])

    def targets(self, batch: Batch, plan: list[MiniBatch]) -> Targets:
        """Log-probabilities and values of the rollout, token rewards, advantages and returns."""

        def rollout(micro: MicroBatch) -> list[Tensor]:
            out = policy_outputs(self.policy, micro, self.config, self.timer)
            values = values_of(self.critic, micro, self.config, out.hidden)
            reference = []
            if self.reference is not None:
                reference = [policy_outputs(self.reference, micro, self.config, self.timer).logp]
            return [out.logp, values, *reference]

        with torch.no_grad():
            old_logp, values, *ref_logp = fill(batch, plan, rollout, self.world)
        mask = batch.mask.to(values.device)
        # The KL of a token is paid at that token, a score at the last token of its turn.
        rewards = batch.token_rewards.to(values)
        if ref_logp:
            divergence = (old_logp - ref_logp[0]) * mask
            rewards -= self.kl_coef * divergence
            self._num_tokens = int(batch.mask.sum())
            self._measured_kl = float(divergence.sum()) / self._num_tokens
        options = self.config.ppo
        with self.timer("fastrl"):
            if options.credit == "turn":
                advantages, returns = turn_gae(
                    *(rewards, values, batch.turn_of.to(values.device), mask),
                    gamma=options.gamma,
                    lam=options.lam,
                )
            else:
                advantages, returns = fastrl.gae(
                    rewards, values, mask, gamma=options.gamma, lam=options.lam
                )
            if options.whiten:
                advantages = fastrl.whiten(advantages, mask)
        corrected = correct(self.config, batch, old_logp)
        weights = None if corrected is None else corrected.weights
        return Targets(old_logp, advantages, values, returns, weights)

    def loss(
        self, micro: MicroBatch, mini: MiniBatch, targets: Targets, metrics: StepMetrics
    ) -> Tensor:
        """The share of one micro-batch in the loss of its mini-batch."""
        options, ppo = self.config.loss, self.config.ppo
        warming_up = self.num_steps < ppo.warmup_steps
        old_logp, advantages, old_values, returns = (
            t.flatten()[micro.batch_index]
            for t in (targets.old_logp, targets.advantages, targets.old_values, targets.returns)
        )
        is_weights = None
        if targets.is_weights is not None:
            is_weights = targets.is_weights.flatten()[micro.batch_index]
        denom = mini.denominator(options.agg, self.config.rollout.max_new_tokens)
        with torch.set_grad_enabled(not warming_up):
            policy_result, hidden = policy_loss(
                *(self.policy, micro, self.config, self.timer, old_logp, advantages),
                is_weights=is_weights,
                denom=denom,
            )
        values = values_of(self.critic, micro, self.config, hidden)
        with self.timer("fastrl"):
            value_result = fastrl.value_loss(
                values,
                None if ppo.value_clip is None else old_values,
                returns,
                clip=ppo.value_clip,
                denom=max(mini.num_tokens, 1),
                cu_seqlens=micro.cu_seqlens,
            )
        metrics.policy(policy_result)
        metrics.value(value_result)
        critic_term = ppo.value_coef * value_result.loss
        return critic_term if warming_up else policy_result.loss + critic_term

    def finish(self, metrics: dict[str, float]) -> None:
        """Add metrics of this algorithm and adapt what adapts from step to step."""
        self.num_steps += 1
        metrics.pop("kl/ref", None)
        if self.reference is None:
            return
        metrics["kl/ref"], metrics["kl/coef"] = self._measured_kl, self.kl_coef
        kl = self.config.kl
        if kl.target is not None:
            # Ziegler et al. (2019): proportional control in log space, the error clipped at 20 %.
            error = min(max(self._measured_kl / kl.target - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * min(self._num_tokens / kl.horizon, 1)
