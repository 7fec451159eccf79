"""One of the two processes of ``test_whiten``; a file of its own so that starting it imports little."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

import fastrl


def whiten_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    x, mask = torch.load(Path(folder) / "inputs.pt")
    rows = slice(0, 2) if rank == 0 else slice(2, None)
    results = {
        "auto": fastrl.whiten(x[rows], mask[rows], process_group=dist.group.WORLD),
        "reference": fastrl.whiten(x[rows], mask[rows], process_group=dist.group.WORLD, impl="reference"),
        "empty": fastrl.whiten(x[rows] if rank else x[:0], process_group=dist.group.WORLD),
        "equal": fastrl.whiten(torch.full((3 + rank,), 0.1), process_group=dist.group.WORLD),
        "alone": fastrl.whiten(x[rows], mask[rows]),
    }  # fmt: skip
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()
