"""The definition of masked whitening in plain torch and float64, without a branch on the data."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl._library import result_dtype


def masked_moments_reference(x: Tensor, mask: Tensor | None) -> Tensor:
    """float64 ``[3]``: count, mean and sum of squared deviations of the valid elements; zeros when there are none."""
    if x.numel() == 0:
        return x.new_zeros(3, dtype=torch.float64)
    values = x.reshape(-1).double()
    is_valid = torch.ones_like(values, dtype=torch.bool) if mask is None else mask.reshape(-1) != 0
    # Measured from a valid element, equal values have a mean and deviations without any rounding.
    origin = torch.where(is_valid, values, 0.0).gather(0, is_valid.int().argmax(0, keepdim=True))
    offsets = torch.where(is_valid, values - origin, 0.0)
    count = is_valid.sum(0, keepdim=True).double()
    shift = offsets.sum(0, keepdim=True) / count.clamp(min=1)
    deviations = torch.where(is_valid, offsets - shift, 0.0)
    return torch.cat([count, origin + shift, deviations.square().sum(0, keepdim=True)])


def whiten_apply_reference(
    x: Tensor,
    mask: Tensor | None,
    moments: Tensor,
    ddof: int,
    eps: float,
    eps_mode: str,
    shift_mean: bool,
) -> Tensor:
    """``x`` whitened by the given count, mean and sum of squared deviations; 0 where masked."""
    count, mean, m2 = moments.unbind()
    variance = m2 / (count - ddof).clamp(min=1)
    if eps_mode == "rsqrt_add":
        factor = (variance + eps).rsqrt()
    elif eps_mode == "rsqrt_max":
        factor = variance.clamp(min=eps).rsqrt()
    else:
        factor = 1 / (variance.sqrt() + eps)
    # Without a variance, or with none to speak of, there is nothing to divide by: the values are only centred.
    factor = torch.where((count <= ddof) | (m2 == 0), 1.0, factor)
    out = (x.double() - mean) * factor
    if not shift_mean:
        out = out + mean
    if mask is not None:
        out = torch.where(mask != 0, out, 0.0)
    return out.to(result_dtype(x.dtype))
