"""LoRA through `peft`: adapters in a frozen model, and the model without them as the reference.

The policy runs in evaluation mode, so adapters have no dropout: it would make the log-probabilities
of sampling and of training differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.train.options import LoRAConfig

__all__ = ["add_adapters", "are_idle", "low_rank_term", "without_adapters"]

_NAME = "default"  # under which peft keeps the one adapter


def add_adapters(model: Any, config: LoRAConfig, seed: int) -> None:
    """Freeze `model` and put adapters, drawn from `seed`, into the layers that `config` names.

    Rank 0 does nothing. Raises ValueError when peft is missing or knows none of the layers.
    """
    if not config.rank:
        return
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ValueError(
            f'model: model.lora needs peft ({error}); pip install "fastrl-kernels[lora]", or set '
            "model.lora.rank = 0"
        ) from error
    targets = list(config.targets)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft divides it by the rank, whole or not
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(settings, model)
        except ValueError as error:
            raise ValueError(
                f"model: peft cannot put adapters where model.lora.targets = {targets} says: {error}"
            ) from error
    # Not left to peft: whatever is no adapter stays as it is, embeddings and norms included.
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def are_idle(model: nn.Module) -> bool:
    """Whether `model` has adapters and none of them changes anything, as before they were trained."""
    seconds = [p for name, p in model.named_parameters() if "lora_B" in name]
    return bool(seconds) and not any(p.any() for p in seconds)


def low_rank_term(head: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    """The linear layer inside of `head`, and its adapter as arguments of `fastrl.linear_token_logprobs`."""
    base = getattr(head, "base_layer", None)
    if base is None:
        return head, {}
    if head.disable_adapters:
        return base, {}
    adapter: Any = head
    a: Tensor = adapter.lora_A[_NAME].weight
    b: Tensor = adapter.lora_B[_NAME].weight
    return base, {"lora_a": a, "lora_b": b, "lora_scale": adapter.scaling[_NAME]}


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The frozen model alone, inside of the context; for forward passes without a gradient."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
