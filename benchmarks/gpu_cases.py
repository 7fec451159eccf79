"""What is measured on a GPU: the rows of DESIGN section 8 with everyone who can compute them, and the bars.

Tensors are made on torch's default device: a GPU, or in a dry run the CPU at next to no size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastrl
from benchmarks import plain
from benchmarks.gpu_timing import is_gpu
from benchmarks.peers import verl_algorithms, verl_functional
from benchmarks.registry import GAMMA, KL_COEF, LAM, Results
from benchmarks.verify import TOLERANCE

Inputs = tuple[Tensor, ...]
Call = Callable[..., Results]


class Bar(NamedTuple):
    """What the providers of fastrl must reach.

    kind "bandwidth": bytes per second of the device over those of a copy, at least; "device_ms" and "call_ms": at most;
    "products": time of the device over that of the provider "matrix products", at most.
    """

    kind: str
    limit: float


def as_they_are(results: Results) -> Results:
    return results


class Provider(NamedTuple):
    """`prepare` makes the call that is timed, a function of the inputs; it may find a peer missing."""

    name: str
    prepare: Callable[[], Call]
    comparable: Callable[[Results], Results] | None = as_they_are
    note: str = ""
    starts_slowly: bool = False


class Case(NamedTuple):
    op: str
    size: str
    minimum_bytes: int
    bars: tuple[Bar, ...]
    inputs: Callable[[], Inputs]
    expected: Callable[..., Results]
    providers: tuple[Provider, ...]
    tolerance: float = TOLERANCE


def cases(tiny: bool = False) -> list[Case]:
    """Every case, at its real size or at next to none."""
    few = [
        _launches(),
        *(_few_elements(op, call) for op, call in FEW_ELEMENTS.items()),
    ]
    gae = [
        _gae(*((3, 40) if tiny else (2048, 4096)), (Bar("bandwidth", 0.85),), True, True),
        _gae(*((4, 40) if tiny else (8192, 4096)), (Bar("bandwidth", 0.85),), True, False),
        _gae(*((3, 80) if tiny else (1024, 8192)), (), True, False),
        _gae(*((2, 300) if tiny else (16, 131072)), (Bar("device_ms", 0.1),), False, False),
    ]
    rest = [
        _group_advantages(32 if tiny else 16384),
        _whiten(*((3, 100) if tiny else (1024, 8192))),
        _policy_loss(*((3, 100) if tiny else (128, 8192))),
        _policy_loss(*((5, 100) if tiny else (1024, 8192))),
        _token_logprobs(*((3, 151) if tiny else (8192, 151936)), backward=False),
        _token_logprobs(*((3, 151) if tiny else (8192, 151936)), backward=True),
    ]
    if hasattr(fastrl, "linear_policy_loss"):
        rest += [
            _linear_policy_loss(*((2, 7, 16, 151) if tiny else (8, 512, 2048, v)))
            for v in ((151,) if tiny else (49152, 151936))
        ]
    return [*few, *gae, *rest]


def _ours(
    call: Callable[..., Results], comparable: Callable[[Results], Results] | None = as_they_are
) -> tuple[Provider, ...]:
    """One provider per implementation; `call` takes the implementation and the inputs."""
    implementations = ("cuda", "triton") if is_gpu() else ("cpu", "triton")
    return tuple(
        Provider(f"fastrl {name}", lambda name=name: partial(call, name), comparable)  # type: ignore[misc]
        for name in implementations
    )


def _always(call: Call) -> Callable[[], Call]:
    return lambda: call


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()  # a case compiles one function; what earlier ones left counts towards a limit
    backend = "inductor" if is_gpu() else "eager"
    compiled: Callable[..., Any] = torch.compile(
        function, dynamic=False, fullgraph=True, backend=backend
    )
    return compiled


def _with_gradient(leaf: Tensor, loss: Tensor, *others: Tensor) -> Results:
    return (loss.detach(), torch.autograd.grad(loss, leaf)[0], *others)


def _tool_spans(rows: int, columns: int) -> Tensor:
    """A mask with a hole of 64 tokens in every five such spans: tool outputs within long answers, no padding."""
    spans = torch.rand(rows, -(-columns // 64)) < 0.8
    return spans.repeat_interleave(64, 1)[:, :columns].contiguous()


def _some_rows(count: int, wanted: int) -> list[int]:
    """First, last and in between."""
    return sorted({i * (count - 1) // max(1, wanted - 1) for i in range(wanted)})


# ---- calls on next to nothing --------------------------------------------------------------------------------------


def _launches() -> Case:
    """What torch itself needs: an operator without a kernel, an empty kernel, a small one."""

    def inputs() -> Inputs:
        return torch.randn(8), torch.randn(8)

    def empty_kernel(x: Tensor, y: Tensor) -> Results:
        torch.cuda._sleep(0)
        return ()

    nothing = {"comparable": None}
    providers = [
        Provider("torch.detach", _always(lambda x, y: (x.detach(),)), **nothing, note="no kernel"),
        Provider("torch.mul", _always(lambda x, y: (torch.mul(x, y),)), **nothing),
    ]
    if is_gpu():
        providers.append(Provider("empty kernel", _always(empty_kernel), **nothing))
    return Case("launch", "8 elements", 0, (), inputs, lambda *_: (), tuple(providers))


FEW_ELEMENTS: dict[str, Callable[[str, Tensor, Tensor, Tensor], Any]] = {
    "gae": lambda impl, x, y, i: fastrl.gae(x, y, gamma=GAMMA, lam=LAM, impl=impl),
    "discounted_returns": lambda impl, x, y, i: fastrl.discounted_returns(
        x, gamma=GAMMA, impl=impl
    ),
    "affine_scan": lambda impl, x, y, i: fastrl.affine_scan(x, y, impl=impl),
    "group_advantages": lambda impl, x, y, i: fastrl.group_advantages(x[0], i, impl=impl),
    "whiten": lambda impl, x, y, i: fastrl.whiten(x, impl=impl),
    "policy_loss": lambda impl, x, y, i: fastrl.policy_loss(x, y, x, impl=impl),
    "value_loss": lambda impl, x, y, i: fastrl.value_loss(x, y, y, impl=impl),
    "token_logprobs": lambda impl, x, y, i: fastrl.token_logprobs(x, i[:1], impl=impl).logp,
}


def _few_elements(op: str, call: Callable[[str, Tensor, Tensor, Tensor], Any]) -> Case:
    def inputs() -> Inputs:
        return torch.randn(1, 8), torch.randn(1, 8), torch.arange(8) // 4

    def results(impl: str, *inputs: Tensor) -> Results:
        result = call(impl, *inputs)
        return (result,) if isinstance(result, Tensor) else tuple(result)

    return Case(
        op,
        "8 elements",
        0,
        (Bar("call_ms", 0.01),),
        inputs,
        lambda x, y, i: results("reference", x.double(), y.double(), i),
        _ours(results),
    )


# ---- gae -----------------------------------------------------------------------------------------------------------


def _gae(
    rows: int, columns: int, bars: tuple[Bar, ...], with_loop: bool, with_others: bool
) -> Case:
    """A loop over 131072 steps is left out, and one size is enough for the compiler and for verl."""
    shown = _some_rows(rows, 3)

    def inputs() -> Inputs:
        return torch.randn(rows, columns), torch.randn(rows, columns), _tool_spans(rows, columns)

    def some(results: Results) -> Results:
        return tuple(None if x is None else x[shown] for x in results)

    def expected(*inputs: Tensor) -> Results:
        found = plain.gae_float64(*(x[shown].cpu() for x in inputs), GAMMA, LAM)
        return tuple(x.to(inputs[0].device) for x in found)

    def ours(impl: str, *inputs: Tensor) -> Results:
        return tuple(fastrl.gae(*inputs, gamma=GAMMA, lam=LAM, impl=impl))

    def loop(*inputs: Tensor) -> Results:
        return plain.gae_loop(*inputs, GAMMA, LAM)

    def scan() -> Call:
        mode = "pointwise" if is_gpu() else "generic"
        compiled = _compiled(partial(plain.gae_by_scan, combine_mode=mode))
        return lambda *inputs: compiled(*inputs, GAMMA, LAM)

    def verl() -> Call:
        algorithms = verl_algorithms()

        def call(rewards: Tensor, values: Tensor, mask: Tensor) -> Results:
            result: Results = algorithms.compute_gae_advantage_return(
                rewards, values, mask.float(), GAMMA, LAM
            )
            return None, result[1] * mask  # type: ignore[operator]

        return call

    providers = list(_ours(ours, some))
    if with_loop:
        providers.append(Provider("eager", _always(loop), some, "a loop over the columns"))
    if with_others:
        note = "compute_gae_advantage_return; whitens the advantages too"
        providers.append(Provider("torch.compile", scan, some, "associative_scan", True))
        providers.append(Provider("verl", verl, some, note, True))
    size = f"{rows} x {columns} float32, mask"
    return Case("gae", size, 17 * rows * columns, bars, inputs, expected, tuple(providers))


# ---- group advantages and whitening --------------------------------------------------------------------------------


def _group_advantages(count: int) -> Case:
    def inputs() -> Inputs:
        return torch.rand(count), torch.arange(count)[torch.randperm(count)] // 8

    def ours(impl: str, rewards: Tensor, groups: Tensor) -> Results:
        return (fastrl.group_advantages(rewards, groups, impl=impl),)

    return Case(
        "group_advantages",
        f"{count} ids given, groups of 8",
        16 * count,
        (),
        inputs,
        lambda rewards, groups: ours("reference", rewards.double(), groups),
        (*_ours(ours), Provider("eager", _always(plain.group_advantages), note="scatter-adds")),
    )


def _whiten(rows: int, columns: int) -> Case:
    def inputs() -> Inputs:
        return torch.randn(rows, columns) + 1, _tool_spans(rows, columns)

    def ours(impl: str, x: Tensor, mask: Tensor) -> Results:
        return (fastrl.whiten(x, mask, impl=impl),)

    def verl() -> Call:
        functional = verl_functional()
        return lambda x, mask: (functional.masked_whiten(x, mask.float()) * mask,)

    return Case(
        "whiten",
        f"{rows} x {columns} float32, mask",
        14 * rows * columns,
        (),
        inputs,
        lambda x, mask: ours("reference", x.double(), mask),
        (
            *_ours(ours),
            Provider("eager", _always(plain.whiten), note="the same formula"),
            Provider("torch.compile", lambda: _compiled(plain.whiten), starts_slowly=True),
            Provider("verl", verl, note="masked_whiten", starts_slowly=True),
        ),
    )


# ---- the policy loss -----------------------------------------------------------------------------------------------


def _policy_loss(rows: int, columns: int) -> Case:
    def inputs() -> Inputs:
        logp = torch.randn(rows, columns) - 2
        old_logp, ref_logp = (logp + 0.2 * torch.randn(rows, columns) for _ in range(2))
        advantages, mask = torch.randn(rows, columns), _tool_spans(rows, columns)
        return logp.requires_grad_(), old_logp, ref_logp, advantages, mask

    def ours(impl: str, *inputs: Tensor) -> Results:
        logp, old_logp, ref_logp, advantages, mask = inputs
        out = fastrl.policy_loss(
            *(logp, old_logp, advantages, mask),
            dual_clip=3.0,
            ref_logp=ref_logp,
            kl="k3",
            kl_coef=KL_COEF,
            impl=impl,
        )
        return _with_gradient(logp, out.loss, out.metrics)

    def expected(*inputs: Tensor) -> Results:
        *wide, mask = inputs
        leaf = wide[0].detach().double().requires_grad_()
        return means(ours("reference", leaf, *(x.double() for x in wide[1:]), mask))

    def means(results: Results) -> Results:
        loss, gradient, metrics = results
        assert metrics is not None
        named = dict(zip(fastrl.POLICY_METRICS, metrics))
        return (
            loss,
            gradient,
            *(named[k] / named["tokens"] for k in ("clipped", "approx_kl", "ref_kl")),
        )

    def by(function: Callable[..., Any]) -> Call:
        return lambda *inputs: _with_gradient(inputs[0], *function(*inputs, KL_COEF))

    def verl() -> Call:
        algorithms = verl_algorithms()

        def loss(*inputs: Tensor) -> tuple[Tensor, ...]:
            logp, old_logp, ref_logp, advantages, mask, kl_coef = inputs
            float_mask = mask.float()
            loss, clip_fraction, approx_kl, _ = algorithms.compute_policy_loss(
                *(old_logp, logp, advantages, float_mask), cliprange=0.2
            )
            kl = algorithms.kl_penalty(logp, ref_logp, "k3")
            mean_kl = algorithms.agg_loss(kl, float_mask, "token-mean")
            metrics = (x.detach() for x in (clip_fraction, approx_kl, mean_kl))
            return (loss + kl_coef * mean_kl, *metrics)

        return by(loss)

    return Case(
        "policy_loss",
        f"{rows} x {columns} float32, mask, k3, forward and backward",
        21 * rows * columns,
        (Bar("bandwidth", 0.8),),
        inputs,
        expected,
        (
            *_ours(ours, means),
            Provider("eager", _always(by(plain.policy_loss)), note="the same formula"),
            Provider("torch.compile", lambda: by(_compiled(plain.policy_loss)), starts_slowly=True),
            Provider(
                "verl", verl, note="compute_policy_loss, kl_penalty, agg_loss", starts_slowly=True
            ),
        ),
    )


# ---- token log-probabilities ---------------------------------------------------------------------------------------


def _token_logprobs(rows: int, classes: int, backward: bool) -> Case:
    shown = _some_rows(rows, 64)

    def inputs() -> Inputs:
        logits = (3 * torch.randn(rows, classes)).to(torch.bfloat16)
        return logits.requires_grad_(backward), torch.randint(classes, (rows,))

    def results(logits: Tensor, logp: Tensor, entropy: Tensor) -> Results:
        if not backward:
            return logp, entropy
        gradient = torch.autograd.grad(logp.sum() - entropy.sum(), logits)[0]
        return logp.detach(), entropy.detach(), gradient

    def ours(impl: str, logits: Tensor, tokens: Tensor) -> Results:
        out = fastrl.token_logprobs(logits, tokens, entropy=True, impl=impl)
        assert out.entropy is not None
        return results(logits, out.logp, out.entropy)

    def expected(logits: Tensor, tokens: Tensor) -> Results:
        wide = logits.detach()[shown].double().requires_grad_(backward)
        return ours("reference", wide, tokens[shown])

    def some(results: Results) -> Results:
        return tuple(None if x is None else x[shown] for x in results)

    def by(function: Callable[..., Any]) -> Call:
        return lambda logits, tokens: results(logits, *function(logits, tokens))

    passes = 3 if backward else 1
    direction = ", forward and backward" if backward else ""
    return Case(
        "token_logprobs",
        f"{rows} x {classes} bfloat16, entropy{direction}",
        passes * rows * classes * 2,
        () if backward else (Bar("device_ms", 0.75),),
        inputs,
        expected,
        (
            *_ours(ours, some),
            Provider(
                "eager", _always(by(plain.token_logprobs)), some, "float32 log_softmax, gather"
            ),
            Provider(
                "torch.compile",
                lambda: by(_compiled(plain.token_logprobs)),
                some,
                starts_slowly=True,
            ),
        ),
        # A gradient in bfloat16 has 8 bits.
        tolerance=4e-3 if backward else TOLERANCE,
    )


# ---- from hidden states to the loss --------------------------------------------------------------------------------


def _linear_policy_loss(rows: int, columns: int, width: int, classes: int) -> Case:
    def inputs() -> Inputs:
        hidden = torch.randn(rows, columns, width).to(torch.bfloat16)
        weight = (torch.randn(classes, width) * width**-0.5).to(torch.bfloat16)
        tokens = torch.randint(classes, (rows, columns))
        logp = plain.token_logprobs((hidden @ weight.T).flatten(0, 1), tokens.flatten())[0]
        old_logp = logp.view(rows, columns) + 0.1 * torch.randn(rows, columns)
        leaves = (hidden.requires_grad_(), weight.requires_grad_())
        return (*leaves, tokens, old_logp, torch.randn(rows), _tool_spans(rows, columns))

    def gradients(hidden: Tensor, weight: Tensor, loss: Tensor) -> Results:
        return (loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))

    def ours(impl: str, *inputs: Tensor) -> Results:
        loss = fastrl.linear_policy_loss(*inputs, impl=impl).loss
        return gradients(*inputs[:2], loss)

    def eager(*inputs: Tensor) -> Results:
        hidden, weight, tokens, old_logp, advantages, mask = inputs
        logits = (hidden @ weight.T).flatten(0, 1)
        logp = plain.token_logprobs(logits, tokens.flatten())[0].view_as(old_logp)
        ratio = (logp - old_logp).exp()
        advantages = advantages[:, None]
        losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        return gradients(hidden, weight, (losses * mask).sum() / mask.sum())

    def products(hidden: Tensor, weight: Tensor, *_: Tensor) -> Results:
        flat = hidden.detach().flatten(0, 1)
        logits = flat @ weight.detach().T
        return None, logits @ weight.detach(), logits.T @ flat

    def expected(*inputs: Tensor) -> Results:
        hidden, weight, tokens, old_logp, advantages, mask = inputs
        leaves = (x.detach().double().requires_grad_() for x in (hidden, weight))
        return ours("reference", *leaves, tokens, old_logp.double(), advantages.double(), mask)

    return Case(
        "linear_policy_loss",
        f"{rows * columns} tokens, width {width}, {classes} classes, bfloat16, forward and backward",
        0,
        (Bar("products", 1.5),),
        inputs,
        expected,
        (
            Provider("fastrl", _always(partial(ours, "auto"))),
            Provider("eager", _always(eager), note="all logits at once"),
            Provider(
                "matrix products", _always(products), None, "the three that nobody can leave out"
            ),
        ),
        tolerance=2e-2,
    )
