"""Log-probabilities, entropies and values of the trained tokens of a micro-batch: one code path.

Sampling-time and training-time numbers both come from here, on the same micro-batches, so the ratio
of the first update is exactly 1 and not 1 up to rounding.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

import fastrl
from fastrl.train.batch import MicroBatch
from fastrl.train.config import Config
from fastrl.train.metrics import Timer
from fastrl.train.models import Policy, ValueModel, autocast, completion_hidden

__all__ = ["TokenOutputs", "policy_outputs", "values_of"]


class TokenOutputs(NamedTuple):
    """Per trained token [N]; `hidden` [N, H] is what predicts it."""

    logp: Tensor
    entropy: Tensor | None
    hidden: Tensor


def policy_outputs(
    policy: Policy, micro: MicroBatch, config: Config, timer: Timer, *, entropy: bool = False
) -> TokenOutputs:
    """Log-probabilities under `policy` at the temperature of sampling; logits only where needed."""
    with autocast(config.model, policy.device):
        hidden = completion_hidden(
            policy.trunk, micro.inputs, share_prompts=config.model.share_prompts
        )
        hidden = hidden.flatten(0, 1).index_select(0, micro.hidden_index)
        logits = policy.head(hidden)
    with timer("fastrl"):
        logp, entropies = fastrl.token_logprobs(
            logits, micro.tokens, temperature=config.rollout.temperature, entropy=entropy
        )
    return TokenOutputs(logp, entropies, hidden)


def values_of(
    critic: ValueModel, micro: MicroBatch, config: Config, policy_hidden: Tensor
) -> Tensor:
    """Values [N] of the states before each trained token, from the critic's own trunk if it has one."""
    if critic.trunk is None:
        return critic.score(policy_hidden)
    with autocast(config.model, policy_hidden.device):
        hidden = completion_hidden(
            critic.trunk, micro.inputs, share_prompts=config.model.share_prompts
        )
    return critic.score(hidden.flatten(0, 1).index_select(0, micro.hidden_index))
