"""The processes of a run: which one this is, how work is shared, and what they tell one another.

``torchrun`` starts the same program several times. Each process samples and scores its share of the
questions; then all of them hold all trajectories, build the same batch and the same plan, and compute
their share of its micro-batches. What crosses between them is JSON and sums of tensors, never pickles.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fastrl.train.config import Config

__all__ = ["ALONE", "World", "connect"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """This process among the `size` processes of a run. A world of one asks nobody and starts nothing.

    All ranks must make the same calls in the same order.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Number among the processes of this machine, and of the CUDA device."""

    @property
    def is_first(self) -> bool:
        """Whether this process keeps the record of the run."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Every `size`-th item, from the one of this rank on.

        >>> World(rank=1, size=3).share("abcde")
        'be'
        """
        return items[self.rank :: self.size]

    def deal(self, costs: Sequence[float]) -> list[int]:
        """Which of the pieces of work with these costs are this rank's, in their order.

        Dealt like cards, the dearest first, to and fro: ranks get equal numbers, but for one, and sums
        that are nearly equal.

        >>> [World(rank=r, size=2).deal([1, 2, 3, 4, 5]) for r in (0, 1)]
        [[0, 1, 4], [2, 3]]
        """
        order = sorted(range(len(costs)), key=lambda i: -costs[i])
        rounds = [order[i : i + self.size] for i in range(0, len(order), self.size)]
        places = (self.rank, self.size - 1 - self.rank)
        dealt = [r[places[i % 2]] for i, r in enumerate(rounds) if places[i % 2] < len(r)]
        return sorted(dealt)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """What each rank gave, by rank."""
        if self.size == 1:
            return [data]
        size = torch.tensor([len(data)])
        sizes = [torch.empty_like(size) for _ in range(self.size)]
        dist.all_gather(sizes, size)
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(found, padded)
        return [x[: int(n)].numpy().tobytes() for x, n in zip(found, sizes, strict=True)]

    def gather(self, value: Any) -> list[Any]:
        """What each rank gave, by rank; values travel as JSON, so tuples arrive as lists."""
        if self.size == 1:
            return [value]
        return [json.loads(data) for data in self.gather_bytes(json.dumps(value).encode())]

    def highest(self, value: int) -> int:
        """The largest `value` of any rank."""
        if self.size == 1:
            return value
        result = torch.tensor(value)
        dist.all_reduce(result, dist.ReduceOp.MAX)
        return int(result)

    def sum_(self, tensor: Tensor) -> Tensor:
        """`tensor`, which now holds the sum over the ranks."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def copy_first_(self, tensor: Tensor) -> None:
        """Write what `tensor` holds on the first rank into it on all of them."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)


ALONE = World()


@contextmanager
def connect(config: Config) -> Iterator[World]:
    """The world that ``torchrun`` described in the environment; `ALONE` without one.

    A process group that is there already is used and left as it is, its own timeout included. Raises
    ValueError when the description or the devices do not fit, and ConnectionError when another process
    was lost, at the latest `scale.timeout` seconds after.
    """
    joined = dist.is_initialized()
    world = _of_group() if joined else _of_environment()
    if world.size == 1:
        yield ALONE
        return
    backend = _backend(config, world)
    try:
        if not joined:
            dist.init_process_group(backend, timeout=timedelta(seconds=config.scale.timeout))
        yield world
    except RuntimeError as error:
        if not _is_of_connection(error):
            raise
        # The group is left as it is: to end it would be to wait for the process that was lost.
        raise ConnectionError(
            f"scale: rank {world.rank} of {world.size} lost another process, which ended or said nothing "
            f"for scale.timeout = {config.scale.timeout:g} s; what it printed says why; --resume continues "
            f"from the last checkpoint ({str(error).splitlines()[0]})"
        ) from error
    if not joined:
        # Others may have ended theirs first.
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _of_group() -> World:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return World(dist.get_rank(), dist.get_world_size(), local_rank)


def _of_environment() -> World:
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return ALONE
    names = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(
            f"scale: WORLD_SIZE is {size}, but {', '.join(missing)} is not set; start with torchrun, or "
            "unset WORLD_SIZE for one process"
        )
    return World(int(os.environ["RANK"]), size, int(os.environ["LOCAL_RANK"]))


def _backend(config: Config, world: World) -> str:
    """gloo for what is on the CPU, and NCCL for what is on a GPU of this process's own."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cpu" or (config.device == "auto" and not found):
        return "gloo"
    if found <= world.local_rank:
        raise ValueError(
            f"scale: process {world.local_rank} of this machine needs a CUDA device of its own, and torch "
            f'finds {found}; start with --nproc-per-node {max(found, 1)} or fewer, or set device = "cpu"'
        )
    if not dist.is_nccl_available():
        raise ValueError(
            "scale: several processes on CUDA devices need torch with NCCL, which this one has not; "
            'install another build, or set device = "cpu"'
        )
    torch.cuda.set_device(world.local_rank)
    return "cpu:gloo,cuda:nccl"


def _is_of_connection(error: RuntimeError) -> bool:
    """Whether torch.distributed raised it; gloo raises plain RuntimeErrors, with its source in them."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()
