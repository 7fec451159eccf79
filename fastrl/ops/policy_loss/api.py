"""``fastrl.policy_loss``: policy-gradient losses over padded or packed tokens with metrics, in one pass."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import _backends, _checks, _losses
from fastrl.errors import ArgumentError
from fastrl.ops.policy_loss import op
from fastrl.ops.policy_loss.op import POLICY_METRICS
from fastrl.ops.policy_loss.reference import Terms, policy_loss_reference


class PolicyLoss(NamedTuple):
    """``loss`` is 0-d and differentiable; ``metrics`` is float64, one element per name in ``POLICY_METRICS``."""

    loss: Tensor
    metrics: Tensor

    def named(self) -> dict[str, Tensor]:
        """The metrics by name, as 0-d views: nothing is copied from the device."""
        return dict(zip(POLICY_METRICS, self.metrics.unbind()))


class PolicyOptions(NamedTuple):
    """The keyword arguments that say which loss, as the caller gave them."""

    ratio: str
    surrogate: str
    clip_low: float
    clip_high: float
    dual_clip: float | None
    ratio_cap: float | None
    log_ratio_clamp: float | None
    kl: str | None
    kl_grad: str
    kl_coef: float
    kl_input_clamp: float | None
    kl_clamp: float | None
    entropy_coef: float
    agg: str
    denom: float | Tensor | None
    cu_seqlens: Tensor | None


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    ratio: str = "token",
    surrogate: str = "clip",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
    log_ratio_clamp: float | None = 20.0,
    is_weights: Tensor | None = None,
    ref_logp: Tensor | None = None,
    kl: str | None = None,
    kl_grad: str = "pathwise",
    kl_coef: float = 0.0,
    kl_input_clamp: float | None = 20.0,
    kl_clamp: float | None = 10.0,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    agg: str = "token_mean",
    denom: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> PolicyLoss:
    r"""Policy-gradient loss with KL and entropy terms, its metrics, and (through autograd) its gradient.

    Each term is summed over the valid tokens and divided as ``agg`` says::

        loss = agg(w * L) + kl_coef * agg(KL) - entropy_coef * agg(entropy)

    With d_t = logp_t - old_logp_t, C = ``log_ratio_clamp``, sg = no gradient::

        "token"           rho_t = exp(clamp(d_t, -C, C))
        "sequence"        rho_t = exp(clamp(g, -C, C)),  g = mean of d over the valid tokens of the row; its gradient
                          reaches every token of the row (TRL, NeMo-RL, OpenRLHF, AReaL)
        "sequence_token"  the same value, the gradient of rho_t = exp(sg(g) + logp_t - sg(logp_t)) (GSPO-token, verl)

    In the sequence ratios d is not clamped before the mean. A clamped ratio has no gradient. The surrogates::

        "clip"       L1 = -A min(rho, ratio_cap),  L2 = -A clip(rho, 1 - clip_low, 1 + clip_high),  L = max(L1, L2);
                     with dual_clip c: min(L, -A c) where A < 0
        "cispo"      L = -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A logp
        "reinforce"  L = -A logp                          (old_logp appears in the metrics only)

    KL to the reference policy, with x = logp - ref_logp and y = clamp(-x, +-``kl_input_clamp``)::

        "k1"  x        "k2"  x^2 / 2        "abs"  |x|        "k3"  clamp(exp(y) - y - 1, +-kl_clamp)

    Both KL clamps apply to k3 alone. At a tie or exactly at a bound the branch that depends on logp has the gradient:
    that of ``-A rho`` at the edges of the clip, 1 at the edge of a clamp; ``|x|`` has gradient 0 at 0.

    Args:
        logp: log-probabilities of the chosen tokens under the policy in training, ``[B, T]``, or packed ``[N]`` with
            ``cu_seqlens``; float32, bfloat16, float16 or float64, any strides.
        old_logp: the same under the policy that the ratio compares with. A constant, as all that follow but entropy.
        advantages: like ``logp``, or one per sequence as ``[B]``. A tensor that fits both shapes is per token.
        mask: like ``logp``, bool, integer or float; non-zero is valid. None: every token is valid.
        ratio, surrogate: see above.
        clip_low, clip_high: how far the ratio may fall below or rise above 1. TRL's absolute cap of cispo is
            ``clip_low=1, clip_high=cap - 1``.
        dual_clip: c > 1, the bound of the loss at negative advantages in multiples of ``-A``; None: no bound.
        ratio_cap: upper bound of the ratio in L1 alone (TRL's delta); None: no bound.
        log_ratio_clamp: C above, a number greater than 0; None: no clamp, and far off-policy tokens overflow.
        is_weights: w above, importance weights like ``advantages``, multiplied into the policy loss of each token.
        ref_logp: like ``logp``; required by ``kl`` and read by nothing else.
        kl: None, ``"k1"``, ``"k2"``, ``"k3"`` or ``"abs"``.
        kl_grad: ``"pathwise"``, the derivative of the estimator; ``"k2"``, the value of the estimator with the gradient
            of k2 (verl's ``+``); ``"ratio"``, KL * rho, rho without cap or clip and with its gradient (TRL's bias
            correction).
        kl_coef: factor of the KL term.
        kl_input_clamp, kl_clamp: bounds of k3, numbers greater than 0; None: no bound.
        entropy: like ``logp``, differentiable.
        entropy_coef: factor of the entropy term; positive rewards entropy.
        agg: with l the term, n the valid tokens of a row: ``"token_mean"`` sum(l) / tokens; ``"token_sum"`` sum(l);
            ``"seq_mean_token_sum"`` sum(l) / sequences; ``"seq_mean_token_mean"`` sum over rows of (sum(l) / n) /
            sequences; ``"seq_mean_token_sum_norm"`` sum(l) / (sequences * T), T the padded width.
        denom: replaces the divisor of ``agg`` (all but n), a number or a one-element tensor, greater than 0. None: the
            number of valid tokens or of sequences with one here; an empty batch divides by 1. With the count of the
            whole batch the losses of its micro-batches add up to the loss of the batch.
        cu_seqlens: int32 or int64 ``[B+1]``, where each packed row starts, and the end.
        impl: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"triton"`` or ``"reference"``.

    Returns:
        ``PolicyLoss(loss, metrics)``. The loss is float32, float64 for float64 logp; without a valid token it is 0 with
        zero gradients. Metrics are float64, detached and never synchronised: sums over valid tokens, except as noted.

        ================ ===========================================================================================
        tokens           valid tokens
        sequences        rows with at least one
        nonfinite        valid tokens with NaN or inf in any input that is used
        clip_high        A > 0 and rho > 1 + clip_high
        clip_low         A < 0 and rho < 1 - clip_low
        clipped          L2 > L1; for cispo: rho was clipped; for reinforce: 0
        dual_clip        A < 0 and max(L1, L2) > -A c
        approx_kl        -d, clamped where the ratio is per token
        approx_kl3       rho - 1 - log rho
        ref_kl           KL, not times rho
        entropy          entropy
        ratio_sum        rho; ratio_sq_sum: rho^2, so that the effective sample size is sum^2 / sq_sum
        ratio_min        smallest rho; ratio_max: largest; 1 without a valid token
        policy_term      agg(w * L); kl_term: agg(KL), times rho for ``kl_grad="ratio"``; entropy_term: agg(entropy)
        ================ ===========================================================================================

    Raises:
        ValueError, TypeError: a shape, dtype, device or option does not fit; the message names the remedy.

    Differentiable once, in logp and entropy. Masked positions influence nothing, NaN included, and their gradient is
    exactly 0. NaN at a valid token reaches the loss; an infinite log-ratio is clamped like any other and shows in
    ``nonfinite``. Deterministic: loss, metrics and gradients have the same bits from run to run, for any number of
    threads, and for rows padded on either side or packed. On CPU the forward pass writes the gradient, and backward only
    scales it; with per-token float32 input and a byte mask that moves 18 bytes a token, and 4 more for ``ref_logp``.

    Source: Schulman et al., Proximal Policy Optimization Algorithms (2017); dual clip: Ye et al. (2020); GSPO: Zheng et
    al. (2025); CISPO: MiniMax-M1 (2025); k1, k2, k3: Schulman, Approximating KL Divergence (2020).

    >>> logp = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    >>> old_logp = torch.tensor([[-1.0, -2.5, float("nan")]])
    >>> out = fastrl.policy_loss(logp, old_logp, torch.tensor([1.0]), torch.tensor([[1, 1, 0]]))
    >>> out.loss.detach()  # -(1 + 1.2) / 2: the second ratio, 1.65, is clipped
    tensor(-1.1000)
    >>> out.loss.backward()
    >>> logp.grad
    tensor([[-0.5000,  0.0000,  0.0000]])
    >>> int(out.named()["clip_high"])
    1
    """
    name = "policy_loss"
    options = PolicyOptions(
        ratio,
        surrogate,
        clip_low,
        clip_high,
        dual_clip,
        ratio_cap,
        log_ratio_clamp,
        kl,
        kl_grad,
        kl_coef,
        kl_input_clamp,
        kl_clamp,
        entropy_coef,
        agg,
        denom,
        cu_seqlens,
    )
    if kl is None:
        ref_logp = None
    terms, divisor, divisor_tensor = checked(
        name, logp, old_logp, advantages, mask, is_weights, ref_logp, entropy, options
    )
    implementation = _backends.resolve(name, impl, logp.device)
    if implementation == "reference":
        chosen = divisor_tensor if divisor_tensor is not None else divisor or None
        loss, metrics = policy_loss_reference(
            *(logp, old_logp, advantages, mask, is_weights, ref_logp, entropy, cu_seqlens),
            *(terms, agg, chosen),
        )
        return PolicyLoss(loss, metrics)
    others = (
        *(old_logp, advantages, mask, is_weights, ref_logp),
        *(cu_seqlens, divisor_tensor, divisor, op.numbers(terms), op.choices(terms, agg)),
    )
    if torch.is_grad_enabled() and (
        logp.requires_grad or (entropy is not None and entropy.requires_grad)
    ):
        return PolicyLoss(*op.PolicyLossFunction.apply(logp, entropy, others, implementation))
    return PolicyLoss(*op.call(implementation, logp, entropy, others, False, False)[:2])


def checked(
    name: str,
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    is_weights: Tensor | None,
    ref_logp: Tensor | None,
    entropy: Tensor | None,
    options: PolicyOptions,
) -> tuple[Terms, float, Tensor | None]:
    """Check everything; return the terms, and denom as a number (or "the default") and a tensor or None."""
    _checks.floating(name, "logp", logp)
    rows = _checks.num_rows(name, "logp", logp, options.cu_seqlens)
    _checks.mask(name, mask, logp, "logp")
    _like(name, logp, "old_logp", old_logp)
    _like(name, logp, "advantages", advantages, rows)
    if is_weights is not None:
        _like(name, logp, "is_weights", is_weights, rows)
    if entropy is not None:
        _like(name, logp, "entropy", entropy)
    _choices(name, options)
    if ref_logp is not None:
        _like(name, logp, "ref_logp", ref_logp)
    elif options.kl is not None:
        raise ArgumentError(
            f"{name}: ref_logp must be given for kl={options.kl!r}, got None; pass it, or kl=None"
        )
    number = _checks.number
    terms = Terms(
        options.ratio,
        options.surrogate,
        number(name, "clip_low", options.clip_low, 0.0),
        number(name, "clip_high", options.clip_high, 0.0),
        _bound(name, "dual_clip", options.dual_clip, 1.0),
        _bound(name, "ratio_cap", options.ratio_cap, 0.0),
        _bound(name, "log_ratio_clamp", options.log_ratio_clamp, 0.0),
        options.kl,
        options.kl_grad,
        number(name, "kl_coef", options.kl_coef),
        _bound(name, "kl_input_clamp", options.kl_input_clamp, 0.0),
        _bound(name, "kl_clamp", options.kl_clamp, 0.0),
        number(name, "entropy_coef", options.entropy_coef),
    )
    packed = options.cu_seqlens is not None
    return terms, *_losses.aggregation(name, options.agg, options.denom, packed, logp.device)


def _like(op: str, logp: Tensor, name: str, value: Tensor, rows: int | None = None) -> None:
    """``value`` is shaped like logp, or has one element per row when ``rows`` is given, and is float64 if logp is."""
    if (
        isinstance(value, Tensor)
        and value.dtype == logp.dtype
        and value.shape == logp.shape
        and value.device == logp.device
    ):
        return  # the usual case in one look: a call on a few elements must stay cheap
    _checks.floating(op, name, value)
    if value.shape != logp.shape and (rows is None or value.shape != (rows,)):
        per_row = "" if rows is None else f" or one element per sequence, [{rows}],"
        raise ArgumentError(
            f"{op}: {name} must have the shape of logp, {list(logp.shape)},{per_row} "
            f"got {list(value.shape)}"
        )
    _checks.same_device(op, name, value, logp.device, "logp")
    if (value.dtype == torch.float64) != (logp.dtype == torch.float64):
        raise ArgumentError(
            f"{op}: logp and {name} must both be float64 or neither, got {logp.dtype} and {value.dtype}; "
            "convert one of them"
        )


def _choices(name: str, options: PolicyOptions) -> None:
    for argument, value, allowed in (
        ("ratio", options.ratio, op.RATIOS),
        ("surrogate", options.surrogate, op.SURROGATES),
        ("kl_grad", options.kl_grad, op.KL_GRADS),
    ):
        if value not in allowed:
            _checks.option(name, argument, value, tuple(allowed))
    if options.kl is not None and options.kl not in op.KLS:
        _checks.option(name, "kl", options.kl, tuple(op.KLS))


def _bound(op: str, name: str, value: float | None, low: float) -> float:
    """A number greater than ``low``, infinity for None."""
    if value is None:
        return math.inf
    value = _checks.number(op, name, value)
    if value <= low:
        raise ArgumentError(
            f"{op}: {name} must be greater than {low:g} or None, got {value!r}; "
            "pass None for no bound"
        )
    return value
