from fastrl.ops.policy_loss.api import PolicyLoss, policy_loss
from fastrl.ops.policy_loss.op import POLICY_METRICS

__all__ = ["POLICY_METRICS", "PolicyLoss", "policy_loss"]
