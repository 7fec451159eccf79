"""Sampling on the CPU: the tokens of ``torch.multinomial`` in a fraction of its time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Two float32 divisions and a rounding of u lie between the bound below and the scores that torch compares.
_MARGIN = 1 - 1e-6


def multinomial(probabilities: Tensor) -> Tensor:
    r"""One column drawn per row of float32 ``[B, V]`` on the CPU: ``torch.multinomial(probabilities, 1)``, ``[B, 1]``.

    torch draws ``q = -log(1 - u)`` for every element and takes the first argmax of ``p / q``. As ``q >= u``, no element
    with ``p / u`` below the score of another can win, and with tens of thousands of columns that leaves one or two
    logarithms per row. The same tokens as torch, and the generator ends in the same state.

    >>> probabilities = torch.tensor([[0.1, 0.9], [0.5, 0.5]])
    >>> state = torch.get_rng_state()
    >>> tokens = multinomial(probabilities)
    >>> _ = torch.set_rng_state(state)
    >>> torch.equal(tokens, torch.multinomial(probabilities, 1))
    True
    """
    tokens = torch.empty(probabilities.shape[0], 1, dtype=torch.long)
    uniform = torch.empty(probabilities.shape[1], dtype=torch.float64)
    bound = torch.empty(probabilities.shape[1])
    for row, token in zip(probabilities, tokens):
        torch.div(row, bound.copy_(uniform.uniform_()), out=bound)
        # Not "above": NaN must stay among the candidates, because torch's argmax takes it.
        first = bound.argmax()
        lowest = row[first] / _exponential(uniform[first])
        candidates = (bound < lowest * _MARGIN).logical_not_().nonzero().squeeze(1)
        scores = row[candidates] / _exponential(uniform[candidates])
        token.copy_(candidates[scores.argmax()])
    return tokens


def _exponential(uniform: Tensor) -> Tensor:
    return torch.log1p(-uniform).neg_().float()


def _can_draw(
    probabilities: Any, num_samples: Any = None, replacement: Any = False, **rest: Any
) -> bool:
    """Whether the call is one that :func:`multinomial` serves; torch raises for probabilities that are none."""
    if num_samples != 1 or rest or not isinstance(probabilities, Tensor):
        return False
    if (
        probabilities.dim() != 2
        or probabilities.dtype != torch.float32
        or not probabilities.numel()
    ):
        return False
    if probabilities.device.type != "cpu" or probabilities.requires_grad:
        return False
    low, high = probabilities.aminmax()
    # Comparisons with NaN are false.
    return bool(low >= 0) and bool(high < torch.inf) and bool((probabilities.sum(1) > 0).all())


class FastSampling(TorchFunctionMode):
    """Inside of it ``torch.multinomial`` draws through :func:`multinomial` where that gives the same tokens."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.multinomial:
            names = ("probabilities", "num_samples", "replacement")
            named = dict(zip(names, args)) | kwargs
            named["probabilities"] = named.pop("input", named.get("probabilities"))
            if len(args) <= len(names) and _can_draw(**named):
                return multinomial(named["probabilities"])
        return func(*args, **kwargs)
