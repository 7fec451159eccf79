"""``fastrl.token_logprobs``: log-probabilities of chosen tokens, and entropies, in one read of the logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import _backends, _checks
from fastrl._library import result_dtype
from fastrl.errors import ArgumentError
from fastrl.ops.token_logprobs import op
from fastrl.ops.token_logprobs.reference import token_logprobs_reference

# Sampling colder than this is greedy; further down 1 / temperature leaves the range of float32.
MIN_TEMPERATURE = 1e-6

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class LogProbs(NamedTuple):
    """Both have the shape of the tokens; ``entropy`` is None unless it was asked for."""

    logp: Tensor
    entropy: Tensor | None


def token_logprobs(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    impl: str = "auto",
) -> LogProbs:
    r"""Log-probability of each token under its row of logits, and the entropy of the row.

    With ``z = logits / temperature`` and ``p = softmax(z)`` over the last dimension::

        logp    = z[token] - log sum_v exp(z_v)
        entropy = -sum_v p_v log p_v                   (0 log 0 = 0)

    The softmax is never stored: each row is read once, and once more for the gradient.

    Args:
        logits: ``[..., V]``, float32, bfloat16, float16 or float64. A unit stride along V and rows at up to two strides,
            such as the slice ``logits[:, :-1]``, are read in place; other layouts are copied. ``-inf`` means impossible.
        tokens: ``[...]``, integers in ``[0, V)``. Positions that a loss ignores need some valid id too: their gradient
            is zero when their upstream gradient is. Tokens on a GPU are not checked: one out of range gives its row
            logp NaN, and a NaN gradient unless the upstream gradient of logp is zero.
        temperature: at least 1e-6, one number or a tensor shaped like ``tokens``; a constant to the gradient.
        entropy: compute the entropy as well.
        impl: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"triton"`` or ``"reference"``.

    Returns:
        ``LogProbs(logp, entropy)`` shaped like ``tokens``, float32 (float64 for float64 logits), whatever the dtype of
        the logits. A token whose logit is ``-inf`` has logp ``-inf``. A row with NaN or ``+inf``, or with nothing but
        ``-inf``, gives NaN and leaves the other rows alone.

    Raises:
        ValueError, TypeError: a shape, dtype, device or option does not fit, or, on CPU, a token is out of range; the
            message names the remedy.

    Differentiable once in the logits, through both results; the gradient has the dtype of the logits. A row whose
    upstream gradients are zero gets exact zeros. Deterministic: the same bits from run to run, for any number of
    threads, and for a row alone or in a batch. Reads the logits once forward; reads them and writes the gradient
    backward; keeps three numbers a row.

    Source: online softmax, Milakov and Gimelshein, Online normalizer calculation for softmax (2018).

    >>> logits = torch.tensor([[0.0, 0.0, -torch.inf], [1.0, 0.0, 0.0]])
    >>> fastrl.token_logprobs(logits, torch.tensor([1, 0]), entropy=True)
    LogProbs(logp=tensor([-0.6931, -0.5514]), entropy=tensor([0.6931, 0.9753]))
    """
    return _token_logprobs(op.TokenLogprobsFunction, logits, tokens, temperature, entropy, impl)


def token_logprobs_(
    logits_: Tensor,
    tokens: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    impl: str = "auto",
) -> LogProbs:
    r""":func:`token_logprobs` whose gradient is written over the logits: no second ``[..., V]`` buffer in the backward.

    Args:
        logits_: as in :func:`token_logprobs`; after the backward its memory holds the gradient. Contiguous, or up to three
            dimensions with unit stride along V (a slice along time, say), no element twice. Not a leaf that requires
            grad: its values would be lost.
        tokens, temperature, entropy, impl: as in :func:`token_logprobs`. The reference, and ``torch.compile`` whatever
            the implementation, allocate the gradient as usual.

    Returns:
        What :func:`token_logprobs` returns, bit for bit, and the same gradient.

    Raises:
        ValueError, TypeError: as for :func:`token_logprobs`, and for logits that cannot be overwritten.

    Autograd's version counter is raised: a later backward through anything else that kept the logits (this op again, a
    second loss, a softcap's ``tanh``) raises instead of using the gradient for logits. One backward, no retained graph.

    >>> hidden = torch.zeros(1, 2, requires_grad=True)
    >>> logits = hidden * 1.0
    >>> fastrl.token_logprobs_(logits, torch.tensor([0])).logp.sum().backward()
    >>> hidden.grad, logits.detach()
    (tensor([[ 0.5000, -0.5000]]), tensor([[ 0.5000, -0.5000]]))
    """
    _checks.floating("token_logprobs", "logits", logits_)
    if not logits_.requires_grad or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        function = op.TokenLogprobsFunction
    else:
        _check_overwritable(logits_)
        function = op.TokenLogprobsInplaceFunction
    return _token_logprobs(function, logits_, tokens, temperature, entropy, impl)


def _check_overwritable(logits: Tensor) -> None:
    if logits.is_leaf:
        raise ArgumentError(
            "token_logprobs_: logits_ must be the result of an operation, got a leaf that requires grad, whose values "
            "the gradient would replace; use token_logprobs"
        )
    extent, overlaps = 1, False
    for stride, size in sorted(zip(logits.stride(), logits.shape)):
        if size > 1:
            overlaps |= stride < extent
            extent = stride * size
    reads_in_place = logits.dim() <= 3 and (
        logits.shape[-1:] == (1,) or logits.stride()[-1:] == (1,)
    )
    if overlaps or not (reads_in_place or logits.is_contiguous()):
        raise ArgumentError(
            "token_logprobs_: logits_ must be contiguous, or have at most three dimensions, unit stride along V and no "
            f"element twice, got shape {list(logits.shape)} and strides {list(logits.stride())}; use token_logprobs"
        )


def _token_logprobs(
    function: type[op.TokenLogprobsFunction],
    logits: Tensor,
    tokens: Tensor,
    temperature: float | Tensor,
    entropy: bool,
    impl: str,
) -> LogProbs:
    _checks.floating("token_logprobs", "logits", logits)
    _checks.is_tensor("token_logprobs", "tokens", tokens)
    operator = (
        "token_logprobs" if function is op.TokenLogprobsFunction else "token_logprobs_backward_"
    )
    implementation = _backends.resolve(operator, impl, logits.device)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ArgumentError(
            f"token_logprobs: logits must be [..., V] with V >= 1, got {list(logits.shape)}; "
            "pass one row of logits per token"
        )
    if tokens.dtype not in _INTEGERS:
        raise ArgumentError(
            f"token_logprobs: tokens must be integers, got {tokens.dtype}; pass tokens.long()"
        )
    if tokens.shape != logits.shape[:-1]:
        raise ArgumentError(
            f"token_logprobs: tokens must have the shape of logits without its last dimension, "
            f"{list(logits.shape[:-1])}, got {list(tokens.shape)}; to score the next token pass "
            "logits[:, :-1] and tokens[:, 1:]"
        )
    _checks.same_device("token_logprobs", "tokens", tokens, logits.device, "the logits")
    tokens = tokens.long()
    temperatures = None
    if isinstance(temperature, Tensor):
        temperatures, temperature = _check_temperatures(temperature, tokens, logits), 1.0
    else:
        temperature = _checks.number(
            "token_logprobs", "temperature", temperature, low=MIN_TEMPERATURE
        )

    if implementation != "cpu" and not torch.compiler.is_compiling():
        _check_range(tokens, logits.shape[-1])
    if implementation == "reference":
        by = temperature if temperatures is None else temperatures
        return LogProbs(*token_logprobs_reference(logits, tokens, by, entropy))
    if implementation == "triton" and not torch.compiler.is_compiling():
        _check_range(tokens, logits.shape[-1])  # its kernels give NaN for a token out of range
    arguments = (logits, tokens, temperatures, temperature, entropy)
    if torch.compiler.is_compiling():
        logp, entropies = _run(function, implementation, arguments)
    else:
        try:
            logp, entropies = _run(function, implementation, arguments)
        except RuntimeError:
            _check_range(tokens, logits.shape[-1])  # the kernel checks too; this says it better
            raise
    return LogProbs(logp, entropies if entropy else None)


def _run(
    function: type[op.TokenLogprobsFunction],
    implementation: str,
    arguments: tuple[Tensor, Tensor, Tensor | None, float, bool],
) -> tuple[Tensor, Tensor]:
    if arguments[0].requires_grad and torch.is_grad_enabled():
        logp, entropies = function.apply(*arguments, implementation)
    else:
        logp, entropies, _ = op.token_logprobs_op[implementation](*arguments)
    return logp, entropies


def _check_range(tokens: Tensor, vocabulary: int) -> None:
    """Tokens are class indices; looked at only where that needs no device synchronisation."""
    if tokens.device.type != "cpu" or tokens.numel() == 0:
        return
    low, high = (int(x) for x in torch.aminmax(tokens))
    if low < 0 or high >= vocabulary:
        raise ArgumentError(
            f"token_logprobs: tokens must be in [0, V) = [0, {vocabulary}), got {low if low < 0 else high}; "
            "give ignored positions a valid id, for example tokens.clamp(min=0), and mask their results"
        )


def _check_temperatures(temperature: Tensor, tokens: Tensor, logits: Tensor) -> Tensor:
    _checks.like("token_logprobs", "temperature", temperature, tokens, "tokens")
    if temperature.requires_grad:
        raise ArgumentError(
            "token_logprobs: temperature is a constant to the gradient, got a tensor that requires grad; "
            "pass temperature.detach()"
        )
    if (
        not torch.compiler.is_compiling()
        and temperature.device.type == "cpu"
        and not bool((temperature >= MIN_TEMPERATURE).all())
    ):
        raise ArgumentError(
            f"token_logprobs: every temperature must be at least {MIN_TEMPERATURE:g}, "
            f"got {temperature.min().item():g}; clamp it, for example temperature.clamp(min=1e-3)"
        )
    return temperature.to(result_dtype(logits.dtype))
