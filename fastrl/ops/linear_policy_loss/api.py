"""``fastrl.linear_policy_loss``: from hidden states to the policy loss, without the logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastrl import _backends
from fastrl._library import result_dtype
from fastrl.errors import ArgumentError
from fastrl.ops.linear_policy_loss import op
from fastrl.ops.linear_token_logprobs.api import any_requires_grad, linear_token_logprobs
from fastrl.ops.linear_token_logprobs.checks import HeadOptions, head_inputs
from fastrl.ops.policy_loss.api import PolicyOptions, checked, policy_loss
from fastrl.ops.policy_loss.op import POLICY_METRICS, choices, numbers


class LinearPolicyLoss(NamedTuple):
    """As ``PolicyLoss``; ``logp`` and ``entropy`` have the shape of the tokens and no gradient."""

    loss: Tensor
    metrics: Tensor
    logp: Tensor
    entropy: Tensor | None

    def named(self) -> dict[str, Tensor]:
        """The metrics by name, as 0-d views: nothing is copied from the device."""
        return dict(zip(POLICY_METRICS, self.metrics.unbind()))


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    allowed: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    lora_a: Tensor | None = None,
    lora_b: Tensor | None = None,
    lora_scale: float = 1.0,
    process_group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    chunk: int | None = None,
    accumulate: str = "float32",
    ratio: str = "token",
    surrogate: str = "clip",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
    log_ratio_clamp: float | None = 20.0,
    is_weights: Tensor | None = None,
    ref_logp: Tensor | None = None,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    kl: str | None = None,
    kl_grad: str = "pathwise",
    kl_coef: float = 0.0,
    kl_input_clamp: float | None = 20.0,
    kl_clamp: float | None = 10.0,
    entropy: bool = False,
    entropy_coef: float = 0.0,
    agg: str = "token_mean",
    denom: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> LinearPolicyLoss:
    r"""``policy_loss`` of ``linear_token_logprobs``, in one walk over the chunks of the rows.

    Definition::

        logp, entropy = linear_token_logprobs(hidden, weight, tokens, mask=mask, entropy=True, ...)
        loss, metrics = policy_loss(logp, old_logp, advantages, mask, entropy=entropy, ...)

    With ``ratio="token"`` the derivative of a token's loss is known as soon as its logp is, so the gradients are written in
    the forward pass: three products with the weight in all. Sequence ratios need every logp of a sequence first, and
    compute the logits a second time in the backward pass: four products.

    Args:
        hidden: ``[B, T, H]``, or packed ``[N, H]`` with ``cu_seqlens``; what predicts each token.
        weight, bias, temperature, allowed, softcap, logit_scale, lora_a, lora_b, lora_scale: the head, as for
            ``linear_token_logprobs``.
        process_group, vocab_start, vocab_size, chunk, accumulate: likewise. Ranks that give ``vocab_start`` without
            ``chunk`` take four products, because shards of several sizes have no common chunk.
        tokens: ``[B, T]`` or ``[N]``; anything at masked positions.
        old_logp, advantages, mask, is_weights, ref_logp, cu_seqlens: as for ``policy_loss``, shaped like ``tokens``, some
            also one per sequence; masked positions cost no products (see ``linear_token_logprobs``).
        ref_hidden, ref_weight, ref_bias: in place of ``ref_logp``, the states and the head of the reference policy, whose
            logp is computed with the same options but without the low-rank term, and without a gradient.
        entropy: compute the entropy for the metrics; with ``entropy_coef`` not 0 it is computed anyway.
        ratio, surrogate, clip_low, clip_high, dual_clip, ratio_cap, log_ratio_clamp, kl, kl_grad, kl_coef, kl_input_clamp,
            kl_clamp, entropy_coef, agg, denom: as for ``policy_loss``.
        impl: ``"auto"``, ``"cpu"`` or ``"reference"`` (all logits at once; one process).

    Returns:
        ``LinearPolicyLoss(loss, metrics, logp, entropy)``: loss and metrics as from ``policy_loss``; logp and entropy (None
        unless computed) without a gradient, for logging or as the next ``old_logp``, 0 at masked positions.

    Raises:
        ValueError, TypeError: as both ops.

    Differentiable once in hidden, weight, bias, lora_a and lora_b, through the loss alone; a second derivative raises.
    Masked positions influence nothing and get gradients of exactly 0. Deterministic: the same inputs and chunk give the
    same bits from run to run. logp has the same bits as from ``linear_token_logprobs`` with the same rows and chunk, so the ratio of the first
    update is exactly 1. Extra memory: the logits of a chunk and, until the backward pass, the gradients.

    Source: forward-pass gradients after Liger-Kernel's fused linear losses and torch's chunked linear cross-entropy.

    >>> weight = torch.tensor([[1.0], [2.0], [5.0]]).log().requires_grad_()  # odds 1 : 2 : 5
    >>> tokens, old_logp = torch.tensor([[1, 2]]), torch.tensor([[0.25, 0.5]]).log()
    >>> advantages, hidden = torch.tensor([1.0]), torch.ones(1, 2, 1)
    >>> out = fastrl.linear_policy_loss(hidden, weight, tokens, old_logp, advantages)
    >>> out.loss.detach()  # ratios 1 and 1.25, which is clipped: -(1 + 1.2) / 2
    tensor(-1.1000)
    >>> out.loss.backward()
    >>> weight.grad.T  # -(onehot - p) / 2 of the first token
    tensor([[ 0.0625, -0.3750,  0.3125]])
    """
    name = "linear_policy_loss"
    head = HeadOptions(
        bias,
        temperature,
        mask,
        allowed,
        softcap,
        logit_scale,
        lora_a,
        lora_b,
        lora_scale,
        process_group,
        vocab_start,
        vocab_size,
        chunk,
        accumulate,
    )
    inputs = head_inputs(name, hidden, weight, tokens, head)
    with_entropy = entropy or entropy_coef != 0
    if kl is None:
        ref_logp = None
    elif ref_hidden is not None or ref_weight is not None:
        if ref_logp is not None or ref_hidden is None or ref_weight is None:
            raise ArgumentError(
                f"{name}: the reference must be ref_logp, or ref_hidden with ref_weight, got "
                f"{_given(ref_logp=ref_logp, ref_hidden=ref_hidden, ref_weight=ref_weight)}; pass one of the two"
            )
        with torch.no_grad():
            ref_logp = linear_token_logprobs(
                ref_hidden,
                ref_weight,
                tokens,
                **head._replace(bias=ref_bias, lora_a=None, lora_b=None)._asdict(),
                impl=impl,
            ).logp
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
    # Stands for the log-probabilities, which have its shape, dtype and device.
    like = inputs.hidden.new_empty(tokens.shape, dtype=result_dtype(inputs.hidden.dtype))
    on_device = mask if mask is None else mask.to(like.device)
    terms, divisor, divisor_tensor = checked(
        name, like, old_logp, advantages, on_device, is_weights, ref_logp, None, options
    )
    implementation = _backends.resolve(name, impl, like.device)
    has_common_chunk = process_group is None or vocab_start is None or chunk is not None
    if (
        implementation != "reference"
        and ratio == "token"
        and has_common_chunk
        and torch.is_grad_enabled()
        and any_requires_grad(inputs)
    ):
        loss, metrics, logp, entropies = op.LinearPolicyLossFunction.apply(
            *inputs,
            *(old_logp, advantages, is_weights, ref_logp, cu_seqlens, divisor_tensor, divisor),
            *(numbers(terms), choices(terms, agg), with_entropy, implementation),
        )
        found = entropies.view(tokens.shape) if with_entropy else None
        return LinearPolicyLoss(loss, metrics, logp.view(tokens.shape), found)
    out = linear_token_logprobs(
        hidden, weight, tokens, entropy=with_entropy, **head._asdict(), impl=impl
    )
    loss, metrics = policy_loss(
        out.logp,
        old_logp,
        advantages,
        on_device,
        is_weights=is_weights,
        ref_logp=ref_logp,
        entropy=out.entropy,
        **options._asdict(),
        impl=impl,
    )
    kept = None if out.entropy is None else out.entropy.detach()
    return LinearPolicyLoss(loss, metrics, out.logp.detach(), kept)


def _given(**arguments: Tensor | None) -> str:
    return ", ".join(name for name, x in arguments.items() if x is not None)
