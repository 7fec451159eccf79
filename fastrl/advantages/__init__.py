"""Advantage estimators that are compositions of the ops: a few lines each, no kernel of their own.

Estimators that are options of one op need no function: RLOO, Dr. GRPO, OPO and MaxRL are ``fastrl.group_advantages``,
decoupled GAE and TD(lambda) returns are ``fastrl.gae``; see the table in ``fastrl/advantages/README.md``.
"""

from fastrl.advantages.group import (
    gdpo_advantages,
    gigpo_advantages,
    gpg_advantages,
    once_per_episode,
    pass_at_k_advantages,
)
from fastrl.advantages.lambdas import length_adaptive_lam, relative_position_lam
from fastrl.advantages.token_baseline import optimal_token_baseline
from fastrl.advantages.trace import reinforce_plus_plus, remax, vtrace
from fastrl.advantages.turns import process_reward_advantages, turn_gae, turn_group_advantages

__all__ = [
    "gdpo_advantages",
    "gigpo_advantages",
    "gpg_advantages",
    "length_adaptive_lam",
    "once_per_episode",
    "optimal_token_baseline",
    "pass_at_k_advantages",
    "process_reward_advantages",
    "reinforce_plus_plus",
    "relative_position_lam",
    "remax",
    "turn_gae",
    "turn_group_advantages",
    "vtrace",
]
