"""``fastrl.group_advantages``: rewards compared within the group of samples that answer one prompt."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from fastrl import _backends, _checks
from fastrl.errors import ArgumentError
from fastrl.ops.group_advantages import op
from fastrl.ops.group_advantages.reference import group_advantages_reference, members_of
from fastrl.ops.group_ids import group_ids

SINGLETONS = ("zero", "raw", "error")

_OP = "group_advantages"


def group_advantages(
    rewards: Tensor,
    groups: Tensor | Sequence[Hashable],
    *,
    baseline: str = "mean",
    scale: str = "std",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: str = "zero",
    valid: Tensor | None = None,
    weights: Tensor | Sequence[float] | None = None,
    mask: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    r"""Advantage of each sample over the others of its group.

    With the scores s of the n scored members of a group, mean m::

        A_i = (s_i - b_i) / d

        baseline   "mean"             b = m
                   "leave_one_out"    b_i = mean of the other members = (n m - s_i) / (n - 1)
                   "length_weighted"  b = sum(len_j s_j) / sum(len_j), len = valid tokens in the mask
                   "none"             b = 0
        scale      "std"              d = std + eps, std^2 = sum((s_j - m)^2) / (n - ddof)
                   "batch_std"        d = std + eps over every scored sample of the batch, about the batch's mean
                   "mean"             d = m + eps (MaxRL; for rewards that are not negative)
                   "none"             d = 1

    Equal scores give exactly 0, whatever their rounding and eps: with any baseline but ``"none"``, and with a std that
    they alone determine. A group of one gives what ``singleton`` says. Members are counted after removing the samples
    that are not scored.

    Args:
        rewards: one score per sample ``[N]``; or ``[N, K]`` with ``weights``, K objectives, each normalised in the group,
            then summed by weight (GDPO); or without ``weights`` token rewards ``[N, T]``, whose score is their sum over
            the valid tokens (every token without ``mask``). float32, bfloat16, float16 or float64, any strides. NaN:
            not scored (that objective of that sample); it joins no statistics and gets 0. A sum of token rewards that is
            NaN is not scored either. Infinity is a score: it shows in the results of its group.
        groups: ``[N]`` integers of any range and order that are equal within a group, or N hashable labels such as
            uuid strings (see :func:`fastrl.group_ids`).
        baseline, scale: see above.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        eps: added to the standard deviation or the mean, not to the variance.
        singleton: what a group of one gets: ``"zero"``; ``"raw"``: b = 0 and std or mean 1, so s / (1 + eps), and s with
            scale ``"none"`` (verl's grpo and rloo); ``"error"``: raise (looks at the values: waits for a GPU, and cannot
            be compiled).
        valid: ``[N]`` bool, integer or float; zero: the sample joins no statistics and gets 0. A sample without valid
            tokens still counts, as in verl, unless this says otherwise.
        weights: ``[K]``, one per objective.
        mask: ``[N, T]`` bool, integer or float, non-zero is valid; asks for one advantage per token.
        impl: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"triton"`` or ``"reference"``.

    Returns:
        ``[N]``, or with ``mask`` ``[N, T]``: the sample's advantage at valid tokens, exactly 0 at masked ones. float32
        (float64 for float64 rewards), computed in float64 with a centred variance. Constants: no gradient flows to the
        rewards.

    Raises:
        ValueError, TypeError: a shape, dtype, device or option does not fit; the message names the remedy.

    Deterministic: sums run in the order of the samples, so the same bits from run to run, for any number of threads, and
    for a group alone or among others (but for ``"batch_std"``). Moves 5 bytes a token with a byte mask.

    Source: GRPO (Shao et al. 2024) with verl 0.9.1's conventions, except that verl gives a group of one its raw score and
    equal scores their rounding error; RLOO (Ahmadian et al. 2024), Dr. GRPO (scale none), OPO (length_weighted), GDPO,
    MaxRL.

    >>> rewards = torch.tensor([0.9, 0.7, 0.2, 0.5, 1.0])
    >>> fastrl.group_advantages(rewards, ["a", "a", "a", "a", "b"])
    tensor([ 1.0884,  0.4186, -1.2558, -0.2512,  0.0000])
    >>> fastrl.group_advantages(rewards[:2], ["a", "a"], scale="none", mask=torch.tensor([[1, 1], [1, 0]]))
    tensor([[ 0.1000,  0.1000],
            [-0.1000,  0.0000]])
    """
    _checks.floating(_OP, "rewards", rewards)
    if baseline not in op.BASELINES:
        _checks.option(_OP, "baseline", baseline, tuple(op.BASELINES))
    if scale not in op.SCALES:
        _checks.option(_OP, "scale", scale, tuple(op.SCALES))
    if ddof not in (0, 1):
        raise ArgumentError(
            f"{_OP}: ddof must be 0 (population) or 1 (sample), got {ddof!r}; pass one of them"
        )
    if singleton not in SINGLETONS:
        _checks.option(_OP, "singleton", singleton, SINGLETONS)
    eps = _checks.number(_OP, "eps", eps, 0.0)
    implementation = _backends.resolve(_OP, impl, rewards.device)

    rewards = rewards.detach()
    weights = _checked_weights(rewards, weights)
    num_samples = rewards.shape[0]
    groups = _checked_groups(groups, rewards)
    if valid is not None:
        _checks.mask(_OP, valid, groups, "groups", "valid")
    _check_mask(mask, rewards, weights, baseline)
    if singleton == "error" and num_samples:
        _refuse_singletons(rewards, groups, valid, weights, mask)

    inputs = (rewards, groups, valid, weights, mask)
    if implementation == "reference":
        return group_advantages_reference(*inputs, baseline, scale, ddof, eps, singleton)
    numbers = (op.BASELINES[baseline], op.SCALES[scale], ddof, eps, singleton == "raw")
    advantages: Tensor = op.group_advantages_op[implementation](*inputs, *numbers)
    return advantages


def _checked_weights(rewards: Tensor, weights: Tensor | Sequence[float] | None) -> Tensor | None:
    if rewards.dim() not in (1, 2):
        raise ArgumentError(
            f"{_OP}: rewards must be [N], or [N, K] with weights, or token rewards [N, T], got {list(rewards.shape)}"
        )
    if weights is None:
        return None
    if not isinstance(weights, Tensor):
        weights = [_checks.number(_OP, f"weights[{k}]", w) for k, w in enumerate(weights)]
        weights = torch.tensor(weights, dtype=torch.float64, device=rewards.device)
    if rewards.dim() != 2 or weights.shape != rewards.shape[1:]:
        raise ArgumentError(
            f"{_OP}: with weights [K] rewards must be [N, K], got weights {list(weights.shape)} and rewards "
            f"{list(rewards.shape)}; give one weight per column, or drop weights for token rewards"
        )
    return weights.detach().to(rewards.device, torch.float64)


def _checked_groups(groups: Tensor | Sequence[Hashable], rewards: Tensor) -> Tensor:
    """int64 ``[N]`` on the device of the rewards."""
    if not isinstance(groups, Tensor):
        groups = group_ids(groups).to(rewards.device)
    if groups.is_floating_point() or groups.is_complex():
        raise ArgumentError(
            f"{_OP}: groups must be integers or a sequence of labels, got a tensor of {groups.dtype}; "
            "pass fastrl.group_ids(groups)"
        )
    _checks.same_shape(_OP, "groups", groups, rewards.shape[:1], "one group per sample")
    _checks.same_device(_OP, "groups", groups, rewards.device, "rewards")
    return groups.to(torch.int64)


def _check_mask(
    mask: Tensor | None, rewards: Tensor, weights: Tensor | None, baseline: str
) -> None:
    if mask is None:
        if baseline == "length_weighted":
            raise ArgumentError(
                f'{_OP}: baseline="length_weighted" needs mask [N, T] for the lengths, got None; '
                'pass the mask of the response tokens, or use baseline="mean"'
            )
        return
    _checks.is_tensor(_OP, "mask", mask)
    if rewards.dim() == 2 and weights is None:
        _checks.mask(_OP, mask, rewards, "the token rewards")
        return
    if mask.dim() != 2 or mask.shape[0] != rewards.shape[0]:
        raise ArgumentError(
            f"{_OP}: mask must be [N, T] with N = {rewards.shape[0]}, got {list(mask.shape)}; "
            "pass one row of tokens per sample (valid= takes one flag per sample)"
        )
    _checks.mask(_OP, mask, mask, "mask")
    _checks.same_device(_OP, "mask", mask, rewards.device, "rewards")


def _refuse_singletons(
    rewards: Tensor,
    groups: Tensor,
    valid: Tensor | None,
    weights: Tensor | None,
    mask: Tensor | None,
) -> None:
    members = members_of(rewards, groups, valid, weights, mask)
    alone = ((members.size == 1) & members.is_scored).any(1).nonzero()
    if alone.numel():
        index = int(alone[0])
        raise ArgumentError(
            f'{_OP}: with singleton="error" each group must have two scored members or more, got one in the group of '
            f'sample {index}; sample more answers, or choose singleton="zero" or "raw"'
        )
