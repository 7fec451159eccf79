"""The registry under pytest-benchmark: ``pytest benchmarks --benchmark-only``, a group per case.

For comparing runs and saving them; `run.py` is the table of ratios. FASTRL_BENCH_SCALE=quick or tiny shrinks the sizes,
FASTRL_BENCH_COMPILE=0 leaves torch.compile out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch

from benchmarks.registry import Case, Prepared, cases
from benchmarks.verify import Disagreement, check

pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed")

CASES = cases(
    os.environ.get("FASTRL_BENCH_SCALE", "full"),
    with_compile=os.environ.get("FASTRL_BENCH_COMPILE", "1") != "0",
)
# Names are known before anything is prepared; a case without one of them skips it.
PROVIDERS = ("fastrl", "fastrl out=", "eager", "torch.compile", "verl", "verl vectorised")


@lru_cache(maxsize=1)
def _prepared(index: int) -> tuple[Prepared, Any]:
    torch.manual_seed(0)
    prepared = CASES[index].prepare()
    return prepared, prepared.expected()


def _parameters() -> Iterator[Any]:
    for index, case in enumerate(CASES):
        names = PROVIDERS
        if case.op == "call overhead":
            names = ("torch.mul", *(bar.provider for bar in case.bars))
        for name in names:
            yield pytest.param(index, case, name, id=f"{case.name} {name}".replace(" ", "_"))


@pytest.mark.parametrize(("index", "case", "name"), _parameters())
def test_provider(benchmark: Any, index: int, case: Case, name: str) -> None:
    prepared, expected = _prepared(index)
    provider = next((p for p in prepared.providers if p.name == name), None)
    if provider is None:
        pytest.skip(prepared.missing.get(name, "does not compute this case"))
    try:
        check(provider, expected)
    except Disagreement as disagreement:
        pytest.fail(f"{name}: {disagreement}")
    benchmark.group = case.name
    is_short = case.op == "call overhead"
    benchmark.pedantic(provider.call, rounds=7, warmup_rounds=1, iterations=1000 if is_short else 1)
