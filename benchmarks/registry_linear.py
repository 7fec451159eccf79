"""The cases over an lm_head: from hidden states to log-probabilities and losses, in time and in peak memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import fastrl
from benchmarks.peers import liger_grpo, trl_chunked_logprobs
from benchmarks.registry import (
    FASTRL,
    SCALES,
    Bar,
    Case,
    Prepared,
    Provider,
    Results,
    _compiled,
    _prepared,
)

SEQUENCES = 4
# Width and vocabulary of SmolLM2-135M and of Qwen2.5-0.5B.
MODELS = {49152: 576, 151936: 896}
# Classes that TRL's trainers compute at a time.
TRL_TILE = 32768
# Logits in bfloat16 are off by a hundredth, whoever computes them.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def cases(scale: str = "full", *, with_compile: bool = True) -> list[Case]:
    """The cases at the sizes of ``registry.cases``."""
    index = SCALES.index(scale)
    build = [
        *(_logprobs(index, with_compile, v, d) for v, d in _sizes()),
        *(_loss(index, with_compile, v, d) for v, d in _sizes()),
    ]
    return build


def _sizes() -> list[tuple[int, torch.dtype]]:
    return [(v, d) for v in MODELS for d in (torch.float32, torch.bfloat16)]


def _size(scale: int, vocabulary: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Tokens a sequence, width, classes. float32 products are slow: at 151936 classes a quarter of the tokens."""
    if scale:
        return ((64, 4)[scale - 1], 32, vocabulary // (16, 1000)[scale - 1])
    is_slow = vocabulary > 100_000 and dtype == torch.float32
    return 256 if is_slow else 1024, MODELS[vocabulary], vocabulary


class _Head:
    """States, weight and what the loss reads; gradients are of states and weight."""

    def __init__(self, length: int, width: int, classes: int, dtype: torch.dtype) -> None:
        self.hidden = torch.randn(SEQUENCES, length, width).to(dtype).requires_grad_()
        weight = torch.randn(classes, width) * (2 / width**0.5)
        self.weight = weight.to(dtype).requires_grad_()
        self.tokens = torch.randint(classes, (SEQUENCES, length))
        with torch.no_grad():
            logp = fastrl.linear_token_logprobs(self.hidden, self.weight, self.tokens).logp
        # Ratios of 1, within the clip and beyond it, away from its edges.
        steps = torch.tensor([0.0, 0.1, -0.1, 0.4, -0.4])[torch.randint(5, logp.shape)]
        self.old_logp = logp - steps
        self.advantages = torch.randn(SEQUENCES)
        self.leaves = (self.hidden, self.weight)

    def exact(self, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Results:
        """Loss and gradients in float64, dense, a few rows of the first sequence's loss at a time."""
        hidden, weight = (x.detach().double().requires_grad_() for x in self.leaves)
        total = torch.zeros((), dtype=torch.float64)
        width = max(1, (64 << 20) // len(weight))
        flat, tokens = hidden.flatten(0, 1), self.tokens.flatten()
        for start in range(0, len(tokens), width):
            rows = slice(start, start + width)
            log_p = (flat[rows] @ weight.t()).log_softmax(-1)
            logp = log_p.gather(-1, tokens[rows, None])[:, 0]
            part = loss_of(logp, -(log_p.exp() * log_p).sum(-1), rows)  # type: ignore[call-arg]
            part.backward(retain_graph=True)
            total += part.detach()
        assert hidden.grad is not None and weight.grad is not None
        return total, hidden.grad, weight.grad


def _surrogate(logp: Tensor, old_logp: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logp - old_logp).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))


def _dense(hidden: Tensor, weight: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    log_p = F.linear(hidden, weight).float().log_softmax(-1)
    logp = log_p.gather(-1, tokens[..., None]).squeeze(-1)
    return logp, -(log_p.exp() * log_p).sum(-1)


def _logprobs(scale: int, with_compile: bool, vocabulary: int, dtype: torch.dtype) -> Case:
    length, width, classes = _size(scale, vocabulary, dtype)

    def prepare() -> Prepared:
        h = _Head(length, width, classes, dtype)

        def finished(logp: Tensor, entropy: Tensor | None) -> Results:
            loss = logp.sum() if entropy is None else logp.sum() - entropy.sum()
            return (loss.detach(), *torch.autograd.grad(loss, h.leaves))

        def ours() -> Results:
            out = fastrl.linear_token_logprobs(*h.leaves, h.tokens, entropy=True)
            return finished(*out)

        def compiled() -> Provider:
            function = _compiled(_dense)
            return Provider("torch.compile", lambda: finished(*function(*h.leaves, h.tokens)))

        def linear_cross_entropy() -> Results:
            options = torch.nn.LinearCrossEntropyOptions()
            rows, tokens = h.hidden.flatten(0, 1), h.tokens.flatten()
            loss = -F.linear_cross_entropy(rows, h.weight, tokens, reduction="sum", options=options)
            return finished(loss, None)

        def trl() -> Provider:
            function = trl_chunked_logprobs()

            def call() -> Results:
                rows, tokens = h.hidden.flatten(0, 1), h.tokens.flatten()
                logp, entropy, *_ = function.apply(
                    *(rows, h.weight, None, tokens, 1.0, TRL_TILE, None, 1.0, ("entropy",))
                )
                return finished(logp, entropy)

            return Provider("trl", call, note="ChunkedLogProbFunction, tiles of 4096 x 32768")

        prepared = _prepared(
            lambda: h.exact(lambda logp, entropy, rows: logp.sum() - entropy.sum()),  # type: ignore[misc]
            Provider(FASTRL, ours),
            Provider("eager", lambda: finished(*_dense(*h.leaves, h.tokens))),
            compiled if with_compile else None,
            Provider(
                "torch chunked",
                linear_cross_entropy,
                lambda results: tuple(None for _ in results),
                note="F.linear_cross_entropy(options=): logp alone, no entropy",
            ),
            trl,
        )
        return prepared._replace(tolerance=TOLERANCE[dtype])

    return _case("linear_token_logprobs", (length, width, classes), dtype, (), prepare)


def _loss(scale: int, with_compile: bool, vocabulary: int, dtype: torch.dtype) -> Case:
    length, width, classes = _size(scale, vocabulary, dtype)

    def prepare() -> Prepared:
        h = _Head(length, width, classes, dtype)
        count = h.tokens.numel()
        per_token = h.advantages[:, None].expand(h.tokens.shape)

        def finished(loss: Tensor) -> Results:
            return (loss.detach(), *torch.autograd.grad(loss, h.leaves))

        def dense(hidden: Tensor, weight: Tensor) -> Tensor:
            logp, _ = _dense(hidden, weight, h.tokens)
            return _surrogate(logp, h.old_logp, per_token).mean()

        def exact_part(logp: Tensor, _: Tensor, rows: slice) -> Tensor:
            old, advantages = h.old_logp.flatten()[rows], per_token.flatten()[rows]
            return _surrogate(logp, old.double(), advantages.double()).sum() / count

        def compiled() -> Provider:
            function = _compiled(dense)
            return Provider("torch.compile", lambda: finished(function(*h.leaves)))

        def liger() -> Provider:
            loss_of = liger_grpo()(
                beta=0.0, compiled=False, use_ref_model=False, loss_type="bnpo", temperature=1.0
            )
            mask = torch.ones(h.tokens.shape)

            def call() -> Results:
                loss = loss_of(
                    *(h.hidden, h.weight, h.tokens, mask, h.advantages),
                    old_per_token_logps=h.old_logp,
                )[0]
                return finished(loss)

            return Provider("liger", call, note="LigerFusedLinearGRPOLoss, not compiled")

        def ours() -> Results:
            return finished(
                fastrl.linear_policy_loss(*h.leaves, h.tokens, h.old_logp, h.advantages).loss
            )

        prepared = _prepared(
            lambda: h.exact(exact_part),  # type: ignore[arg-type]
            Provider(FASTRL, ours),
            Provider("eager", lambda: finished(dense(*h.leaves))),
            compiled if with_compile else None,
            liger,
        )
        return prepared._replace(tolerance=TOLERANCE[dtype])

    bars = (
        Bar("speedup", "eager", 1),
        Bar("speedup", "liger", 1),
        Bar("memory", "liger", 1),
        *((Bar("memory", "eager", 8),) if SEQUENCES * length >= 4096 else ()),
    )
    return _case("linear_policy_loss", (length, width, classes), dtype, bars, prepare)


def _case(
    op: str,
    size: tuple[int, int, int],
    dtype: torch.dtype,
    bars: tuple[Bar, ...],
    prepare: Callable[[], Prepared],
) -> Case:
    length, width, classes = size
    rows = SEQUENCES * length
    # States and weight are read, and their gradients written.
    least = 2 * (rows + classes) * width * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    text = f"{rows} x {width} x {classes} {name}, forward and backward"
    return Case(op, text, least, bars, prepare, has_memory=True)
