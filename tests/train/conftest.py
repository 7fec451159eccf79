"""Fixtures of the trainer's tests: small configurations, and threads as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fastrl.train import config as configs
from fastrl.train.config import Config

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    """A run sets torch's threads for the whole process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small() -> Callable[..., Config]:
    """`small("grpo", "optim.lr=1")`: the tiny configuration cut down to runs of a second."""

    def make(algorithm: str, *overrides: str) -> Config:
        return configs.load(
            CONFIGS / f"{algorithm}_tiny.toml",
            [
                "rollout.prompts=4",
                "rollout.samples=4",
                "optim.mini_batches=2",
                "model.hidden_size=32",
                "log.tensorboard=false",
                "log.progress=false",
                "eval.size=4",
                *overrides,
            ],
        )

    return make
