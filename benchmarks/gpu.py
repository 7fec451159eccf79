"""``python -m benchmarks.gpu``: every case of `gpu_cases` on the GPU, one record per provider, as soon as it is measured.

A provider that fails is recorded with what it said and the run goes on. One that hangs or ruins the device ends the
process; started again with the same file, the run continues behind it. `gpu_check` does that.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu_timing as timing
from benchmarks import machine
from benchmarks.gpu_cases import Case, Provider, cases
from benchmarks.peers import MissingPeer, version
from benchmarks.timing import Timing
from benchmarks.verify import Disagreement, error
from fastrl.errors import ImplementationError

# Of one provider: measuring, and all of it, compilation too, before it is given up.
SECONDS, PATIENCE = 1.0, 60.0
DEVICE_LOST = 3
Record = dict[str, Any]


def key(record: Record) -> tuple[str, str, str]:
    return record["op"], record["size"], record["provider"]


def read(file: Path) -> list[Record]:
    """The last record of every provider of every case; an unfinished one was replaced by its result, if there is one."""
    if not file.exists():
        return []
    lines = (json.loads(line) for line in file.read_text().splitlines())
    return list({key(line): line for line in lines}.values())


def measured(case: Case, provider: Provider, inputs: Sequence[Tensor], expected: Any) -> Record:
    """Compare with float64, then time."""
    call = provider.prepare()
    found = 0.0
    if provider.comparable is not None:
        found = error(provider.comparable(call(*inputs)), expected())
        if not found <= case.tolerance:
            raise Disagreement(
                f"differs by {found:.1e} from float64, more than {case.tolerance:.0e}"
            )
    peak = timing.peak_bytes(lambda: call(*inputs))
    size = case.minimum_bytes or sum(x.numel() * x.element_size() for x in inputs)
    sets = [inputs, *(copied(inputs) for _ in range(timing.copies_past_cache(size) - 1))]
    calls: list[Callable[[], object]] = [lambda s=s: call(*s) for s in sets]  # type: ignore[misc]
    times = timing.times(calls, SECONDS)
    record: Record = {
        "note": "; ".join(filter(None, (provider.note, times.why and f"no graph: {times.why}"))),
        **milliseconds("", times.call),
        **milliseconds("events_", times.events),
        **milliseconds("device_", times.device),
        "device_by": times.device_by,
        "rounds": times.call.rounds,
        "copies": len(sets),
        "error": float(f"{found:.2e}") if provider.comparable is not None else None,
        "peak_mb": None if peak is None else round(peak / 1e6, 3),
    }
    if case.minimum_bytes:
        record["minimum_bytes"] = case.minimum_bytes
        record["gb_per_s"] = round(case.minimum_bytes / times.device.median / 1e9, 2)
    return record


def copied(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)


def milliseconds(prefix: str, times: Timing) -> Record:
    return {
        f"{prefix}median_ms": round(1e3 * times.median, 6),
        f"{prefix}quartiles_ms": [round(1e3 * times.low, 6), round(1e3 * times.high, 6)],
    }


def run_case(
    case: Case, providers: Sequence[Provider], ends: float, unfinished: Callable[[str], None]
) -> Iterator[tuple[str, Record]]:
    """A record for each provider; `unfinished` is told before one begins."""
    torch.manual_seed(0)
    inputs = None
    results: list[Any] = []

    def expected() -> Any:
        if not results:
            assert inputs is not None
            results.append(case.expected(*inputs))
        return results[0]

    for provider in providers:
        if time.monotonic() > ends:
            yield provider.name, {"failed": "not measured: the time was over"}
            continue
        unfinished(provider.name)
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        try:
            if inputs is None:
                inputs = case.inputs()
            yield provider.name, measured(case, provider, inputs, expected)
        except (MissingPeer, ImplementationError) as reason:
            yield (
                provider.name,
                {"failed": f"not available: {str(reason).partition('; available on')[0]}"},
            )
        except Exception as reason:
            yield provider.name, {"failed": timing.one_line(reason)}
        finally:
            faulthandler.cancel_dump_traceback_later()
        if timing.is_gpu():
            torch.cuda.synchronize()  # raises where the device was lost
            torch.cuda.empty_cache()


def run(chosen: Sequence[Case], file: Path, context: Record, ends: float) -> None:
    """Append the records of everything that the file does not have yet; what starts slowly comes last."""
    known = {key(record) for record in read(file)}
    with file.open("a") as out:
        for case, slow in ((c, slow) for slow in (False, True) for c in chosen):
            begins = {**context, "op": case.op, "size": case.size}
            todo = [
                p
                for p in case.providers
                if p.starts_slowly == slow and (case.op, case.size, p.name) not in known
            ]

            def write(provider: str, record: Record, begins: Record = begins) -> None:
                out.write(json.dumps({**begins, "provider": provider, **record}) + "\n")
                out.flush()

            def unfinished(provider: str, write: Callable[..., None] = write) -> None:
                write(provider, {"failed": "did not finish: the process ended"})

            for provider, record in run_case(case, todo, ends, unfinished):
                write(provider, record)
                shown = record.get("failed") or (
                    f"call {record['median_ms']:.4f} ms, device {record['device_median_ms']:.4f} ms"
                )
                print(f"{case.op}  {case.size}  {provider}: {shown}", flush=True)


def context(command: str) -> Record:
    about = {**machine.machine(), **gpu()}
    versions = {**machine.versions(), "triton": version("triton")}
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "date": now.isoformat(timespec="seconds"),
        "command": command,
        "machine": about,
        "versions": versions,
    }


def gpu() -> Record:
    """Name, multiprocessors, cache and memory of the device, and the CUDA of torch."""
    if not timing.is_gpu():
        return {"gpu": None}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_mb": round(properties.L2_cache_size / 2**20),
        "memory_gb": round(properties.total_memory / 1e9),
        "cuda": torch.version.cuda,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every provider has its record; DEVICE_LOST when the rest needs a new process."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--records", type=Path, required=True, help="JSONL, appended to")
    parser.add_argument("--op", action="append", help="only this op (repeatable)")
    parser.add_argument("--seconds", type=float, default=600, help="begin nothing after that")
    parser.add_argument("--dry-run", action="store_true", help="on CPU, at next to no size")
    options = parser.parse_args(arguments)
    ends = time.monotonic() + options.seconds
    warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning)
    torch.set_default_device("cpu" if options.dry_run else "cuda")
    chosen = [c for c in cases(options.dry_run) if not options.op or c.op in options.op]
    about = context("benchmarks/gpu_check.sh" + (" --dry-run" if options.dry_run else ""))
    about["copy_gb_per_s"] = round(timing.copy_bandwidth() / 1e9, 2)
    print(f"copy: {about['copy_gb_per_s']} GB/s", flush=True)
    try:
        run(chosen, options.records, about, ends)
    except RuntimeError as lost:
        print(f"the device is lost: {timing.one_line(lost)}", flush=True)
        return DEVICE_LOST
    return 0


if __name__ == "__main__":
    sys.exit(main())
