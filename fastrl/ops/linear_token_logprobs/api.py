"""``fastrl.linear_token_logprobs``: log-probabilities and entropies from hidden states, without the logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastrl import _backends
from fastrl.errors import ImplementationError
from fastrl.ops.linear_token_logprobs import op
from fastrl.ops.linear_token_logprobs.checks import HeadOptions, head_inputs
from fastrl.ops.linear_token_logprobs.projection import DIFFERENTIABLE, Inputs
from fastrl.ops.linear_token_logprobs.reference import linear_token_logprobs_reference
from fastrl.ops.token_logprobs import LogProbs


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    mask: Tensor | None = None,
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
    impl: str = "auto",
) -> LogProbs:
    r"""Log-probability of each token, and the entropy of its row, from the states that go into the lm_head.

    The logits of a row and what ``token_logprobs`` makes of them::

        l = hidden @ weight.T + bias + lora_scale * (hidden @ lora_a.T) @ lora_b.T
        c = softcap * tanh(logit_scale * l / softcap)          (logit_scale * l without a cap)
        z = c / temperature, -inf where not allowed            p = softmax(z)
        logp = z[token] - log sum_v exp(z_v)                   entropy = -sum_v p_v log p_v

    A chunk of rows at a time: its logits are made, used and overwritten. The gradient makes them again.

    Args:
        hidden: ``[..., H]``, float32, bfloat16, float16 or float64.
        weight: ``[V, H]``, in the dtype of ``hidden`` (any under ``torch.autocast``); may be tied to an embedding.
        tokens: ``[...]``, integers in ``[0, V)``; anything at masked positions.
        bias: ``[V]``; ``-inf`` makes a class impossible.
        temperature: at least 1e-6, one number or a tensor shaped like ``tokens``; a constant to the gradient.
        entropy: compute the entropy as well.
        mask: like ``tokens``, bool, integer or float; non-zero is valid. On the CPU (also beside tensors on a GPU) masked
            rows are dropped before any product. A mask on a GPU hides them instead, because counting them would stop the
            host: to save their products there, select the rows before the call.
        allowed: the classes that the sampler left possible (top-k, top-p, min-p, a grammar), as bool ``[..., V]`` or as ids
            ``[..., K]``, where negative ids stand for nothing. Probabilities are renormalised over them; a token outside
            has logp ``-inf``.
        softcap: cap of the logits, greater than 0 (Gemma 2); None: none.
        logit_scale: factor of the logits before the cap, greater than 0 (Cohere; 1 / ``logits_scaling`` of Granite).
        lora_a, lora_b, lora_scale: ``[R, H]``, ``[V, R]`` and a number, a low-rank term beside the weight.
        process_group: ``weight``, ``bias``, ``lora_b`` and a bool ``allowed`` are this rank's shard of the vocabulary, all
            else is the same on every rank. Every rank must call.
        vocab_start: id of the first class of this rank's shard; None: rank * V, for shards of one size.
        vocab_size: number of classes of the whole vocabulary; rows of ``weight`` beyond it are padding, which is left out.
            None: every row is a class.
        chunk: rows whose logits exist at a time; None: as many as fit 64 MiB on CPU, 1 GiB elsewhere.
        accumulate: ``"float32"`` sums the gradient of ``weight`` over chunks in float32 whatever its dtype, ``"weight"``
            in its own dtype, which saves memory and loses digits with every chunk.
        impl: ``"auto"``, ``"cpu"`` or ``"reference"`` (all logits at once; one process).

    Returns:
        ``LogProbs(logp, entropy)`` shaped like ``tokens``, float32 (float64 for float64 states). Masked positions are 0.

    Raises:
        ValueError, TypeError: a shape, dtype, device or option does not fit, or, on CPU, a token is out of range. A
            DTensor is refused: pass ``full_tensor()``, which gathers it and sends gradients back to its shards.

    Differentiable once in hidden, weight, bias, lora_a and lora_b; a second derivative raises. The gradient of a masked row
    is exactly 0, whatever stands there. With a process group gradients of hidden and lora_a are summed over its ranks.
    Products run in the dtype of the inputs, or that of autocast, through torch; float16 on CPU in float32.
    Deterministic: the same inputs and chunk give the same bits from run to run; another chunk may change how the products round, and nothing else.
    Extra memory: the logits of a chunk, twice with a gradient where no kernel works in place, and for the gradient of a
    bfloat16 weight its float32 sum.

    Source: the chunked losses of Liger-Kernel and torch; vocabulary-parallel softmax of Megatron-LM (Shoeybi et al., 2019).

    >>> weight = torch.tensor([[1.0], [2.0], [5.0]]).log()  # odds 1 : 2 : 5 for a hidden state of 1
    >>> fastrl.linear_token_logprobs(torch.ones(2, 1), weight, torch.tensor([1, 2]), entropy=True)
    LogProbs(logp=tensor([-1.3863, -0.4700]), entropy=tensor([0.9003, 0.9003]))
    """
    name = "linear_token_logprobs"
    options = HeadOptions(
        *(bias, temperature, mask, allowed, softcap, logit_scale, lora_a, lora_b, lora_scale),
        *(process_group, vocab_start, vocab_size, chunk, accumulate),
    )
    inputs = head_inputs(name, hidden, weight, tokens, options)
    implementation = _backends.resolve(name, impl, inputs.hidden.device)
    if implementation == "reference":
        logp, entropies = _reference(inputs, entropy)
    elif torch.is_grad_enabled() and any_requires_grad(inputs):
        logp, entropies = op.LinearTokenLogprobsFunction.apply(*inputs, entropy, implementation)
    else:
        logp, entropies, _ = op.linear_token_logprobs_op[implementation](*inputs, entropy)
    if not entropy or entropies is None:
        return LogProbs(logp.view(tokens.shape), None)
    return LogProbs(logp.view(tokens.shape), entropies.view(tokens.shape))


def any_requires_grad(inputs: Inputs) -> bool:
    """Whether anything that has a gradient wants one."""
    tensors = (getattr(inputs, name) for name in DIFFERENTIABLE)
    return any(x is not None and x.requires_grad for x in tensors)


def _reference(inputs: Inputs, entropy: bool) -> tuple[Tensor, Any]:
    if inputs.group:
        raise ImplementationError(
            "linear_token_logprobs: impl='reference' computes in one process, got a process_group; "
            "gather the shards of the weight, or pass impl='auto' on a device with a token_logprobs kernel"
        )
    return linear_token_logprobs_reference(
        *(inputs.hidden, inputs.weight, inputs.tokens, inputs.bias, inputs.lora_a, inputs.lora_b),
        *(inputs.mask, inputs.temperatures, inputs.allowed, inputs.numbers, inputs.sizes[2]),
        *(inputs.compute, entropy),
    )
