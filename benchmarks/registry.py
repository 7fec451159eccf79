"""What is measured: cases (an op at a size) with everyone who can compute them, and the bars they must meet.

A case builds its inputs when it is prepared, so that only one lives at a time. Its providers return results in one form,
or bring a function that puts them into it; `expected` is that form in float64.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import fastrl
from benchmarks import plain
from benchmarks.peers import MissingPeer, verl_algorithms, verl_functional

# An entry of None is not compared: that provider does not compute it.
Results = tuple[Tensor | None, ...]

SCALES = ("full", "quick", "tiny")
GAMMA, LAM, KL_COEF = 0.99, 0.95, 0.001


class Bar(NamedTuple):
    """A figure that DESIGN section 8 demands.

    kind "speedup": the provider's time over fastrl's, at least `limit`; "bandwidth": the provider's bytes per second over
    those of a copy, at least; "overhead": the provider's time over that of torch.mul, at most;
    "memory": the provider's peak bytes over fastrl's, at least.
    """

    kind: str
    provider: str
    limit: float


def _as_they_are(results: Results) -> Results:
    return results


class Provider(NamedTuple):
    """One way to compute the case; `call` is what is timed."""

    name: str
    call: Callable[[], Results]
    comparable: Callable[[Results], Results] = _as_they_are
    note: str = ""


class Prepared(NamedTuple):
    providers: list[Provider]
    missing: dict[str, str]
    expected: Callable[[], Results]
    tolerance: float = 1e-4  # largest difference as a share of the largest expected value


class Case(NamedTuple):
    op: str
    size: str
    minimum_bytes: int
    bars: tuple[Bar, ...]
    prepare: Callable[[], Prepared]
    has_memory: bool = False  # peak bytes are counted too

    @property
    def name(self) -> str:
        return f"{self.op} {self.size}"


# The first provider of a case is fastrl as a caller meets it; ratios are against it.
FASTRL = "fastrl"


def cases(scale: str = "full", *, with_compile: bool = True) -> list[Case]:
    """Every case at its real size ("full"), a sixteenth or so ("quick"), or next to nothing ("tiny", for tests)."""
    builders = (
        *(_gae, _gae_long_rows, _gae_short_rows, _groups_of_labels, _groups_of_ids, _whiten),
        *(_policy_loss, _value_loss),
        *(_logprobs(151936, torch.float32), _logprobs(151936, torch.bfloat16)),
        *(_logprobs(49152, torch.float32), _logprobs(49152, torch.bfloat16)),
        _logprobs(151936, torch.float32, backward=True),
        _call_overhead,
    )
    index = SCALES.index(scale)
    return [build(index, with_compile) for build in builders]


def _prepared(
    expected: Callable[[], Results], *providers: Provider | Callable[[], Provider] | None
) -> Prepared:
    """Collect the providers; a function makes one and may find its peer missing."""
    found: list[Provider] = []
    missing: dict[str, str] = {}
    for provider in providers:
        if provider is None:
            continue
        if isinstance(provider, Provider):
            found.append(provider)
            continue
        try:
            found.append(provider())
        except MissingPeer as error:
            missing[provider.__name__.strip("_")] = str(error)
    return Prepared(found, missing, expected)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()  # a case compiles one function; what earlier ones left counts towards a limit
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False, fullgraph=True)
    return compiled


def _with_gradient(leaf: Tensor, loss: Tensor, *others: Tensor) -> Results:
    return (loss.detach(), torch.autograd.grad(loss, leaf)[0], *others)


# ---- gae -----------------------------------------------------------------------------------------------------------


def _tool_spans(rows: int, columns: int) -> Tensor:
    """A mask with a hole of 64 tokens in every five such spans: tool outputs within long answers, no padding."""
    spans = torch.rand(rows, -(-columns // 64)) < 0.8
    return spans.repeat_interleave(64, 1)[:, :columns].contiguous()


def _gae_case(
    rows: int, columns: int, bars: Sequence[Bar], with_compile: bool, with_loops: bool
) -> Case:
    def prepare() -> Prepared:
        rewards, values = torch.randn(rows, columns), torch.randn(rows, columns)
        mask = _tool_spans(rows, columns)
        out = torch.empty(rows, columns), torch.empty(rows, columns)
        options = {"gamma": GAMMA, "lam": LAM}

        def expected() -> Results:
            return plain.gae_float64(rewards, values, mask, GAMMA, LAM)

        def verl() -> Provider:
            algorithms = verl_algorithms()
            float_mask = mask.float()

            def call() -> Results:
                result: Results = algorithms.compute_gae_advantage_return(
                    rewards, values, float_mask, GAMMA, LAM
                )
                return result

            return Provider(
                "verl",
                call,
                lambda r: (None, r[1] * float_mask),  # type: ignore[operator]
                "compute_gae_advantage_return; whitens the advantages too",
            )

        def scan() -> Provider:
            compiled = _compiled(plain.gae_by_scan)
            return Provider(
                "torch.compile",
                lambda: compiled(rewards, values, mask, GAMMA, LAM),
                note="associative_scan",
            )

        return _prepared(
            expected,
            Provider(FASTRL, lambda: tuple(fastrl.gae(rewards, values, mask, **options))),
            Provider(
                "fastrl out=",
                lambda: tuple(fastrl.gae(rewards, values, mask, out=out, **options)),
                note="results into the same memory each time",
            ),
            Provider(
                "eager",
                lambda: plain.gae_loop(rewards, values, mask, GAMMA, LAM),
                note="loop over time",
            )
            if with_loops
            else None,
            scan if with_compile else None,
            verl if with_loops else None,
        )

    return Case(
        "gae", f"{rows} x {columns} float32, mask", 17 * rows * columns, tuple(bars), prepare
    )


def _gae(scale: int, with_compile: bool) -> Case:
    rows, columns = ((1024, 8192), (256, 2048), (3, 100))[scale]
    bars = (
        Bar("bandwidth", "fastrl out=", 0.8),
        Bar("speedup", "verl", 300),
        Bar("speedup", "torch.compile", 20),
    )
    return _gae_case(rows, columns, bars, with_compile, with_loops=True)


def _gae_long_rows(scale: int, with_compile: bool) -> Case:
    """Loops would take a minute a round, and the scan's graph minutes to compile."""
    del with_compile
    rows, columns = ((16, 131072), (16, 8192), (2, 300))[scale]
    return _gae_case(rows, columns, (), False, with_loops=scale == 2)


def _gae_short_rows(scale: int, with_compile: bool) -> Case:
    rows, columns = ((16384, 64), (2048, 64), (5, 7))[scale]
    return _gae_case(rows, columns, (), with_compile, with_loops=True)


# ---- group advantages and whitening --------------------------------------------------------------------------------


def _samples(scale: int) -> tuple[int, Tensor, list[str], Tensor]:
    """Scores in groups of 8, their labels as trainers make them (uuid strings, shuffled), and dense ids."""
    count = (16384, 2048, 32)[scale]
    scores = torch.rand(count)
    order = torch.randperm(count)
    names = [str(uuid.UUID(int=int(i), version=4)) for i in torch.randint(2**62, (count // 8,))]
    labels = [names[int(i) // 8] for i in order]
    return count, scores, labels, fastrl.group_ids(labels)


def _verl_groups(function: str, scores: Tensor, index: object) -> Provider:
    algorithms = verl_algorithms()
    column, mask = scores[:, None], torch.ones(len(scores), 1)

    def call() -> Results:
        return (getattr(algorithms, function)(column, mask, index)[0],)

    return Provider("verl", call, lambda r: (r[0][:, 0],), function)  # type: ignore[index]


def _groups_of_labels(scale: int, with_compile: bool) -> Case:
    del with_compile
    count, scores, labels, ids = _samples(scale)

    def prepare() -> Prepared:
        array = np.array(labels, dtype=object)

        def verl() -> Provider:
            return _verl_groups("compute_grpo_outcome_advantage", scores, array)

        def verl_vectorised() -> Provider:
            one = _verl_groups("compute_grpo_vectorized_outcome_advantage", scores, array)
            return one._replace(name="verl vectorised")

        return _prepared(
            lambda: (fastrl.group_advantages(scores.double(), ids, impl="reference"),),
            Provider(FASTRL, lambda: (fastrl.group_advantages(scores, array),)),  # type: ignore[arg-type]
            verl,
            verl_vectorised,
        )

    bars = (Bar("speedup", "verl", 100),)
    return Case("group_advantages", f"{count} uuid strings, groups of 8", 8 * count, bars, prepare)


def _groups_of_ids(scale: int, with_compile: bool) -> Case:
    del with_compile
    count, scores, _, ids = _samples(scale)

    def prepare() -> Prepared:
        def verl_vectorised() -> Provider:
            one = _verl_groups("compute_grpo_vectorized_outcome_advantage", scores, ids)
            return one._replace(name="verl vectorised")

        return _prepared(
            lambda: (fastrl.group_advantages(scores.double(), ids, impl="reference"),),
            Provider(FASTRL, lambda: (fastrl.group_advantages(scores, ids),)),
            Provider("eager", lambda: plain.group_advantages(scores, ids), note="scatter-adds"),
            verl_vectorised,
        )

    bars = (Bar("speedup", "verl vectorised", 1),)
    return Case("group_advantages", f"{count} ids given, groups of 8", 16 * count, bars, prepare)


def _whiten(scale: int, with_compile: bool) -> Case:
    rows, columns = ((1024, 8192), (256, 2048), (3, 100))[scale]

    def prepare() -> Prepared:
        x, mask = torch.randn(rows, columns) + 1, _tool_spans(rows, columns)

        def verl() -> Provider:
            functional, float_mask = verl_functional(), mask.float()
            return Provider(
                "verl",
                lambda: (functional.masked_whiten(x, float_mask),),
                lambda r: (r[0] * mask,),  # type: ignore[operator]
                "masked_whiten",
            )

        def compiled() -> Provider:
            function = _compiled(plain.whiten)
            return Provider("torch.compile", lambda: function(x, mask))

        return _prepared(
            lambda: (fastrl.whiten(x.double(), mask, impl="reference"),),
            Provider(FASTRL, lambda: (fastrl.whiten(x, mask),)),
            Provider("eager", lambda: plain.whiten(x, mask)),
            compiled if with_compile else None,
            verl,
        )

    # The statistics need the input and the mask once, the result needs them again.
    return Case("whiten", f"{rows} x {columns} float32, mask", 14 * rows * columns, (), prepare)


# ---- losses --------------------------------------------------------------------------------------------------------


def _loss_size(scale: int) -> tuple[int, int]:
    return ((128, 8192), (32, 2048), (3, 100))[scale]


def _policy_loss(scale: int, with_compile: bool) -> Case:
    rows, columns = _loss_size(scale)

    def prepare() -> Prepared:
        logp = (torch.randn(rows, columns) - 2).requires_grad_()
        old_logp = logp.detach() + 0.2 * torch.randn(rows, columns)
        ref_logp = logp.detach() + 0.2 * torch.randn(rows, columns)
        advantages, mask = torch.randn(rows, columns), _tool_spans(rows, columns)
        options: dict[str, Any] = {"dual_clip": 3.0, "kl": "k3", "kl_coef": KL_COEF}

        def ours(dtype: torch.dtype, impl: str = "auto") -> Results:
            new, old, ref, adv = (x.to(dtype) for x in (logp, old_logp, ref_logp, advantages))
            out = fastrl.policy_loss(new, old, adv, mask, ref_logp=ref, impl=impl, **options)
            return _with_gradient(logp, *out)

        def means(results: Results) -> Results:
            loss, gradient, metrics = results
            assert metrics is not None
            named = dict(zip(fastrl.POLICY_METRICS, metrics))
            shown = (named[k] / named["tokens"] for k in ("clipped", "approx_kl", "ref_kl"))
            return (loss, gradient, *shown)

        def by(function: Callable[..., Results]) -> Callable[[], Results]:
            return lambda: _with_gradient(
                logp, *function(logp, old_logp, ref_logp, advantages, mask, KL_COEF)
            )

        def compiled() -> Provider:
            return Provider(
                "torch.compile", by(_compiled(plain.policy_loss)), note="the same formula"
            )

        def verl() -> Provider:
            algorithms, float_mask = verl_algorithms(), mask.float()

            def call() -> Results:
                loss, clip_fraction, approx_kl, _ = algorithms.compute_policy_loss(
                    *(old_logp, logp, advantages, float_mask), cliprange=0.2
                )
                kl = algorithms.kl_penalty(logp, ref_logp, "k3")
                mean_kl = algorithms.agg_loss(kl, float_mask, "token-mean")
                metrics = (x.detach() for x in (clip_fraction, approx_kl, mean_kl))
                return _with_gradient(logp, loss + KL_COEF * mean_kl, *metrics)

            return Provider("verl", call, note="compute_policy_loss, kl_penalty, agg_loss")

        return _prepared(
            lambda: means(ours(torch.float64, "reference")),
            Provider(FASTRL, lambda: ours(torch.float32), means),
            Provider("eager", by(plain.policy_loss), note="the same formula"),
            compiled if with_compile else None,
            verl,
        )

    bars = (Bar("speedup", "verl", 10), Bar("speedup", "torch.compile", 1.5))
    return Case(
        "policy_loss",
        f"{rows} x {columns} float32, mask, k3, forward and backward",
        21 * rows * columns,
        bars,
        prepare,
    )


def _value_loss(scale: int, with_compile: bool) -> Case:
    rows, columns = _loss_size(scale)

    def prepare() -> Prepared:
        values = torch.randn(rows, columns).requires_grad_()
        old_values = values.detach() + 0.5 * torch.randn(rows, columns)
        returns, mask = torch.randn(rows, columns), _tool_spans(rows, columns)

        def ours(dtype: torch.dtype, impl: str = "auto") -> Results:
            new, old, target = (x.to(dtype) for x in (values, old_values, returns))
            return _with_gradient(values, *fastrl.value_loss(new, old, target, mask, impl=impl))

        def means(results: Results) -> Results:
            loss, gradient, metrics = results
            assert metrics is not None
            named = dict(zip(fastrl.VALUE_METRICS, metrics))
            return loss, gradient, named["clipped"] / named["tokens"]

        def compiled() -> Provider:
            function = _compiled(plain.value_loss)
            return Provider(
                "torch.compile",
                lambda: _with_gradient(values, *function(values, old_values, returns, mask)),
                note="the same formula",
            )

        def verl() -> Provider:
            algorithms, float_mask = verl_algorithms(), mask.float()

            def call() -> Results:
                loss, clip_fraction = algorithms.compute_value_loss(
                    values, returns, old_values, float_mask, cliprange_value=0.5
                )
                return _with_gradient(values, loss, clip_fraction.detach())

            return Provider("verl", call, note="compute_value_loss")

        return _prepared(
            lambda: means(ours(torch.float64, "reference")),
            Provider(FASTRL, lambda: ours(torch.float32), means),
            Provider(
                "eager",
                lambda: _with_gradient(
                    values, *plain.value_loss(values, old_values, returns, mask)
                ),
                note="the same formula",
            ),
            compiled if with_compile else None,
            verl,
        )

    return Case(
        "value_loss",
        f"{rows} x {columns} float32, mask, forward and backward",
        17 * rows * columns,
        (),
        prepare,
    )


# ---- token log-probabilities ---------------------------------------------------------------------------------------


def _logprobs(
    vocabulary: int, dtype: torch.dtype, backward: bool = False
) -> Callable[[int, bool], Case]:
    def build(scale: int, with_compile: bool) -> Case:
        return _logprobs_case(scale, with_compile, vocabulary, dtype, backward)

    return build


def _logprobs_case(
    scale: int, with_compile: bool, vocabulary: int, dtype: torch.dtype, backward: bool
) -> Case:
    rows = (128 if vocabulary > 100_000 else 384, 16, 3)[scale]
    classes = vocabulary if scale < 2 else vocabulary // 1000

    def prepare() -> Prepared:
        logits = (3 * torch.randn(rows, classes)).to(dtype).requires_grad_(backward)
        tokens = torch.randint(classes, (rows,))

        def results(logp: Tensor, entropy: Tensor) -> Results:
            if not backward:
                return logp, entropy
            gradient = torch.autograd.grad(logp.sum() - entropy.sum(), logits)[0]
            return logp.detach(), entropy.detach(), gradient

        def ours(x: Tensor, impl: str = "auto") -> Results:
            out = fastrl.token_logprobs(x, tokens, entropy=True, impl=impl)
            assert out.entropy is not None
            return results(out.logp, out.entropy)

        def compiled() -> Provider:
            function = _compiled(plain.token_logprobs)
            return Provider("torch.compile", lambda: results(*function(logits, tokens)))

        def verl() -> Provider:
            functional = verl_functional()

            def call() -> Results:
                wide = logits.float()
                return results(
                    functional.logprobs_from_logits(wide, tokens),
                    functional.entropy_from_logits(wide),
                )

            return Provider("verl", call, note="logprobs_from_logits, entropy_from_logits")

        return _prepared(
            lambda: ours(logits.double(), "reference"),
            Provider(FASTRL, lambda: ours(logits)),
            Provider(
                "eager",
                lambda: results(*plain.token_logprobs(logits, tokens)),
                note="float32 log_softmax, gather, entropy",
            ),
            compiled if with_compile else None,
            verl,
        )

    name = str(dtype).removeprefix("torch.")
    bars = ()
    if vocabulary > 100_000 and not backward:
        bars = (Bar("speedup", "eager", 5),)
    passes = 3 if backward else 1
    direction = ", forward and backward" if backward else ""
    return Case(
        "token_logprobs",
        f"{rows} x {classes} {name}, entropy{direction}",
        passes * rows * classes * dtype.itemsize,
        bars,
        prepare,
    )


# ---- calls on next to nothing --------------------------------------------------------------------------------------


def _call_overhead(scale: int, with_compile: bool) -> Case:
    """Each op on eight elements beside torch.mul on eight: what a call costs before it computes."""
    del scale, with_compile

    def prepare() -> Prepared:
        x, y = torch.randn(1, 8), torch.randn(1, 8)
        ids = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
        labels = list("aaaabbbb")
        token = torch.tensor([3])

        def one(call: Callable[[], Any]) -> Callable[[], Results]:
            def run() -> Results:
                result = call()
                return (result,) if isinstance(result, Tensor) else tuple(result)

            return run

        calls: dict[str, Callable[[], Any]] = {
            "gae": lambda: fastrl.gae(x, y, gamma=GAMMA, lam=LAM),
            "discounted_returns": lambda: fastrl.discounted_returns(x, gamma=GAMMA),
            "affine_scan": lambda: fastrl.affine_scan(x, y),
            "group_ids": lambda: fastrl.group_ids(labels),
            "group_advantages": lambda: fastrl.group_advantages(x[0], ids),
            "whiten": lambda: fastrl.whiten(x),
            "policy_loss": lambda: fastrl.policy_loss(x, y, x),
            "value_loss": lambda: fastrl.value_loss(x, y, y),
            "token_logprobs": lambda: fastrl.token_logprobs(x, token),
        }
        # Eight elements are right or wrong in the tests of the ops; here nobody is compared.
        providers = [Provider("torch.mul", one(lambda: torch.mul(x, y)), lambda r: ())]
        providers += [Provider(name, one(call), lambda r: ()) for name, call in calls.items()]
        return Prepared(providers, {}, lambda: ())

    bars = tuple(
        Bar("overhead", name, 3)
        for name in (
            *("gae", "discounted_returns", "affine_scan", "group_ids", "group_advantages"),
            *("whiten", "policy_loss", "value_loss", "token_logprobs"),
        )
    )
    return Case("call overhead", "8 elements", 0, bars, prepare)


def selected(all_cases: Sequence[Case], ops: Sequence[str]) -> Iterator[Case]:
    """The cases of the ops named, or all of them."""
    for case in all_cases:
        if not ops or case.op.replace(" ", "_") in ops:
            yield case
