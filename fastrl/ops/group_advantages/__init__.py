from fastrl.ops.group_advantages.api import group_advantages

__all__ = ["group_advantages"]
