"""fastrl: fused kernels for reinforcement learning of language models and agents."""

from fastrl._version import __version__
from fastrl.ops.gae import GAE, gae

__all__ = ["GAE", "__version__", "gae"]
