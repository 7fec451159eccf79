"""Log-probabilities, entropies and values of the trained tokens of a micro-batch: one code path.

Sampling-time and training-time numbers both come from here, on the same micro-batches, so the ratio
of the first update is exactly 1 and not 1 up to rounding.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

import fastrl
from fastrl.train.batch import MicroBatch
from fastrl.train.config import Config
from fastrl.train.metrics import Timer
from fastrl.train.models import Policy, ValueModel, autocast, completion_hidden

__all__ = ["TokenOutputs", "policy_loss", "policy_outputs", "values_of"]


class TokenOutputs(NamedTuple):
    """Per trained token [N]; `hidden` [N, H] is what predicts it."""

    logp: Tensor
    entropy: Tensor | None
    hidden: Tensor


def policy_outputs(
    policy: Policy, micro: MicroBatch, config: Config, timer: Timer, *, entropy: bool = False
) -> TokenOutputs:
    """Log-probabilities under `policy` at the temperature of sampling."""
    compute = partial(_policy_outputs, policy, micro, config, timer, entropy=entropy)
    return cast(TokenOutputs, policy(compute))


def _policy_outputs(
    policy: Policy, micro: MicroBatch, config: Config, timer: Timer, *, entropy: bool
) -> TokenOutputs:
    hidden = _hidden(policy, micro, config)
    temperature = config.rollout.temperature
    if config.model.head == "fused":
        with timer("fastrl"), autocast(config.model, policy.device):
            logp, entropies = fastrl.linear_token_logprobs(
                hidden,
                tokens=micro.tokens,
                temperature=temperature,
                entropy=entropy,
                **policy.head_options(),
            )
        return TokenOutputs(logp, entropies, hidden)
    with autocast(config.model, policy.device):
        logits = policy.logits(hidden)
    with timer("fastrl"):
        logp, entropies = fastrl.token_logprobs(
            logits, micro.tokens, temperature=temperature, entropy=entropy
        )
    return TokenOutputs(logp, entropies, hidden)


def policy_loss(
    policy: Policy,
    micro: MicroBatch,
    config: Config,
    timer: Timer,
    old_logp: Tensor,
    advantages: Tensor,
    **options: Any,
) -> tuple[fastrl.PolicyLoss | fastrl.LinearPolicyLoss, Tensor]:
    """The policy loss of the trained tokens with `options` of `fastrl.policy_loss`.

    With it go the hidden states of these tokens, [N, H].
    """
    options |= dataclasses.asdict(config.loss) | {"cu_seqlens": micro.cu_seqlens}

    def compute() -> tuple[fastrl.PolicyLoss | fastrl.LinearPolicyLoss, Tensor]:
        if config.model.head == "fused":
            hidden = _hidden(policy, micro, config)
            with timer("fastrl"), autocast(config.model, policy.device):
                return fastrl.linear_policy_loss(
                    hidden,
                    tokens=micro.tokens,
                    old_logp=old_logp,
                    advantages=advantages,
                    temperature=config.rollout.temperature,
                    entropy=True,
                    **policy.head_options(),
                    **options,
                ), hidden
        out = _policy_outputs(policy, micro, config, timer, entropy=True)
        with timer("fastrl"):
            loss = fastrl.policy_loss(
                out.logp, old_logp, advantages, entropy=out.entropy, **options
            )
        return loss, out.hidden

    return cast(tuple[fastrl.PolicyLoss | fastrl.LinearPolicyLoss, Tensor], policy(compute))


def _hidden(policy: Policy, micro: MicroBatch, config: Config) -> Tensor:
    """The states [N, H] that predict the trained tokens: no others reach the head."""
    with autocast(config.model, policy.device):
        hidden = _trunk_hidden(policy.trunk, micro, config)
    return hidden.flatten(0, 1).index_select(0, micro.hidden_index)


def values_of(
    critic: ValueModel, micro: MicroBatch, config: Config, policy_hidden: Tensor
) -> Tensor:
    """Values [N] of the states before each trained token, from the critic's own trunk if it has one."""
    values = critic(partial(_values, critic, micro, config, policy_hidden))
    return cast(Tensor, values).squeeze(-1)


def _values(critic: ValueModel, micro: MicroBatch, config: Config, policy_hidden: Tensor) -> Tensor:
    if critic.trunk is None:
        return critic.score(policy_hidden)
    with autocast(config.model, policy_hidden.device):
        hidden = _trunk_hidden(critic.trunk, micro, config)
    return critic.score(hidden.flatten(0, 1).index_select(0, micro.hidden_index))


def _trunk_hidden(trunk: nn.Module, micro: MicroBatch, config: Config) -> Tensor:
    return completion_hidden(
        trunk,
        micro.inputs,
        share_prompts=config.model.share_prompts,
        checkpointing=config.model.activation_checkpointing,
    )
