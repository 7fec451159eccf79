"""Time of a call on a GPU: what its caller waits for and what the device does.

A dry run has no GPU: the same functions then take the time of the host clock, over few calls, because interpreted kernels
take long.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from benchmarks.timing import Timing

# A sample lasts at least this long, so that neither clock's resolution nor the synchronisation shows.
SAMPLE_SECONDS = 2e-3
MAX_ROUNDS, MIN_ROUNDS, DRY_ROUNDS = 30, 3, 2
MAX_COPIES, DRY_COPIES = 256, 2


class Times(NamedTuple):
    """Seconds of one call.

    `call` is the host clock around calls that are followed by one synchronisation, `events` the device's clock around the
    same calls, `device` the device's clock around the replay of a CUDA graph of them: without what the host does. Where a
    call cannot be captured `device` is `events`, and `why` says what the capture ran into.
    """

    call: Timing
    events: Timing
    device: Timing
    device_by: str
    why: str = ""


def is_gpu() -> bool:
    return torch.get_default_device().type == "cuda"


def synchronize() -> None:
    if is_gpu():
        torch.cuda.synchronize()


def l2_bytes() -> int:
    """Size of the cache that inputs must exceed."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def copies_past_cache(bytes_of_a_set: int) -> int:
    """How many sets of inputs exceed the cache three times over, when calls go through them in turn."""
    if not is_gpu():
        return DRY_COPIES
    return max(1, min(MAX_COPIES, -(-3 * l2_bytes() // max(1, bytes_of_a_set))))


def times(calls: Sequence[Callable[[], object]], seconds: float) -> Times:
    """Time calls that do the same on different memory, within about `seconds` for everything."""
    kept: list[object] = [None] * len(calls)

    def all_in_turn() -> None:
        # Results live until their turn comes again, so that they rotate through memory as the inputs do.
        for i, call in enumerate(calls):
            kept[i] = call()

    all_in_turn()
    synchronize()
    if not is_gpu():
        dry = summary(by_host_clock(all_in_turn, 1) / len(calls) for _ in range(DRY_ROUNDS))
        return Times(dry, dry, dry, "host clock")
    once = by_host_clock(all_in_turn, 1)
    if once < SAMPLE_SECONDS:
        once = by_host_clock(all_in_turn, 3)
    call = _sampled(by_host_clock, all_in_turn, once, seconds / 3, len(calls))
    events = _sampled(by_device_clock, all_in_turn, once, seconds / 3, len(calls))
    try:
        replay = captured(all_in_turn)
    except Exception as error:
        return Times(call, events, events, "events", one_line(error))
    once = by_device_clock(replay, 3)
    return Times(
        call, events, _sampled(by_device_clock, replay, once, seconds / 3, len(calls)), "graph"
    )


def _sampled(
    clock: Callable[[Callable[[], object], int], float],
    run: Callable[[], object],
    once: float,
    seconds: float,
    calls: int,
) -> Timing:
    repeats = max(1, round(SAMPLE_SECONDS / once))
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / (once * repeats))))
    return summary([clock(run, repeats) / calls for _ in range(rounds)])


def by_host_clock(run: Callable[[], object], repeats: int) -> float:
    """Seconds of one run, the wait for its results included once."""
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize()
    return (time.perf_counter() - start) / repeats


def by_device_clock(run: Callable[[], object], repeats: int) -> float:
    """Seconds between two events around the runs, for one of them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """The replay of a graph of everything that the run launches."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # whatever happens only the first time on a stream
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        run()
    graph.replay()
    synchronize()
    return graph.replay


def peak_bytes(run: Callable[[], object]) -> int | None:
    """What one run allocates at most, its results included."""
    if not is_gpu():
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def copy_bandwidth() -> float:
    """Bytes read and written per second by ``copy_`` between two buffers far larger than the cache."""
    source = torch.ones((16 * l2_bytes() if is_gpu() else 1 << 20) // 4)
    target = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()
    return moved / times([lambda: target.copy_(source)], 1.0).device.median


def summary(samples: Iterable[float]) -> Timing:
    low, median, high = statistics.quantiles(found := list(samples), n=4)
    return Timing(median, low, high, len(found))


def one_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0][:300]}" if said else type(error).__name__
