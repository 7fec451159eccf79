from fastrl.ops.group_ids.api import group_ids

__all__ = ["group_ids"]
