"""A Triton kernel compiles once for any lengths, rows, strides, addresses and numbers: new ones must not stall a training run.

Compilations are counted by the key under which Triton caches them; nothing is compiled, and tensors need no memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import _library

pytest.importorskip("triton", reason="triton is not installed")
if _library.triton_interprets:
    pytest.skip("Triton interprets, so that nothing compiles", allow_module_level=True)

from benchmarks import triton_resources
from fastrl.ops.affine_scan import triton as affine_scan
from fastrl.ops.gae import triton as gae
from fastrl.ops.group_advantages import triton as group_advantages
from fastrl.ops.policy_loss import triton as policy_loss
from fastrl.ops.token_logprobs import triton as token_logprobs
from fastrl.ops.value_loss import triton as value_loss
from fastrl.ops.whiten import triton as whiten

Call = Callable[[], Any]

CARRY, ZERO_STEP, IGNORE = 0, 1, 2
INF = float("inf")

# One, multiples of 16 and of 2, primes, more tokens than 32 bits can count.
LENGTHS = [1, 2, 16, 31, 100, 128, 1009, 1024, 4096, 2**20 + 7, 2**32]
ROWS = [1, 2, 16, 17, 300, 2**20 + 1]
# Rows begin so many elements after an aligned address, and end so many before the next one begins.
GAPS = [(0, 0), (1, 0), (4, 3), (0, 16)]


def compilations(calls: Iterable[Call]) -> int:
    target = triton_resources.TARGETS["cuda"][0]
    found = itertools.chain.from_iterable(map(triton_resources.launches, calls))
    return len({launch.key(target) for launch in found})


def compile_together(calls: Iterable[Call]) -> bool:
    """Whether all that these calls launch is compiled for the first one already."""
    first, *others = calls
    return compilations([first, *others]) == compilations([first])


def tokens(
    rows: int, length: int, gaps: tuple[int, int] = (0, 0), dtype: torch.dtype = torch.float32
) -> Tensor:
    before, behind = gaps
    x = torch.empty(rows, before + length + behind, dtype=dtype, device="meta")
    return x[:, before : before + length]


def packed(length: int, before: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return tokens(1, length, (before, 0), dtype)[0]


def offsets(rows: int) -> Tensor:
    return torch.empty(rows + 1, dtype=torch.int32, device="meta")


def shapes(lengths: Iterable[int] = LENGTHS) -> list[tuple[int, int, tuple[int, int]]]:
    """Rows, length and gaps: each of them varied, the others as they usually are."""
    first, *_ = lengths = list(lengths)
    found = [(3, length, (0, 0)) for length in lengths]
    found += [(rows, first, (0, 0)) for rows in ROWS]
    return found + [(3, first, gaps) for gaps in GAPS]


# ---- scans: tiles of 32, 128 or 512 columns, and few long rows in three passes

BY_ROW = [
    [n for n in LENGTHS if n <= 32],
    [n for n in LENGTHS if 32 < n <= 128],
    [n for n in LENGTHS if 128 < n <= 4096],
]
FEW_LONG = [(rows, n, gaps) for rows, n, gaps in shapes([2**13, *LENGTHS[-2:]]) if rows < 256]


def a_scan(x: Tensor, cu_seqlens: Tensor | None = None, adjoint: bool = False) -> Call:
    if adjoint:
        return lambda: affine_scan.affine_scan_backward(x, x, x, None, cu_seqlens, True)
    return lambda: affine_scan.affine_scan(x, x, None, cu_seqlens, True)


def a_gae(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    gamma: float = 0.99,
    lam: float = 0.95,
    holes: int = CARRY,
    fill_carry: bool = False,
    returns_lam: float = -1.0,
) -> Call:
    numbers = (gamma, lam, returns_lam, holes, fill_carry)
    mask = torch.empty_like(x, dtype=torch.bool)
    return lambda: gae.gae(x, x, mask, None, None, None, cu_seqlens, *numbers)


def a_gae_backward(x: Tensor, cu_seqlens: Tensor | None = None) -> Call:
    mask = torch.empty_like(x, dtype=torch.bool)
    return lambda: gae.gae_backward(x, x, mask, None, None, cu_seqlens, 0.9, 0.8, -1.0, CARRY)


def some_returns(x: Tensor, cu_seqlens: Tensor | None = None) -> Call:
    return lambda: gae.discounted_returns(x, None, None, None, cu_seqlens, 0.9, CARRY, False)


def a_scan_backward(x: Tensor, cu_seqlens: Tensor | None = None) -> Call:
    return a_scan(x, cu_seqlens, adjoint=True)


SCANS = [a_scan, a_scan_backward, a_gae, a_gae_backward, some_returns]


@pytest.mark.parametrize("scan", SCANS)
def test_scans_compile_once_for_each_tile(scan: Callable[..., Call]) -> None:
    for lengths in BY_ROW:
        assert compile_together(scan(tokens(*shape)) for shape in shapes(lengths))
    assert compilations(scan(tokens(3, n)) for n in LENGTHS if n <= 4096) == 3


@pytest.mark.parametrize("scan", SCANS)
def test_scans_of_few_long_and_of_packed_rows_compile_once(scan: Callable[..., Call]) -> None:
    assert compile_together(scan(tokens(*shape)) for shape in FEW_LONG)
    short, long = [1, 16, 1009, 4096], [4097, 2**20 + 7, 2**32]
    for lengths in (short, long):
        assert compile_together(
            scan(packed(n, before), offsets(rows))
            for n, before, rows in itertools.product(lengths, (0, 1, 4), (1, 15, 16, 300))
        )


def test_gae_compiles_once_for_any_numbers() -> None:
    numbers = itertools.product((0.0, 0.5, 0.99, 1.0), (0.0, 0.9, 1.0))
    assert compile_together(a_gae(tokens(3, 200), None, gamma, lam) for gamma, lam in numbers)
    two_lambdas = (0.0, 0.5, 1.0)
    assert compile_together(a_gae(tokens(3, 200), returns_lam=value) for value in two_lambdas)


def test_gae_compiles_for_each_set_of_flags() -> None:
    flags = itertools.product((CARRY, ZERO_STEP, IGNORE), (False, True), (-1.0, 1.0))
    calls = [
        a_gae(tokens(3, 200), holes=holes, fill_carry=fill, returns_lam=returns_lam)
        for holes, fill, returns_lam in flags
    ]
    assert compilations(calls) == 12
    dtypes = (torch.float32, torch.float64)
    assert compilations(a_gae(tokens(3, 200, dtype=dtype)) for dtype in dtypes) == 2


# ---- logits


def some_logprobs(
    classes: int,
    temperature: float = 1.0,
    entropy: bool = True,
    rows: int = 2,
    adjoint: bool = False,
) -> Call:
    logits, chosen = tokens(rows, classes), packed(rows, dtype=torch.int64)
    if adjoint:
        logp, statistics = packed(rows), tokens(rows, 3)
        return lambda: token_logprobs.token_logprobs_backward(
            logp, logp, logits, chosen, None, temperature, statistics
        )
    return lambda: token_logprobs.token_logprobs(logits, chosen, None, temperature, entropy)


@pytest.mark.parametrize("adjoint", [False, True])
def test_token_logprobs_compile_for_two_tiles_with_and_without_vectors(adjoint: bool) -> None:
    """1024 classes at once or 4096; float32 rows are aligned to 16 bytes when 4 divides the classes."""
    kinds = [[1028, 4096, 32_000, 151_936], [1029, 4095, 50_257], [4, 16, 1000, 1024], [1, 2, 1009]]
    for classes in kinds:
        assert compile_together(some_logprobs(v, adjoint=adjoint) for v in classes)
    all_classes = itertools.chain.from_iterable(kinds)
    assert compilations(some_logprobs(v, adjoint=adjoint) for v in all_classes) == 4


@pytest.mark.parametrize("adjoint", [False, True])
def test_token_logprobs_compile_once_for_any_temperature_and_rows(adjoint: bool) -> None:
    temperatures = [some_logprobs(4096, t, adjoint=adjoint) for t in (1.0, 0.0, 0.1, 0.7, 2.0)]
    assert compile_together(temperatures)
    assert compile_together(some_logprobs(4096, rows=rows, adjoint=adjoint) for rows in ROWS)
    assert compilations(some_logprobs(4096, entropy=entropy) for entropy in (False, True)) == 2


# ---- losses


def a_value_loss(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    clip: float = 0.2,
    huber_delta: float = INF,
    denom: float = 0.0,
) -> Call:
    mask = torch.empty_like(x, dtype=torch.bool)
    return lambda: value_loss.value_loss(
        x, x, x, mask, cu_seqlens, None, denom, clip, huber_delta, 0, True
    )


# clip_low, clip_high, dual_clip, ratio_cap, log_ratio_clamp, kl_coef, kl_input_clamp, kl_clamp, entropy_coef
NUMBERS = [0.2, 0.28, 3.0, INF, 20.0, 0.1, 20.0, 10.0, 0.1]


def a_policy_loss(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    ratio: int = 0,
    numbers: list[float] = NUMBERS,
    denom: float = 0.0,
) -> Call:
    mask = torch.empty_like(x, dtype=torch.bool)
    choices = [ratio, 0, 2, 0, 3]
    return lambda: policy_loss.policy_loss(
        x, x, x, mask, None, x, x, cu_seqlens, None, denom, numbers, choices, True, True
    )


def a_sequence_loss(x: Tensor, cu_seqlens: Tensor | None = None) -> Call:
    return a_policy_loss(x, cu_seqlens, ratio=1)


def a_sequence_token_loss(x: Tensor, cu_seqlens: Tensor | None = None) -> Call:
    return a_policy_loss(x, cu_seqlens, ratio=2)


@pytest.mark.parametrize(
    "loss", [a_value_loss, a_policy_loss, a_sequence_loss, a_sequence_token_loss]
)
def test_losses_compile_once_for_any_rows(loss: Callable[..., Call]) -> None:
    short = [n for n in LENGTHS if n <= 4096]
    assert compile_together(loss(tokens(*shape)) for shape in shapes(short))
    assert compile_together(loss(tokens(*shape)) for shape in FEW_LONG)
    for lengths in (short, LENGTHS[-2:]):
        assert compile_together(
            loss(packed(n, before), offsets(rows))
            for n, before, rows in itertools.product(lengths, (0, 1, 4), (1, 15, 16, 300))
        )


def test_losses_compile_once_for_any_numbers() -> None:
    x = tokens(3, 200)
    values = (0.0, 0.1, 1.0, 16.0)
    pairs = itertools.product(values, (0.5, 1.0, INF))
    assert compile_together(a_value_loss(x, None, clip, delta) for clip, delta in pairs)
    assert compile_together(a_value_loss(x, denom=denom) for denom in values)
    assert compile_together(a_policy_loss(x, denom=denom) for denom in values)
    others = [
        [*NUMBERS[:i], value, *NUMBERS[i + 1 :]]
        for i, value in itertools.product(range(len(NUMBERS)), values)
        if i != 3  # whether there is a ratio_cap is a flag, its value is not
    ]
    assert compile_together(a_policy_loss(x, numbers=numbers) for numbers in [NUMBERS, *others])
    caps = [[*NUMBERS[:3], cap, *NUMBERS[4:]] for cap in (1.0, 2.0, 16.0, 10.5)]
    assert compile_together(a_policy_loss(x, numbers=numbers) for numbers in caps)


# ---- statistics


def some_groups(
    samples: int,
    objectives: int = 1,
    eps: float = 1e-6,
    ddof: int = 1,
    scale: int = 0,
    before: int = 0,
) -> Call:
    rewards = tokens(samples, objectives, (before, 0))
    weights = packed(objectives, before, torch.float64)
    groups = packed(samples, before, torch.int64)
    return lambda: group_advantages.group_advantages(
        rewards, groups, None, weights, None, 0, scale, ddof, eps, False
    )


def groups_of_tokens(x: Tensor) -> Call:
    groups, mask = packed(x.shape[0], dtype=torch.int64), torch.empty_like(x, dtype=torch.bool)
    return lambda: group_advantages.group_advantages(
        x, groups, None, None, mask, 2, 0, 1, 1e-6, False
    )


def test_group_advantages_compile_once_for_any_samples_and_numbers() -> None:
    assert compile_together(some_groups(samples, scale=1) for samples in [3, *ROWS])
    assert compile_together(some_groups(64, objectives) for objectives in (3, 1, 2, 16, 17))
    assert compile_together(some_groups(64, before=before) for before in (0, 1, 4))
    numbers = itertools.product((1e-6, 0.0, 1.0), (1, 0, 16))
    assert compile_together(some_groups(64, eps=eps, ddof=ddof) for eps, ddof in numbers)


def test_group_advantages_of_tokens_compile_once_for_each_tile() -> None:
    calls = [[groups_of_tokens(tokens(*shape)) for shape in shapes(n)] for n in BY_ROW]
    assert all(map(compile_together, calls))
    only_advantages_differ = compilations(calls[0]) + 2
    assert compilations(itertools.chain(*calls)) == only_advantages_differ


def some_whitening(x: Tensor, ddof: int = 1, eps: float = 1e-8) -> Call:
    mask = torch.empty_like(x, dtype=torch.bool)
    moments = packed(3, dtype=torch.float64)

    def call() -> None:
        whiten.masked_moments(x, mask)
        whiten.whiten_apply(x, mask, moments, ddof, eps, 0, True)

    return call


def test_whiten_compiles_once_for_any_sizes_and_numbers() -> None:
    assert compile_together(some_whitening(tokens(*shape)) for shape in shapes())
    x = tokens(3, 100)
    numbers = itertools.product((1, 0, 16), (1e-8, 0.0, 1.0))
    assert compile_together(some_whitening(x, ddof, eps) for ddof, eps in numbers)
