"""Validation that the two ops over an lm_head share: from what a caller passes to the inputs of the operators."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastrl import _checks
from fastrl._library import result_dtype
from fastrl.errors import ArgumentError, ArgumentTypeError
from fastrl.ops.linear_token_logprobs.projection import Inputs
from fastrl.ops.token_logprobs.api import MIN_TEMPERATURE

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class HeadOptions(NamedTuple):
    """The keyword arguments that describe the head and the rows, as the caller gave them."""

    bias: Tensor | None
    temperature: float | Tensor
    mask: Tensor | None
    allowed: Tensor | None
    softcap: float | None
    logit_scale: float
    lora_a: Tensor | None
    lora_b: Tensor | None
    lora_scale: float
    process_group: dist.ProcessGroup | None
    vocab_start: int | None
    vocab_size: int | None
    chunk: int | None
    accumulate: str


def head_inputs(
    op: str, hidden: Tensor, weight: Tensor, tokens: Tensor, options: HeadOptions
) -> Inputs:
    """Check everything and flatten the rows to ``[N]``."""
    tensors: dict[str, Any] = {"hidden": hidden, "weight": weight, "bias": options.bias}
    tensors |= {"lora_a": options.lora_a, "lora_b": options.lora_b}
    tensors = {name: x for name, x in tensors.items() if x is not None}
    for name, x in {**tensors, "tokens": tokens, "mask": options.mask}.items():
        if x is not None:
            _checks.is_tensor(op, name, x)
            _refuse_distributed(op, name, x)
    compute = _autocast_dtype(hidden)
    for name, x in tensors.items():
        _checks.floating(op, name, x)
        _checks.same_device(op, name, x, hidden.device, "hidden")
        if x.dtype != hidden.dtype and compute is None:
            raise ArgumentError(
                f"{op}: {name} must have the dtype of hidden, {hidden.dtype}, got {x.dtype}; convert one of them, "
                "or call under torch.autocast"
            )
    _shapes(op, hidden, weight, tokens, options)
    num_rows = math.prod(tokens.shape)
    first, num_classes, vocabulary = _classes(op, weight, options)
    mask = options.mask
    if mask is not None:
        _checks.same_shape(op, "mask", mask, tokens.shape, "tokens")
        mask = mask.reshape(num_rows)
    flat = tokens.reshape(num_rows).long()
    _check_range(op, flat, mask, vocabulary)
    temperature, temperatures = _temperature(op, tokens, options, compute or hidden.dtype)
    softcap = math.inf
    if options.softcap is not None:
        softcap = _positive(op, "softcap", options.softcap, "None for no cap")
    numbers = [
        temperature,
        _positive(op, "logit_scale", options.logit_scale, "1.0 for none"),
        softcap,
        _checks.number(op, "lora_scale", options.lora_scale),
    ]
    chunk = options.chunk
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ArgumentError(
            f"{op}: chunk must be a number of rows, at least 1, got {chunk!r}; pass None to let fastrl choose"
        )
    if options.accumulate not in ("float32", "weight"):
        _checks.option(op, "accumulate", options.accumulate, ("float32", "weight"))
    return Inputs(
        hidden.reshape(num_rows, hidden.shape[-1]),
        weight,
        flat,
        options.bias,
        options.lora_a,
        options.lora_b,
        mask,
        temperatures,
        _allowed(op, tokens, weight, options),
        numbers,
        [chunk or 0, first, num_classes],
        "" if options.process_group is None else options.process_group.group_name,
        compute,
        options.accumulate == "float32",
    )


def _refuse_distributed(op: str, name: str, x: Tensor) -> None:
    if hasattr(x, "full_tensor"):
        raise ArgumentTypeError(
            f"{op}: {name} must be a plain tensor, got a DTensor placed as {getattr(x, 'placements', None)}; pass "
            f"{name}.full_tensor(), which gathers it and sends gradients back to its shards, or for a weight that is "
            f"sharded over the vocabulary {name}.to_local() with process_group="
        )


def _autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    device = hidden.device.type
    if hidden.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _shapes(op: str, hidden: Tensor, weight: Tensor, tokens: Tensor, options: HeadOptions) -> None:
    if weight.dim() != 2 or weight.shape[0] == 0:
        raise ArgumentError(
            f"{op}: weight must be [V, H] with V >= 1, got {list(weight.shape)}; a flat shard of FSDP must be gathered "
            "first, for example with summon_full_params"
        )
    if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ArgumentError(
            f"{op}: hidden must be [..., H] with H = {weight.shape[1]} of weight, got {list(hidden.shape)}; "
            "pass the states that go into the lm_head"
        )
    if tokens.dtype not in _INTEGERS:
        raise ArgumentError(
            f"{op}: tokens must be integers, got {tokens.dtype}; pass tokens.long()"
        )
    if tokens.shape != hidden.shape[:-1]:
        raise ArgumentError(
            f"{op}: tokens must have the shape of hidden without its last dimension, {list(hidden.shape[:-1])}, "
            f"got {list(tokens.shape)}; to score the next token pass hidden[:, :-1] and tokens[:, 1:]"
        )
    _checks.same_device(op, "tokens", tokens, hidden.device, "hidden")
    if options.bias is not None:
        _checks.same_shape(op, "bias", options.bias, weight.shape[:1], "the classes of weight")
    a, b = options.lora_a, options.lora_b
    if (a is None) != (b is None):
        missing = "lora_a" if a is None else "lora_b"
        raise ArgumentError(
            f"{op}: {missing} must be given too, got None; a low-rank term is lora_a [R, H] and lora_b [V, R]"
        )
    if a is None or b is None:
        return
    if a.dim() != 2 or a.shape[1] != weight.shape[1] or b.shape != (len(weight), len(a)):
        raise ArgumentError(
            f"{op}: lora_a and lora_b must be [R, {weight.shape[1]}] and [{len(weight)}, R], "
            f"got {list(a.shape)} and {list(b.shape)}; pass the two weights of the adapter of the lm_head"
        )


def _classes(op: str, weight: Tensor, options: HeadOptions) -> tuple[int, int, int | None]:
    """Id of the first class of this weight, how many of its rows are classes, and the whole vocabulary if known."""
    rows, group = len(weight), options.process_group
    start, size = options.vocab_start, options.vocab_size
    if start is not None and (group is None or start < 0):
        raise ArgumentError(
            f"{op}: vocab_start must be at least 0 and needs process_group, got {start!r}; "
            "leave it out when weight has every class"
        )
    if size is not None and size < 1:
        raise ArgumentError(
            f"{op}: vocab_size must be at least 1, got {size!r}; pass the number of classes without padding"
        )
    if group is None:
        first, known = 0, rows
    else:
        equal = rows * dist.get_rank(group)
        first, known = equal if start is None else start, None
        if start is None:
            known = rows * dist.get_world_size(group)
    if size is None:
        return first, rows, known
    return first, max(min(rows, size - first), 0), size if known is None else min(size, known)


def _check_range(op: str, tokens: Tensor, mask: Tensor | None, vocabulary: int | None) -> None:
    """Looked at only where that needs no device synchronisation."""
    is_real = type(tokens) is Tensor and not torch.compiler.is_compiling()
    if not is_real or tokens.device.type != "cpu":
        return
    if mask is not None:
        tokens = tokens[mask.to(tokens.device) != 0]
    if tokens.numel() == 0:
        return
    low, high = (int(x) for x in torch.aminmax(tokens))
    if low < 0 or (vocabulary is not None and high >= vocabulary):
        raise ArgumentError(
            f"{op}: tokens must be in [0, V) = [0, {'V' if vocabulary is None else vocabulary}), "
            f"got {low if low < 0 else high}; mask positions that have no token"
        )


def _temperature(
    op: str, tokens: Tensor, options: HeadOptions, dtype: torch.dtype
) -> tuple[float, Tensor | None]:
    temperature = options.temperature
    if not isinstance(temperature, Tensor):
        return _checks.number(op, "temperature", temperature, low=MIN_TEMPERATURE), None
    _checks.like(op, "temperature", temperature, tokens, "tokens")
    if temperature.requires_grad:
        raise ArgumentError(
            f"{op}: temperature is a constant to the gradient, got a tensor that requires grad; "
            "pass temperature.detach()"
        )
    return 1.0, temperature.reshape(-1).to(result_dtype(dtype))


def _positive(op: str, name: str, value: float, remedy: str) -> float:
    value = _checks.number(op, name, value)
    if value <= 0:
        raise ArgumentError(f"{op}: {name} must be greater than 0, got {value!r}; pass {remedy}")
    return value


def _allowed(op: str, tokens: Tensor, weight: Tensor, options: HeadOptions) -> Tensor | None:
    allowed = options.allowed
    if allowed is None:
        return None
    _checks.is_tensor(op, "allowed", allowed)
    _checks.same_device(op, "allowed", allowed, tokens.device, "tokens")
    is_mask = allowed.dtype == torch.bool
    if not is_mask and allowed.dtype not in _INTEGERS:
        raise ArgumentError(
            f"{op}: allowed must be bool [..., V] or integer ids [..., K], got {allowed.dtype}; pass allowed != 0"
        )
    if allowed.shape[:-1] != tokens.shape or (is_mask and allowed.shape[-1] != len(weight)):
        last = len(weight) if is_mask else "K"
        raise ArgumentError(
            f"{op}: allowed must be {[*tokens.shape, last]}, got {list(allowed.shape)}; "
            "pass one row of classes per token"
        )
    flat = allowed.reshape(math.prod(tokens.shape), allowed.shape[-1])
    return flat if is_mask else flat.long()
