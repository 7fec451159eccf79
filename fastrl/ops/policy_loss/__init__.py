from fastrl.ops.policy_loss.api import POLICY_METRICS, PolicyLoss, policy_loss

__all__ = ["POLICY_METRICS", "PolicyLoss", "policy_loss"]
