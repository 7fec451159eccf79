"""The Triton kernels compile for every GPU without one, keep their budgets, and compile once for any numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastrl import _library

pytest.importorskip("triton")
if _library.triton_interprets:
    pytest.skip("Triton interprets, so that nothing compiles", allow_module_level=True)

from benchmarks import budget, cuda_resources, triton_resources
from benchmarks.cuda_resources import Resources
from fastrl.ops.gae import triton as gae
from fastrl.ops.token_logprobs import triton as token_logprobs

CARRY, ZERO_STEP, IGNORE = 0, 1, 2


@pytest.fixture(autouse=True)
def _compiles_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", triton_resources.TARGETS)
def test_every_example_keeps_its_budget(backend: str) -> None:
    if backend == "cuda" and cuda_resources.cuobjdump() is None:
        pytest.skip("no cuobjdump, neither on PATH nor in triton")
    measured = triton_resources.all_resources(backend)
    assert not budget.exceeded(f"triton.{backend}", measured)


def test_a_change_beyond_the_budget_shows_both_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "budget.toml"
    kept = Resources(registers=40, shared_bytes=512, stack_bytes=0, spills=0, wide_load_share=0.5)
    path.write_text(budget.text_of("triton.cuda", {"a": kept, "gone": kept}))
    more = Resources(registers=41, shared_bytes=516, stack_bytes=8, spills=2, wide_load_share=0.4)
    less = Resources(registers=39, shared_bytes=0, stack_bytes=0, spills=0, wide_load_share=1.0)
    assert budget.exceeded("triton.cuda", {"a": kept, "gone": less}, path) == []
    assert budget.exceeded("triton.cuda", {"a": more, "new": kept}, path) == [
        "triton.cuda: a: 2 spills, budget 0",
        "triton.cuda: a: 8 bytes of stack, budget 0",
        "triton.cuda: a: 41 registers, budget 40",
        "triton.cuda: a: 516 bytes of shared memory, budget 512",
        "triton.cuda: a: 0.4 of the loads of 128 bits, budget 0.5",
        "triton.cuda: new: no budget; run python -m benchmarks.budget --write",
        "triton.cuda: gone: a budget without a kernel",
    ]
    monkeypatch.setattr(budget, "compiler", lambda part: "another")
    other = budget.exceeded("triton.cuda", {"a": more, "gone": kept}, path)
    assert [line.split(": ")[2] for line in other] == [
        "2 spills, budget 0",
        "8 bytes of stack, budget 0",
    ]


def compilations(calls: list[Callable[[], Any]]) -> int:
    return len({launch.key() for call in calls for launch in triton_resources.launches(call)})


def a_gae(
    length: int,
    gamma: float = 0.99,
    lam: float = 0.95,
    holes: int = CARRY,
    fill_carry: bool = False,
    returns_lam: float = -1.0,
    dtype: torch.dtype = torch.float32,
    rows: int = 3,
    offset: int = 0,
) -> Callable[[], Any]:
    """GAE of rows that begin ``offset`` elements after an aligned address."""
    x = torch.zeros(rows * length + offset, dtype=dtype)[offset:].view(rows, length)
    numbers = (gamma, lam, returns_lam, holes, fill_carry)
    return lambda: gae.gae(x, x, torch.ones(rows, length).bool(), None, None, None, None, *numbers)


def test_gae_compiles_three_times_for_any_length() -> None:
    """The tile takes 32 columns, 128 or 512; nothing else depends on the length."""
    lengths = [1, 2, 16, 31, 32, 33, 64, 100, 127, 128, 129, 160, 512, 1000, 1024, 4097, 70_000]
    assert compilations([a_gae(t) for t in lengths if t <= 32]) == 1
    assert compilations([a_gae(t) for t in lengths if 32 < t <= 128]) == 1
    assert compilations([a_gae(t) for t in lengths if t > 128]) == 1
    assert compilations([a_gae(t) for t in lengths]) == 3


def test_gae_compiles_once_for_any_numbers_rows_and_addresses() -> None:
    numbers = [(g, c) for g in (0.0, 0.5, 0.99, 1.0) for c in (0.0, 0.9, 1.0)]
    calls = [a_gae(200, gamma, lam) for gamma, lam in numbers]
    calls += [a_gae(200, rows=rows, offset=offset) for rows in (1, 16, 17) for offset in (0, 1, 4)]
    assert compilations(calls) == 1


def test_gae_compiles_for_each_set_of_flags() -> None:
    flags = [
        {"holes": holes, "fill_carry": fill, "returns_lam": returns_lam}
        for holes in (CARRY, ZERO_STEP, IGNORE)
        for fill in (False, True)
        for returns_lam in (-1.0, 1.0)
    ]
    assert compilations([a_gae(200, **f) for f in flags]) == 12
    two_lambdas = [a_gae(200, returns_lam=value) for value in (0.0, 0.5, 1.0)]
    assert compilations(two_lambdas) == 1
    assert compilations([a_gae(200, dtype=t) for t in (torch.float32, torch.float64)]) == 2


def some_logprobs(
    classes: int, temperature: float = 1.0, entropy: bool = True
) -> Callable[[], Any]:
    logits, tokens = torch.zeros(2, classes), torch.zeros(2, dtype=torch.long)
    return lambda: token_logprobs.token_logprobs(logits, tokens, None, temperature, entropy)


def test_token_logprobs_compile_for_two_tiles_with_and_without_vectors() -> None:
    """1024 classes at once or 4096; float32 rows are aligned to 16 bytes when 4 divides the classes."""
    aligned, narrow = [1028, 4096, 32_000, 151_936], [4, 16, 1000, 1024]
    assert compilations([some_logprobs(v) for v in aligned]) == 1
    assert compilations([some_logprobs(v) for v in aligned + narrow]) == 2
    assert compilations([some_logprobs(v) for v in (1029, 4095, 50_257)]) == 1
    assert compilations([some_logprobs(v) for v in (1028, 4096, 1029, 50_257)]) == 2


def test_token_logprobs_compile_once_for_any_temperature() -> None:
    assert compilations([some_logprobs(4096, t) for t in (0.0, 0.1, 0.7, 1.0, 2.0)]) == 1
    assert compilations([some_logprobs(4096, entropy=e) for e in (False, True)]) == 2
