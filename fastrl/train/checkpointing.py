"""Activation checkpointing of a trunk: layers keep their inputs and compute the rest again.

`transformers` has its own, but only in training mode (which would bring dropout back) and without a
cache of keys and values, through which completions share their prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["checkpointed_layers"]


@contextmanager
def checkpointed_layers(trunk: nn.Module) -> Iterator[None]:
    """Every layer of `trunk` is a checkpoint inside of the context; the gradient may be taken outside.

    Gradients have the bits that they have without, since the same operations run again on the same
    inputs. Does nothing where no gradient is recorded. Raises ValueError when the model has no layers
    that `transformers` marks as such.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    if not torch.is_grad_enabled():
        yield
        return
    layers = [m for m in trunk.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"model: {type(trunk).__name__} has no layers that transformers can checkpoint; set "
            "model.activation_checkpointing = false"
        )
    for layer in layers:
        layer.forward = _checkpointed(layer, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _checkpointed(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    number: Any = next((m.layer_idx for m in layer.modules() if hasattr(m, "layer_idx")), None)

    def call(*args: Any, **kwargs: Any) -> Any:
        name = next((n for n in ("cache", "past_key_values") if kwargs.get(n) is not None), None)
        if name is None:
            return checkpoint(
                forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
            )
        cache = kwargs.pop(name)
        # The first run appends to the cache; the second must find it as the first did.
        before = _only(cache, number)
        caches = [cache]

        def run(*args: Any, **kwargs: Any) -> Any:
            now = caches.pop() if caches else _only(before, number)
            return forward(*args, **{name: now}, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return call


def _only(cache: Any, number: int | None) -> Any:
    """`cache` as it is now, without the layers other than `number`."""
    twin = copy.copy(cache)
    twin.layers = [copy.copy(x) if i == number else None for i, x in enumerate(cache.layers)]
    return twin
