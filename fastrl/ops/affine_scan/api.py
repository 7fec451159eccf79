"""``fastrl.affine_scan``: the first-order linear recurrence that returns and advantages are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl import _backends, _checks, _library
from fastrl.errors import ArgumentError
from fastrl.ops.affine_scan import op
from fastrl.ops.affine_scan.reference import affine_scan_reference


def affine_scan(
    a: Tensor,
    b: Tensor,
    *,
    reverse: bool = True,
    initial: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    time_dim: int = -1,
    impl: str = "auto",
) -> Tensor:
    r"""The solution of ``x_t = a_t x_{t+1} + b_t`` along time.

    ``reverse=True`` runs from the last step to the first, ``x_{T+1} = initial``; ``reverse=False`` is
    ``x_t = a_t x_{t-1} + b_t`` with ``x_0 = initial``. V-trace, TD(lambda) and eligibility traces are short compositions
    of it. A step with ``a = 1, b = 0`` is transparent, one with ``a = 0`` forgets everything before it.

    Args:
        a: ``[B, T]``, or packed ``[N]`` with ``cu_seqlens``; float32, bfloat16, float16 or float64, any strides.
        b: like ``a``; its dtype may differ, except that float64 goes with float64.
        reverse: right to left (True) or left to right.
        initial: ``[B]``, what comes in at the starting end; None: 0.
        cu_seqlens: int32 or int64 ``[B+1]``: where each packed row starts, and the end.
        time_dim: -1 or 1 for ``[B, T]``, 0 for time first ``[T, B]``.
        impl: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"triton"`` or ``"reference"``.

    Returns:
        ``x`` shaped like ``a``, float32 (float64 for float64 input). There is no mask: every element is a step.

    Raises:
        ValueError, TypeError: a shape, dtype or device does not fit; the message names the remedy.

    Differentiable once in a, b and initial; the adjoint is the scan in the other direction. Deterministic: the same bits
    from run to run, for any number of threads, and for the same row alone, in a batch or packed. Moves 12 bytes a step
    for float32.

    Source: Blelloch, Prefix Sums and Their Applications (1990).

    >>> a = torch.full((1, 3), 0.5)
    >>> fastrl.affine_scan(a, torch.ones(1, 3))
    tensor([[1.7500, 1.5000, 1.0000]])
    """
    _checks.floating("affine_scan", "a", a)
    rows = _checks.num_rows("affine_scan", "a", a, cu_seqlens, time_dim)
    _checks.like("affine_scan", "b", b, a, "a")
    if (a.dtype == torch.float64) != (b.dtype == torch.float64):
        raise ArgumentError(
            f"affine_scan: a and b must both be float64 or neither, got {a.dtype} and {b.dtype}; "
            "convert one of them"
        )
    if initial is not None:
        _checks.per_row("affine_scan", "initial", initial, rows, a)
        initial = initial.to(_library.result_dtype(a.dtype))
    implementation = _backends.resolve("affine_scan", impl, a.device)
    time_first = time_dim == 0 and cu_seqlens is None
    if time_first:
        a, b = a.T, b.T
    if implementation == "reference":
        x = affine_scan_reference(a, b, initial, cu_seqlens, reverse)
    elif torch.is_grad_enabled() and (
        a.requires_grad or b.requires_grad or (initial is not None and initial.requires_grad)
    ):
        x = op.AffineScanFunction.apply(a, b, initial, cu_seqlens, reverse, implementation)
    else:
        x = op.affine_scan_op[implementation](a, b, initial, cu_seqlens, reverse)
    return x.T if time_first else x
