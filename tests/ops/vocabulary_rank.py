"""One of the processes of ``test_vocabulary_parallel``; a file of its own so that starting it imports little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fastrl

Shards = list[tuple[int, int]]  # first class and end of each rank's shard


def vocabulary_rank(rank: int, folder: str, num_ranks: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks
    )
    pair = dist.new_group([0, 1])
    inputs = torch.load(Path(folder) / "inputs.pt")
    results: dict[str, Any] = {}
    for name, shards in inputs["splits"].items():
        if rank >= len(shards):
            continue
        group = pair if len(shards) == 2 else dist.group.WORLD
        results[name] = _results(inputs, shards, rank, group)
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _results(inputs: dict[str, Any], shards: Shards, rank: int, group: Any) -> dict[str, Any]:
    classes = slice(*shards[rank])
    tensors = {name: inputs[name] for name in ("hidden", "lora_a")}
    tensors |= {name: inputs[name][classes].contiguous() for name in ("weight", "bias", "lora_b")}
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    arguments = leaves["hidden"], leaves["weight"], inputs["tokens"]
    options: dict[str, Any] = {
        "process_group": group,
        "vocab_size": inputs["vocabulary"],
        "chunk": 3,
    }
    options |= {name: leaves[name] for name in ("bias", "lora_a", "lora_b")} | inputs["options"]
    sizes = {end - first for first, end in shards}
    if len(sizes) > 1:
        options["vocab_start"] = shards[rank][0]

    def gradients(loss: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))

    out = fastrl.linear_token_logprobs(*arguments, entropy=True, **options)
    assert out.entropy is not None
    found = {"logp": out.logp.detach(), "entropy": out.entropy.detach()}
    found |= gradients((out.logp * inputs["g"] + out.entropy * inputs["h"]).sum())
    allowed = inputs["allowed"]
    kept = fastrl.linear_token_logprobs(*arguments, entropy=True, allowed=allowed, **options)
    assert kept.entropy is not None
    found |= {"kept_logp": kept.logp.detach(), "kept_entropy": kept.entropy.detach()}
    found |= {
        f"kept_{name}": x for name, x in gradients(kept.logp.sum() + kept.entropy.sum()).items()
    }
    for ratio in ("token", "sequence"):
        loss = fastrl.linear_policy_loss(
            *arguments, inputs["old_logp"], inputs["g"], ratio=ratio, entropy_coef=0.1,
            cu_seqlens=torch.tensor([0, 4, 7]), **options,
        )  # fmt: skip
        found[f"{ratio}_loss"] = loss.loss.detach()
        found |= {f"{ratio}_{name}": x for name, x in gradients(loss.loss).items()}
    return found
