from fastrl.ops.linear_policy_loss.api import LinearPolicyLoss, linear_policy_loss

__all__ = ["LinearPolicyLoss", "linear_policy_loss"]
