"""``fastrl.discounted_returns``: reward-to-go over padded or packed rows with holes."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl import _backends, _checks, _library
from fastrl.ops.discounted_returns import op
from fastrl.ops.discounted_returns.reference import discounted_returns_reference
from fastrl.ops.gae.op import HOLES


def discounted_returns(
    rewards: Tensor,
    mask: Tensor | None = None,
    *,
    gamma: float,
    bootstrap: Tensor | None = None,
    dones: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    holes: str = "carry",
    fill: str = "zero",
    time_dim: int = -1,
    impl: str = "auto",
) -> Tensor:
    r"""Discounted sums of the rewards from each token on.

    Backwards in time, ``G_t = r_t + gamma * G_{t+1}``, with ``G = bootstrap`` past the last step. It is ``gae`` with
    V = 0 and lambda = 1, without reading values: REINFORCE++, reward-to-go, and process rewards summed from later steps.

    Args:
        rewards: ``[B, T]``, or packed ``[N]`` with ``cu_seqlens``; float32, bfloat16, float16 or float64, any strides.
        mask: like ``rewards``, bool, integer or float; non-zero is valid. None: every token is valid.
        gamma: discount in [0, 1].
        bootstrap: ``[B]``, return after the last token of a row that was cut off; None: 0.
        dones: like ``mask``; non-zero at the last token of an episode, behind which another one starts in the row.
        cu_seqlens: int32 or int64 ``[B+1]``: where each packed row starts, and the end.
        holes: ``"carry"``: a masked token is no step (verl's REINFORCE++); ``"zero_step"``: a step without reward
            (OpenRLHF); ``"ignore"``: a step like any other, the mask only blanks the results.
        fill: masked results are 0 (``"zero"``) or the running sum of the steps after them (``"carry"``), as constants.
        time_dim: -1 or 1 for ``[B, T]``, 0 for time first ``[T, B]``.
        impl: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"triton"`` or ``"reference"``.

    Returns:
        Tensor shaped like ``rewards``, float32 (float64 for float64 input). Masked rewards influence nothing, NaN
        included, unless ``holes="ignore"``.

    Raises:
        ValueError, TypeError: a shape, dtype, device or option does not fit; the message names the remedy.

    Differentiable once in rewards and bootstrap. Deterministic like ``gae``. Moves 9 bytes a token for float32 with a
    byte mask.

    Source: Sutton and Barto, Reinforcement Learning (2018), 3.3; verl 0.9.1 ``compute_reinforce_plus_plus_...``.

    >>> fastrl.discounted_returns(torch.tensor([[0.0, 0.0, 1.0]]), gamma=0.5)
    tensor([[0.2500, 0.5000, 1.0000]])
    """
    _checks.scan_layout(
        *("discounted_returns", rewards, mask, bootstrap, dones, cu_seqlens, holes, fill, time_dim)
    )
    gamma = _checks.number("discounted_returns", "gamma", gamma, 0.0, 1.0)
    if bootstrap is not None:
        bootstrap = bootstrap.to(_library.result_dtype(rewards.dtype))
    implementation = _backends.resolve("discounted_returns", impl, rewards.device)
    time_first = time_dim == 0 and cu_seqlens is None
    if time_first:
        rewards = rewards.T
        mask = None if mask is None else mask.T
        dones = None if dones is None else dones.T
    if implementation == "reference":
        result = discounted_returns_reference(
            *(rewards, mask, dones, bootstrap, cu_seqlens, gamma, holes, fill)
        )
    else:
        code, carries = HOLES[holes], fill == "carry"
        if torch.is_grad_enabled() and (
            rewards.requires_grad or (bootstrap is not None and bootstrap.requires_grad)
        ):
            result = op.DiscountedReturnsFunction.apply(
                *(rewards, bootstrap, mask, dones, cu_seqlens, gamma, code, carries, implementation)
            )
        else:
            result = op.discounted_returns_op[implementation](
                rewards, mask, dones, bootstrap, cu_seqlens, gamma, code, carries
            )
    return result.T if time_first else result
