from fastrl.ops.gae.api import GAE, gae

__all__ = ["GAE", "gae"]
