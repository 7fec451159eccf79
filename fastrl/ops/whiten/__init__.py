from fastrl.ops.whiten.api import whiten

__all__ = ["whiten"]
