"""Validation shared by the ops: each check takes the op's name and states argument, expected, got and remedy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastrl.errors import ArgumentError, ArgumentTypeError

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def is_tensor(op: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(
            f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}; wrap it with torch.as_tensor"
        )


def floating(op: str, name: str, value: Tensor) -> None:
    """``value`` is a tensor of a supported floating dtype."""
    is_tensor(op, name, value)
    if value.dtype not in FLOAT_DTYPES:
        raise ArgumentError(
            f"{op}: {name} must be float32, bfloat16, float16 or float64, got {value.dtype}; "
            f"convert it, for example {name}.float()"
        )


def same_shape(op: str, name: str, value: Tensor, expected: Sequence[int], like: str) -> None:
    if value.shape != torch.Size(expected):
        raise ArgumentError(
            f"{op}: {name} must have the shape of {like}, {list(expected)}, got {list(value.shape)}"
        )


def same_device(op: str, name: str, value: Tensor, device: torch.device, like: str) -> None:
    if value.device != device:
        raise ArgumentError(
            f"{op}: {name} must be on the device of {like}, {device}, got {value.device}; "
            f"move it with {name}.to({str(device)!r})"
        )


def like(op: str, name: str, value: Tensor, other: Tensor, other_name: str) -> None:
    """``value`` is a floating tensor with the shape and device of ``other``."""
    if (
        isinstance(value, Tensor)
        and value.dtype in FLOAT_DTYPES
        and value.shape == other.shape
        and value.device == other.device
    ):
        return  # the usual case in one look: a call on a few elements must stay cheap
    floating(op, name, value)
    same_shape(op, name, value, other.shape, other_name)
    same_device(op, name, value, other.device, other_name)


def mask(op: str, value: Tensor | None, other: Tensor, other_name: str, name: str = "mask") -> None:
    """``value`` is None or a bool, integer or float tensor shaped like ``other``; non-zero means valid."""
    if value is None:
        return
    is_tensor(op, name, value)
    if value.dtype.is_complex:
        raise ArgumentError(
            f"{op}: {name} must be bool, integer or floating, got {value.dtype}; pass {name} != 0"
        )
    same_shape(op, name, value, other.shape, other_name)
    same_device(op, name, value, other.device, other_name)


def option(op: str, name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ArgumentError(
            f"{op}: {name} must be one of {', '.join(map(repr, allowed))}, got {value!r}"
        )


def number(
    op: str, name: str, value: float, low: float = -math.inf, high: float = math.inf
) -> float:
    """``value`` is a finite number within [low, high], returned as a float."""
    if type(value) is float and low <= value <= high and value not in (math.inf, -math.inf):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(
            f"{op}: {name} must be a number, got {type(value).__name__}; pass float({name})"
        )
    if not low <= value <= high or value in (math.inf, -math.inf):
        raise ArgumentError(
            f"{op}: {name} must be a finite number in [{low:g}, {high:g}], got {value!r}"
        )
    return float(value)


def sequence_offsets(op: str, value: Tensor, num_tokens: int, device: torch.device) -> None:
    """``cu_seqlens`` is int32 or int64 ``[B+1]``, starts at 0, never decreases and ends at ``num_tokens``.

    The values are looked at only where that needs no device synchronisation: on CPU and outside a trace.
    """
    is_tensor(op, "cu_seqlens", value)
    if value.dtype not in (torch.int32, torch.int64) or value.dim() != 1 or value.numel() == 0:
        raise ArgumentError(
            f"{op}: cu_seqlens must be int32 or int64 [B+1] with at least one element, "
            f"got {value.dtype} {list(value.shape)}; pass the cumulative lengths with a leading 0"
        )
    same_device(op, "cu_seqlens", value, device, "the tokens")
    if torch.compiler.is_compiling() or value.device.type != "cpu":
        return
    offsets = value.tolist()
    if offsets[0] != 0 or offsets[-1] != num_tokens:
        raise ArgumentError(
            f"{op}: cu_seqlens must start at 0 and end at the number of tokens, {num_tokens}, "
            f"got {offsets[0]} and {offsets[-1]}; cut or pad the packed tensors to cu_seqlens[-1]"
        )
    if any(b < a for a, b in zip(offsets, offsets[1:])):
        raise ArgumentError(
            f"{op}: cu_seqlens must not decrease, got {offsets[:8]}{'...' if len(offsets) > 8 else ''}; "
            "pass cumulative lengths, not lengths"
        )


def per_row(op: str, name: str, value: Tensor, rows: int, like: Tensor) -> Tensor:
    """``value`` is a floating tensor with one element per row."""
    floating(op, name, value)
    same_shape(op, name, value, (rows,), "one value per row")
    same_device(op, name, value, like.device, "the tokens")
    return value


HOLES = ("carry", "zero_step", "ignore")
FILLS = ("zero", "carry")


def scan_layout(
    op: str,
    x: Tensor,
    mask_: Tensor | None,
    bootstrap: Tensor | None,
    dones: Tensor | None,
    cu_seqlens: Tensor | None,
    holes: str,
    fill: str,
    time_dim: int,
    name: str = "rewards",
) -> int:
    """Check what the scans along time share and return the number of rows."""
    floating(op, name, x)
    rows = num_rows(op, name, x, cu_seqlens, time_dim)
    if mask_ is not None:
        mask(op, mask_, x, name)
    if dones is not None:
        mask(op, dones, x, name, "dones")
    if bootstrap is not None:
        per_row(op, "bootstrap", bootstrap, rows, x)
    if holes not in HOLES:
        option(op, "holes", holes, HOLES)
    if fill not in FILLS:
        option(op, "fill", fill, FILLS)
    return rows


def num_rows(op: str, name: str, x: Tensor, cu_seqlens: Tensor | None, time_dim: int = -1) -> int:
    """Rows of ``[B, T]``, of time-first ``[T, B]``, or of packed ``[N]`` with ``cu_seqlens``."""
    if cu_seqlens is not None:
        if x.dim() != 1:
            raise ArgumentError(
                f"{op}: with cu_seqlens {name} must be packed [N], got {list(x.shape)}; "
                "drop cu_seqlens for padded rows"
            )
        sequence_offsets(op, cu_seqlens, x.shape[0], x.device)
        return cu_seqlens.shape[0] - 1
    if x.dim() != 2:
        raise ArgumentError(
            f"{op}: {name} must be [B, T], or [N] with cu_seqlens, got {list(x.shape)}; "
            f"for one sequence pass {name}.unsqueeze(0)"
        )
    if time_dim not in (-1, 0, 1):
        raise ArgumentError(f"{op}: time_dim must be -1, 0 or 1, got {time_dim!r}")
    return x.shape[1] if time_dim == 0 else x.shape[0]
