"""Seeds, threads and device: what makes two runs of one configuration the same."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

from fastrl.train.config import Config
from fastrl.train.world import ALONE, World

__all__ = ["derived_seed", "set_up"]


def derived_seed(*parts: object) -> int:
    """A 63-bit seed that depends on every part and on nothing else.

    >>> derived_seed(0, "sample", 1) == derived_seed(0, "sample", 1) != derived_seed(0, "sample", 2)
    True
    """
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def set_up(config: Config, world: World = ALONE) -> torch.device:
    """Set threads and seeds, and return the device. Rewards may draw from any global generator."""
    if config.threads:
        torch.set_num_threads(config.threads)
    seed = config.seed if world.is_first else derived_seed(config.seed, "rank", world.rank)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and world.size > 1:
        name = f"cuda:{world.local_rank}"
    return torch.device(name)
