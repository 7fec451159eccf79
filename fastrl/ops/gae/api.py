"""``fastrl.gae``: generalised advantage estimation over padded or packed rows with holes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import _backends, _checks, _library
from fastrl.errors import ArgumentError
from fastrl.ops.gae import op
from fastrl.ops.gae.reference import gae_reference


class GAE(NamedTuple):
    """Both have the shape of the rewards."""

    advantages: Tensor
    returns: Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    *,
    gamma: float,
    lam: float | Tensor,
    returns_lam: float | None = None,
    bootstrap: Tensor | None = None,
    dones: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    holes: str = "carry",
    fill: str = "zero",
    time_dim: int = -1,
    out: Sequence[Tensor] | None = None,
    impl: str = "auto",
) -> GAE:
    r"""Generalised advantage estimates and the returns that a critic learns from.

    Backwards in time, over the steps of each row::

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}
        R_t     = A_t + V_t                        (with its own A when returns_lam is given)

    ``V_t`` is the value of the state *before* token t and ``r_t`` the reward of choosing it, as trainers of language
    models count; the PPO paper indexes rewards one later. Past the last step ``V`` is ``bootstrap`` and ``A`` is 0.
    Nothing is whitened, clipped or detached.

    Args:
        rewards: ``[B, T]``, or packed ``[N]`` with ``cu_seqlens``; float32, bfloat16, float16 or float64, any strides.
        values: like ``rewards``; its dtype may differ, except that float64 goes with float64.
        mask: like ``rewards``, bool, integer or float; non-zero is valid. None: every token is valid.
        gamma: discount in [0, 1].
        lam: lambda in [0, 1], or one per row as a tensor ``[B]``.
        returns_lam: lambda of the returns alone (decoupled GAE, VC-PPO and VAPO); None: ``lam``.
        bootstrap: ``[B]``, value of the state after the last token of a row that was cut off; None: 0.
        dones: like ``mask``; non-zero at the last token of an episode, behind which another one starts in the row.
        cu_seqlens: int32 or int64 ``[B+1]``, where each packed row starts, and the end.
        holes: what a masked token is. ``"carry"``: no step at all, the recursion jumps over it (verl, AReaL, NeMo-RL);
            ``"zero_step"``: a step with r = V = 0 (OpenRLHF); ``"ignore"``: a step like any other, the mask only
            blanks the results (SkyRL, slime, ROLL).
        fill: what masked results hold: ``"zero"``, or ``"carry"``: the running A, and running A + V_t in the returns
            (what verl leaves there). Either way they are constants: no gradient flows through them.
        time_dim: -1 or 1 for ``[B, T]``, 0 for time first ``[T, B]``.
        out: two contiguous tensors in the results' dtype to write to instead of allocating (no gradients then).
        impl: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"triton"`` or ``"reference"``.

    Returns:
        ``GAE(advantages, returns)`` shaped like ``rewards``, float32 (float64 for float64 input). Masked positions of the
        inputs influence nothing, NaN included, unless ``holes="ignore"`` says they are steps.

    Raises:
        ValueError, TypeError: a shape, dtype, device or option does not fit; the message names the remedy.

    Differentiable once in rewards, values and bootstrap; the adjoint is a forward scan over the same steps.
    Deterministic: the same bits from run to run, for any number of threads, and for the same row alone, in a batch,
    padded on either side or packed. Moves each input and output once: 17 bytes a token for float32 with a byte mask.

    Source: Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage Estimation (2016); holes as
    in verl 0.9.1 ``compute_gae_advantage_return`` before its whitening.

    >>> rewards = torch.tensor([[0.0, 9.0, 1.0]])
    >>> values = torch.tensor([[0.5, 9.0, 0.25]])
    >>> mask = torch.tensor([[1, 0, 1]])  # the middle token came from a tool
    >>> fastrl.gae(rewards, values, mask, gamma=1.0, lam=0.5).advantages
    tensor([[0.1250, 0.0000, 0.7500]])
    """
    rows = _checks.scan_layout(
        "gae", rewards, mask, bootstrap, dones, cu_seqlens, holes, fill, time_dim
    )
    _checks.like("gae", "values", values, rewards, "rewards")
    implementation = _backends.resolve("gae", impl, rewards.device)
    if (rewards.dtype == torch.float64) != (values.dtype == torch.float64):
        raise ArgumentError(
            f"gae: rewards and values must both be float64 or neither, got {rewards.dtype} and {values.dtype}; "
            "convert one of them"
        )
    gamma = _checks.number("gae", "gamma", gamma, 0.0, 1.0)
    lam_rows = None
    if isinstance(lam, Tensor):
        lam_rows, lam = _checks.per_row("gae", "lam", lam, rows, rewards), 1.0
    else:
        lam = _checks.number("gae", "lam", lam, 0.0, 1.0)
    if returns_lam is not None:
        returns_lam = _checks.number("gae", "returns_lam", returns_lam, 0.0, 1.0)
    time_first = time_dim == 0 and cu_seqlens is None
    if time_first:
        rewards, values = rewards.T, values.T
        mask = None if mask is None else mask.T
        dones = None if dones is None else dones.T
    dtype = _library.result_dtype(rewards.dtype)
    bootstrap = None if bootstrap is None else bootstrap.to(dtype)
    lam_rows = None if lam_rows is None else lam_rows.to(dtype)

    arguments = (rewards, values, mask, dones, bootstrap)
    needs_grad = torch.is_grad_enabled() and (
        rewards.requires_grad
        or values.requires_grad
        or (bootstrap is not None and bootstrap.requires_grad)
    )
    if out is not None:
        _check_out(out, rewards, dtype, time_first, needs_grad)
    if implementation == "reference":
        step_lam: float | Tensor = lam if lam_rows is None else lam_rows
        step_returns_lam = step_lam if returns_lam is None else returns_lam
        advantages, returns = gae_reference(
            *(*arguments, step_lam, step_returns_lam, cu_seqlens, gamma, holes, fill)
        )
        if out is not None:
            for target, result in zip(out, (advantages, returns)):
                target.copy_(result)
            return GAE(*out)
    else:
        second = op.SAME_LAMBDA if returns_lam is None else returns_lam
        numbers = (gamma, lam, second, op.HOLES[holes])
        carries = fill == "carry"
        if out is not None:
            op.gae_out_op[implementation](*arguments, lam_rows, cu_seqlens, *numbers, carries, *out)
            return GAE(*out)
        if needs_grad:
            options = op.Options(mask, dones, lam_rows, cu_seqlens, *numbers)
            advantages, returns = op.GAEFunction.apply(
                *(rewards, values, bootstrap, options, carries, implementation)
            )
        else:
            advantages, returns = op.gae_op[implementation](
                *arguments, lam_rows, cu_seqlens, *numbers, carries
            )
    return GAE(advantages.T, returns.T) if time_first else GAE(advantages, returns)


def _check_out(
    out: Sequence[Tensor], rewards: Tensor, dtype: torch.dtype, time_first: bool, needs_grad: bool
) -> None:
    if needs_grad:
        raise ArgumentError(
            "gae: out= cannot be differentiated through, and an input requires grad; "
            "drop out= or call under torch.no_grad()"
        )
    if time_first:
        raise ArgumentError("gae: out= needs [B, T] or packed tensors, got time_dim=0; drop out=")
    for name, target in zip(("out[0]", "out[1]"), out, strict=True):
        _checks.like("gae", name, target, rewards, "rewards")
        if target.dtype != dtype or not target.is_contiguous():
            raise ArgumentError(
                f"gae: {name} must be contiguous {dtype}, got {target.dtype} with strides "
                f"{list(target.stride())}; allocate it with torch.empty({list(rewards.shape)}, dtype={dtype})"
            )
