"""Seeds, threads and device: what makes two runs of one configuration the same."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

from fastrl.train.config import Config

__all__ = ["derived_seed", "set_up"]


def derived_seed(*parts: object) -> int:
    """A 63-bit seed that depends on every part and on nothing else.

    >>> derived_seed(0, "sample", 1) == derived_seed(0, "sample", 1) != derived_seed(0, "sample", 2)
    True
    """
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def set_up(config: Config) -> torch.device:
    """Set threads and seeds, and return the device. Rewards may draw from any global generator."""
    if config.threads:
        torch.set_num_threads(config.threads)
    random.seed(config.seed)
    np.random.seed(config.seed % 2**32)  # noqa: NPY002
    torch.manual_seed(config.seed)
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)
