"""``fastrl.whiten``: zero mean and unit variance over the valid elements, across ranks if asked."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fastrl import _backends, _checks
from fastrl.errors import ArgumentError
from fastrl.ops.whiten import op
from fastrl.ops.whiten.merge import gathered_moments
from fastrl.ops.whiten.reference import masked_moments_reference, whiten_apply_reference


def whiten(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    ddof: int = 1,
    eps: float = 1e-8,
    eps_mode: str = "rsqrt_add",
    shift_mean: bool = True,
    process_group: dist.ProcessGroup | None = None,
    impl: str = "auto",
) -> Tensor:
    r"""Shift and scale to zero mean and unit variance over the valid elements.

    With their number N, mean m and variance v = sum((x_j - m)^2) / (N - ddof)::

        y = (x - m) * f   at valid elements, 0 at masked ones

        eps_mode  "rsqrt_add"  f = 1 / sqrt(v + eps)         (verl, SkyRL, ROLL, slime)
                  "rsqrt_max"  f = 1 / sqrt(max(v, eps))     (OpenRLHF, NeMo-RL REINFORCE++)
                  "std_add"    f = 1 / (sqrt(v) + eps)       (AReaL, TRL)

    No valid element gives zeros. Where v does not exist (N <= ddof) or is exactly 0, f is 1: one element gives 0, and so
    do equal ones, exactly.

    Args:
        x: any shape; float32, bfloat16, float16 or float64, any strides.
        mask: like ``x``, bool, integer or float; non-zero is valid. None: every element is valid.
        ddof: 1 for the sample variance, 0 for the population's.
        eps: see above.
        eps_mode: see above.
        shift_mean: False adds m again after scaling, (x - m) f + m, as verl and TRL do; it is not x f.
        process_group: merge the statistics over its ranks (``torch.distributed.group.WORLD`` for all of them); every
            rank must call, with any number of elements, none included. None: this process alone.
        impl: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"triton"`` or ``"reference"``.

    Returns:
        Shaped like ``x``, float32 (float64 for float64 input). Masked elements influence nothing, NaN included; a valid
        NaN or infinity makes every valid element NaN.

    Raises:
        ValueError, TypeError: a shape, dtype, device or option does not fit; the message names the remedy. ``x`` that
            requires grad is refused: whitened advantages are constants.

    Deterministic: the same bits from run to run and for any number of threads; the ranks of a group compute with identical
    statistics. The sums run in float64 over fixed chunks of the elements in row-major order, so layouts of the same shape
    agree in every bit, and other paddings of the same elements to float64 rounding. Moves 14 bytes an element for float32
    with a byte mask: ``x`` and ``mask`` twice, the result once.

    Source: ``masked_whiten`` of verl 0.9.1, which divides by N + 1e-8 and raises for N < 2; ranks merge by the pairwise
    update of Chan, Golub and LeVeque (1983).

    >>> fastrl.whiten(torch.tensor([1.0, 2.0, 3.0, float("nan")]), torch.tensor([1, 1, 1, 0]))
    tensor([-1.,  0.,  1.,  0.])
    """
    _checks.floating("whiten", "x", x)
    if mask is not None:
        _checks.mask("whiten", mask, x, "x")
    if ddof not in (0, 1):
        raise ArgumentError(
            f"whiten: ddof must be 0 (population) or 1 (sample), got {ddof!r}; pass one of them"
        )
    eps = _checks.number("whiten", "eps", eps, 0.0)
    if eps_mode not in op.EPS_MODES:
        _checks.option("whiten", "eps_mode", eps_mode, tuple(op.EPS_MODES))
    if x.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            "whiten: x must not require grad, because the result is a constant without a gradient; "
            "pass x.detach() or call under torch.no_grad()"
        )
    implementation = _backends.resolve("whiten_apply", impl, x.device)
    if implementation == "reference":
        moments = masked_moments_reference(x, mask)
    else:
        moments = op.masked_moments_op[implementation](x, mask)
    if process_group is not None:
        moments = gathered_moments(moments, process_group)
    if implementation == "reference":
        return whiten_apply_reference(x, mask, moments, ddof, eps, eps_mode, shift_mean)
    whitened: Tensor = op.whiten_apply_op[implementation](
        x, mask, moments, ddof, eps, op.EPS_MODES[eps_mode], shift_mean
    )
    return whitened
