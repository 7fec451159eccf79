"""Peak memory of a call, counted from what torch's allocator hands out: no other process can disturb it."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object]) -> int:
    """Most bytes allocated at any time during the call beyond those before it, its results among them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = call()
    events = recorded.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    del kept
    current = most = 0
    for _, change in changes:
        current += change
        most = max(most, current)
    return most
