"""The ops over an lm_head with the vocabulary spread over processes, and weights that FSDP2 has sharded."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

import fastrl
from tests.helpers import same_bits
from tests.ops.heads import assert_close, head
from tests.ops.vocabulary_rank import Shards, vocabulary_rank

VOCABULARY = 21
# Shards of one size with three classes of padding at the end, of any size, with a rank of padding alone, with one class.
SPLITS: dict[str, Shards] = {
    "two_equal": [(0, 12), (12, 24)],
    "two_any": [(0, 1), (1, 24)],
    "four_equal": [(0, 6), (6, 12), (12, 18), (18, 24)],
    "four_any": [(0, 2), (2, 15), (15, 21), (21, 24)],
}
SHARDED = ("weight", "bias", "lora_b")


def test_shards_compute_what_one_process_computes() -> None:
    """Values on every rank, gradients on every shard and of what ranks hold copies of; classes that only some can choose."""
    h = head((7,), 5, 24, torch.float64, bias=True, rank=2)
    h.tokens.copy_(torch.tensor([0, 20, 13, 5, 1, 17, 12]))
    allowed = torch.stack([h.tokens, (h.tokens + 1) % VOCABULARY, torch.full((7,), -1)], 1)
    inputs: dict[str, Any] = {
        **h._asdict(),
        "vocabulary": VOCABULARY,
        "splits": SPLITS,
        "options": {"temperature": torch.rand(7, dtype=torch.float64) + 0.5, "softcap": 5.0},
        "allowed": allowed,
        "g": torch.randn(7, dtype=torch.float64),
        "h": torch.randn(7, dtype=torch.float64),
        "old_logp": torch.full((7,), -3.0, dtype=torch.float64),
    }
    with tempfile.TemporaryDirectory() as folder:
        torch.save(inputs, Path(folder) / "inputs.pt")
        mp.spawn(vocabulary_rank, (folder, 4), nprocs=4)
        ranks = [torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(4)]
    expected = _one_process(inputs)
    for name, shards in SPLITS.items():
        for rank, (first, end) in enumerate(shards):
            found = ranks[rank][name]
            assert found.keys() == expected.keys()
            for key, y in expected.items():
                of_shard = key.split("_", 1)[-1] in SHARDED or key in SHARDED
                if not of_shard:
                    assert same_bits(found[key], ranks[0][name][key])
                assert_close([found[key]], [y[first:end] if of_shard else y], torch.float64)


def _one_process(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The definition over the whole vocabulary."""
    names = ("hidden", "lora_a", "weight", "bias", "lora_b")
    leaves = {name: inputs[name].clone().requires_grad_() for name in names}
    arguments = leaves["hidden"], leaves["weight"], inputs["tokens"]
    options: dict[str, Any] = {"vocab_size": VOCABULARY, "impl": "reference", **inputs["options"]}
    options |= {name: leaves[name] for name in ("bias", "lora_a", "lora_b")}

    def gradients(prefix: str, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        found = torch.autograd.grad(loss, list(leaves.values()))
        return {f"{prefix}{name}": x for name, x in zip(leaves, found)}

    out = fastrl.linear_token_logprobs(*arguments, entropy=True, **options)
    kept = fastrl.linear_token_logprobs(
        *arguments, entropy=True, allowed=inputs["allowed"], **options
    )
    assert out.entropy is not None and kept.entropy is not None
    expected = {
        **{"logp": out.logp.detach(), "entropy": out.entropy.detach()},
        **gradients("", (out.logp * inputs["g"] + out.entropy * inputs["h"]).sum()),
        **{"kept_logp": kept.logp.detach(), "kept_entropy": kept.entropy.detach()},
        **gradients("kept_", kept.logp.sum() + kept.entropy.sum()),
    }
    for ratio in ("token", "sequence"):
        loss = fastrl.linear_policy_loss(
            *arguments, inputs["old_logp"], inputs["g"], ratio=ratio, entropy_coef=0.1,
            cu_seqlens=torch.tensor([0, 4, 7]), **options,
        ).loss  # fmt: skip
        expected[f"{ratio}_loss"] = loss.detach()
        expected |= gradients(f"{ratio}_", loss)
    return expected


def test_weights_that_fsdp2_has_sharded() -> None:
    """A DTensor is refused with the remedy; gathered by it, its shards receive the gradient."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=0, world_size=1)
        try:
            h = head((6,), 8, 30)
            layer = nn.Linear(8, 30, bias=False)
            layer.weight.data.copy_(h.weight)
            mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
            fully_shard(layer, mesh=mesh)
            weight: Any = layer.weight
            with pytest.raises(
                TypeError, match=r"weight must be a plain tensor, got a DTensor.*full_tensor\(\)"
            ):
                fastrl.linear_token_logprobs(h.hidden, weight, h.tokens)
            fastrl.linear_token_logprobs(
                h.hidden, weight.full_tensor(), h.tokens
            ).logp.sum().backward()
            plain = h.fresh()
            fastrl.linear_token_logprobs(*plain[:3]).logp.sum().backward()
            torch.testing.assert_close(weight.grad.full_tensor(), plain.weight.grad)
        finally:
            dist.destroy_process_group()


def test_the_definition_refuses_a_process_group() -> None:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=0, world_size=1)
        try:
            h = head((6,), 8, 30)
            for call in (
                lambda: fastrl.linear_token_logprobs(
                    *h[:3], process_group=dist.group.WORLD, impl="reference"
                ),
            ):
                with pytest.raises(ValueError, match=r"linear_token_logprobs: .*one process"):
                    call()
            alone = fastrl.linear_token_logprobs(*h[:3], process_group=dist.group.WORLD).logp
            assert_close([alone], [fastrl.linear_token_logprobs(*h[:3]).logp], torch.float32)
        finally:
            dist.destroy_process_group()
