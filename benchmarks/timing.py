"""Interleaved timing: every provider in turn, round after round, so that what slows the machine slows them all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

# A sample lasts at least this long: shorter calls are repeated within it.
SAMPLE_SECONDS = 2e-3
# Nobody takes longer than this in all its rounds together, as long as three of them fit.
PROVIDER_SECONDS = 12.0
COPY_BYTES = 256 << 20


class Timing(NamedTuple):
    """Seconds of one call: the median and the quartiles over the rounds."""

    median: float
    low: float
    high: float
    rounds: int


def measure(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    provider_seconds: float = PROVIDER_SECONDS,
) -> dict[str, Timing]:
    """Time the calls round-robin; each has been called at least once before."""
    repeats: dict[str, int] = {}
    rounds_of: dict[str, int] = {}
    for name, call in calls.items():
        once = _seconds(call, 1)
        if once < SAMPLE_SECONDS:
            once = _seconds(call, 3)
        repeats[name] = max(1, round(SAMPLE_SECONDS / once))
        rounds_of[name] = min(rounds, max(3, int(provider_seconds / once)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name, call in calls.items():
            if i < rounds_of[name]:
                samples[name].append(_seconds(call, repeats[name]))
    return {name: _summary(values) for name, values in samples.items()}


def copy_bandwidth(rounds: int) -> float:
    """Bytes read and written per second by ``copy_`` between two buffers that exceed every cache."""
    source, target = _copy_buffers()
    target.copy_(source)
    times = [_seconds(lambda: target.copy_(source), 1) for _ in range(rounds)]
    return 2 * COPY_BYTES / statistics.median(times)


@cache
def _copy_buffers() -> tuple[Tensor, Tensor]:
    return torch.ones(COPY_BYTES // 4), torch.empty(COPY_BYTES // 4)


def _seconds(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def _summary(samples: list[float]) -> Timing:
    if len(samples) < 2:
        return Timing(samples[0], samples[0], samples[0], 1)
    low, median, high = statistics.quantiles(samples, n=4)
    return Timing(median, low, high, len(samples))
