"""fastrl: fused kernels for reinforcement learning of language models and agents."""

from fastrl._version import __version__
from fastrl.ops.affine_scan import affine_scan
from fastrl.ops.discounted_returns import discounted_returns
from fastrl.ops.gae import GAE, gae
from fastrl.ops.group_advantages import group_advantages
from fastrl.ops.group_ids import group_ids
from fastrl.ops.linear_policy_loss import LinearPolicyLoss, linear_policy_loss
from fastrl.ops.linear_token_logprobs import linear_token_logprobs
from fastrl.ops.policy_loss import POLICY_METRICS, PolicyLoss, policy_loss
from fastrl.ops.token_logprobs import LogProbs, token_logprobs, token_logprobs_
from fastrl.ops.value_loss import VALUE_METRICS, ValueLoss, value_loss
from fastrl.ops.whiten import whiten

__all__ = [
    "__version__",
    "GAE",
    "LinearPolicyLoss",
    "LogProbs",
    "POLICY_METRICS",
    "PolicyLoss",
    "VALUE_METRICS",
    "ValueLoss",
    "affine_scan",
    "discounted_returns",
    "gae",
    "group_advantages",
    "group_ids",
    "linear_policy_loss",
    "linear_token_logprobs",
    "policy_loss",
    "token_logprobs",
    "token_logprobs_",
    "value_loss",
    "whiten",
]
