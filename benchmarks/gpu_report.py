"""The records of a GPU run as a table, with ratios and the bars they meet or miss."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from benchmarks.gpu_cases import Bar, Case

Record = dict[str, Any]

DEMANDS = {
    "bandwidth": "{figure:.0%} of a copy, demanded {limit:.0%}",
    "device_ms": "{figure:.4g} ms on the device, allowed {limit:g}",
    "call_ms": "{figure:.4g} ms a call, allowed {limit:g}",
    "products": "{figure:.2f}x the matrix products, allowed {limit:g}x",
}


def finished(records: Sequence[Record], cases: Sequence[Case], judge: bool) -> list[Record]:
    """The records in the order of the cases, with ratios and, where they are to be judged, bars."""
    by_key = {(r["op"], r["size"], r["provider"]): r for r in records}
    lines = []
    for case in cases:
        found = {p.name: by_key.get((case.op, case.size, p.name)) for p in case.providers}
        timed = {name: r for name, r in found.items() if r is not None and "failed" not in r}
        first = next(iter(timed.values()), None)
        for name, record in found.items():
            if record is None:
                begins = {"op": case.op, "size": case.size, "provider": name}
                lines.append({**begins, "failed": "not measured: the run ended before"})
            elif name not in timed or first is None:
                lines.append(record)
            else:
                ratio = float(f"{record['median_ms'] / first['median_ms']:.4g}")
                ours = name.startswith("fastrl")
                bars = [judged(bar, record, timed) for bar in case.bars if judge and ours]
                lines.append({**record, "ratio_to_first": ratio, "bars": bars})
    return lines


def judged(bar: Bar, record: Record, timed: dict[str, Record]) -> Record:
    """The bar with its figure; met is None when what it is held against was not measured."""
    figure: float | None
    if bar.kind == "bandwidth":
        figure = record["gb_per_s"] / record["copy_gb_per_s"]
    elif bar.kind == "products":
        products = timed.get("matrix products")
        figure = products and record["device_median_ms"] / products["device_median_ms"]
    else:
        figure = record["device_median_ms" if bar.kind == "device_ms" else "median_ms"]
    met = None
    if figure is not None:
        figure = float(f"{figure:.4g}")
        met = figure >= bar.limit if bar.kind == "bandwidth" else figure <= bar.limit
    return {"kind": bar.kind, "limit": bar.limit, "figure": figure, "met": met}


def markdown(records: Sequence[Record], steps: Sequence[Record]) -> str:
    """Everything that was done and measured."""
    about: Record = next((r for r in records if "machine" in r), {})
    machine, versions = about.get("machine", {}), about.get("versions", {})
    lines = [f"# {machine.get('gpu') or 'Dry run on CPU: the figures mean nothing'}", ""]
    if about:
        parts = [f"{k} {v}" for k, v in {**machine, **versions}.items() if k != "gpu"]
        lines += [f"{about['date']}, `{about['command']}`; {', '.join(parts)}.", ""]
        lines += [f"A copy moves {about['copy_gb_per_s']:.1f} GB/s in the same run.", ""]
    lines += ["## Checks", "", "| step | result | seconds | |", "|---|---|---|---|"]
    lines += [f"| {s['step']} | {s['result']} | {s['seconds']:.0f} | {s['said']} |" for s in steps]
    lines += ["", "## Measured", ""]
    lines += [
        "Medians. A call is what its caller waits for, many in a row; the device's time is that of a replayed CUDA graph. "
        "GB/s and the share of a copy count minimum bytes over the device's time; the error is against float64, as a share "
        "of the largest value; the peak is what a call allocates.",
        "",
        "| op | provider | call µs | device µs | GB/s | of copy | error | peak MB | bars, remarks |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (op, size), group in groupby(records, lambda r: (r["op"], r["size"])):
        lines.append(f"| **{op}** {size} | | | | | | | | |")
        lines += [_row(record) for record in group]
    bars = [bar["met"] for record in records for bar in record.get("bars", ())]
    if bars:
        lines += ["", f"{bars.count(True)} of {len(bars)} bars met."]
    return "\n".join([*lines, ""])


def _row(record: Record) -> str:
    if "failed" in record:
        return f"| | {record['provider']} | | | | | | | {_cell(record['failed'])} |"
    bandwidth = share = ""
    if "gb_per_s" in record:
        bandwidth = f"{record['gb_per_s']:.0f}"
        share = f"{record['gb_per_s'] / record['copy_gb_per_s']:.0%}"
    error = "" if record["error"] is None else f"{record['error']:.0e}"
    peak = "" if record["peak_mb"] is None else f"{record['peak_mb']:.4g}"
    remarks = [_bar(bar) for bar in record["bars"]] + [record["note"]]
    cells = [
        f"{1e3 * record['median_ms']:.4g}",
        f"{1e3 * record['device_median_ms']:.4g}",
        *(bandwidth, share, error, peak, _cell("; ".join(filter(None, remarks)))),
    ]
    return f"| | {record['provider']} | {' | '.join(cells)} |"


def _bar(bar: Record) -> str:
    if bar["met"] is None:
        return f"bar on {bar['kind']}: not measured"
    return f"{DEMANDS[bar['kind']].format(**bar)}: {'met' if bar['met'] else '**missed**'}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
