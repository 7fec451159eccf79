from fastrl.ops.discounted_returns.api import discounted_returns

__all__ = ["discounted_returns"]
