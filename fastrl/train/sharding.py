"""How weights lie on the ranks: a copy on each (ddp), or in shards (fsdp2), which alone this file knows.

With ``ddp`` every rank holds everything and gradients are added up once per optimiser step. With
``fsdp2`` torch's ``fully_shard`` cuts parameters, gradients and with them the optimiser's state into one
shard per rank; a layer is whole only while it is computed. Losses divide by the counts of the whole
mini-batch, so gradients are summed over ranks and never averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fastrl.train.options import ScaleConfig
from fastrl.train.world import World

__all__ = [
    "clip_gradients",
    "gathered",
    "laid_out_like",
    "settle",
    "spread",
    "sum_gradients",
    "whole",
]

# Elements of gradients that one message carries.
_BUCKET = 1 << 24


def spread(networks: Sequence[nn.Module], config: ScaleConfig, world: World) -> None:
    """Give all ranks the weights of the first, and cut them into shards with ``fsdp2``.

    From then on a sharded network is computed through its `forward` alone, which gathers its weights.
    """
    if world.size == 1:
        return
    for network in networks:
        for tensor in (*network.parameters(), *network.buffers()):
            world.copy_first_(tensor.data)
    if config.strategy == "ddp":
        return
    device = next(networks[0].parameters()).device
    mesh = init_device_mesh(device.type, (world.size,))
    for network in networks:
        # The name that transformers gives to what must not be split over devices: its layers.
        layers = {n for m in network.modules() for n in getattr(m, "_no_split_modules", None) or ()}
        for module in [m for m in network.modules() if type(m).__name__ in layers]:
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        # What no layer owns: embeddings, the last norm, the head.
        fully_shard(network, mesh=mesh, reshard_after_forward=True)
        for shard in _shards(network):
            shard.set_gradient_divide_factor(1.0)
            # gloo has no reduction that multiplies as well.
            shard.set_force_sum_reduction_for_comms(True)


def _shards(network: nn.Module) -> list[FSDPModule]:
    return [m for m in network.modules() if isinstance(m, FSDPModule)]


@contextmanager
def gathered(network: nn.Module) -> Iterator[None]:
    """The weights of `network` whole on every rank, so that ranks may call it as often as they like.

    Sampling needs it: ranks sample different numbers of tokens, and gathering the weights anew for each
    token would cost more than computing it.
    """
    shards = _shards(network)
    for shard in shards:
        shard.set_reshard_after_forward(False, recurse=False)
        shard.unshard()
    try:
        yield
    finally:
        for shard in shards:
            shard.set_reshard_after_forward(True, recurse=False)
            shard.reshard()


def settle(networks: Sequence[nn.Module]) -> None:
    """Forget the forward passes so far, of which ``fsdp2`` else keeps a list until a backward pass."""
    for network in networks:
        if isinstance(network, FSDPModule) and hasattr(network, "reset_iter_state"):
            network.reset_iter_state()


def sum_gradients(parameters: Sequence[nn.Parameter], world: World) -> None:
    """Sum the gradients over the ranks, unless ``fsdp2`` did so already.

    A parameter that some ranks did not use counts as 0 there; one that none used keeps no gradient.
    """
    if world.size == 1 or isinstance(parameters[0], DTensor):
        return
    used = world.sum_(torch.tensor([float(p.grad is not None) for p in parameters]))
    gradients: list[Tensor] = []
    for parameter, count in zip(parameters, used.tolist(), strict=True):
        if count:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    while gradients:
        size = 0
        bucket: list[Tensor] = []
        while gradients and (not bucket or size + gradients[0].numel() <= _BUCKET):
            bucket.append(gradients.pop(0))
            size += bucket[-1].numel()
        flat = world.sum_(torch.cat([g.flatten() for g in bucket]))
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients down to `max_norm` and return the norm before, over all ranks."""
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def whole(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """`tensors` put together from their shards, for a checkpoint; empty but on the first rank."""
    result = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if world.is_first:
            # One by one to the CPU: all of them may not fit on the device.
            result[name] = full.detach().cpu()
    return result


def laid_out_like(full: Tensor, tensor: Tensor) -> Tensor:
    """`full`, which all ranks have, cut into shards where `tensor` is."""
    if not isinstance(tensor, DTensor):
        return full
    mesh, placements = tensor.device_mesh, tensor.placements
    return distribute_tensor(full.to(tensor.device), mesh, placements, src_data_rank=None)
