"""``make bench``: every case, everyone who can compute it, ratios of medians, bytes, bandwidth and the bars."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import machine, registry_linear, trainer_step
from benchmarks.memory import peak_bytes
from benchmarks.registry import Bar, Case, cases, selected
from benchmarks.timing import Timing, copy_bandwidth, measure
from benchmarks.verify import verified

RESULTS = Path(__file__).parent / "results"
KINDS = {
    "speedup": "{provider} / fastrl >= {limit:g}x",
    "bandwidth": "{provider} >= {limit:.0%} of a copy",
    "memory": "{provider} peak / fastrl peak >= {limit:g}x",
    "overhead": "{provider} / torch.mul <= {limit:g}x",
}


class Measured(NamedTuple):
    """A case after it ran; ``ratios`` are against its first provider."""

    case: Case
    timings: dict[str, Timing]
    errors: dict[str, float]
    wrong: dict[str, str]
    missing: dict[str, str]
    notes: dict[str, str]
    copy_bytes_per_second: float
    peaks: dict[str, int] = {}  # noqa: RUF012

    def ratio(self, provider: str) -> float | None:
        """Time of a provider over that of the first one; None unless both are right."""
        first = next(iter(self.notes))
        if provider not in self.timings or first not in self.timings:
            return None
        return self.timings[provider].median / self.timings[first].median

    def bytes_per_second(self, provider: str) -> float:
        return self.case.minimum_bytes / self.timings[provider].median

    def figure(self, bar: Bar) -> float | None:
        """What the bar is about, or None when it could not be measured."""
        if bar.kind == "bandwidth":
            if bar.provider not in self.timings:
                return None
            return self.bytes_per_second(bar.provider) / self.copy_bytes_per_second
        if bar.kind == "memory":
            first = next(iter(self.notes))
            if bar.provider not in self.peaks or first not in self.peaks:
                return None
            return self.peaks[bar.provider] / self.peaks[first]
        return self.ratio(bar.provider)

    def met(self, bar: Bar) -> bool | None:
        figure = self.figure(bar)
        if figure is None:
            return None
        return figure <= bar.limit if bar.kind == "overhead" else figure >= bar.limit


def run_case(case: Case, rounds: int) -> Measured:
    """Verify, then time; whoever is wrong is not timed."""
    torch.manual_seed(0)
    prepared = case.prepare()
    errors, wrong = verified(prepared)
    right = {p.name: p.call for p in prepared.providers if p.name not in wrong}
    before = copy_bandwidth(rounds)
    timings = measure(right, rounds)
    after = copy_bandwidth(rounds)
    notes = {p.name: p.note for p in prepared.providers}
    peaks = {name: peak_bytes(call) for name, call in right.items()} if case.has_memory else {}
    copied = (before + after) / 2
    return Measured(case, timings, errors, wrong, prepared.missing, notes, copied, peaks)


def report(measured: Measured, judge: bool) -> str:
    """The case as text: a line per provider, then one per bar."""
    case = measured.case
    title = f"{case.op}   {case.size}"
    if case.minimum_bytes:
        title += (
            f"   {case.minimum_bytes / 1e6:.3g} MB at least, "
            f"copy {measured.copy_bytes_per_second / 1e9:.1f} GB/s"
        )
    first = next(iter(measured.notes))
    lines = [
        title,
        f"  {'':<18}{'median ms':>11}{'quartiles':>21}{f'/ {first}':>12}{'GB/s':>8}{'of copy':>9}{'error':>9}",
    ]
    for name, timing in measured.timings.items():
        ratio = measured.ratio(name)
        quartiles = f"{1e3 * timing.low:.4g} .. {1e3 * timing.high:.4g}"
        line = f"  {name:<18}{1e3 * timing.median:>11.4g}{quartiles:>21}"
        line += f"{ratio:>11.2f}x" if ratio is not None else f"{'':>12}"
        if case.minimum_bytes:
            share = measured.bytes_per_second(name) / measured.copy_bytes_per_second
            line += f"{measured.bytes_per_second(name) / 1e9:>8.2f}{share:>9.1%}"
            line += f"{measured.errors[name]:>9.0e}"
        if name in measured.peaks:
            line += f"  peak {measured.peaks[name] / 1e6:.0f} MB"
        if measured.notes[name]:
            line += f"  {measured.notes[name]}"
        lines.append(line)
    lines += [f"  {name:<18}WRONG, not timed: {why}" for name, why in measured.wrong.items()]
    lines += [f"  {name:<18}not installed: {why}" for name, why in measured.missing.items()]
    if judge:
        lines += [f"  {_bar_line(measured, bar)}" for bar in case.bars]
    return "\n".join(lines)


def _bar_line(measured: Measured, bar: Bar) -> str:
    demand = KINDS[bar.kind].format(provider=bar.provider, limit=bar.limit)
    figure = measured.figure(bar)
    if figure is None:
        return f"bar  {demand:<44} not measured"
    shown = f"{figure:.1%}" if bar.kind == "bandwidth" else f"{figure:.2f}x"
    return f"bar  {demand:<44} {shown:>9}  {'met' if measured.met(bar) else 'MISSED'}"


def records(measured: Measured, context: dict[str, Any], judge: bool) -> list[dict[str, Any]]:
    """One JSON object per provider; bars stand with the provider they are about."""
    case = measured.case
    lines = []
    for name, timing in measured.timings.items():
        line = {
            **context,
            "op": case.op,
            "size": case.size,
            "provider": name,
            "note": measured.notes[name],
            "median_ms": round(1e3 * timing.median, 6),
            "quartiles_ms": [round(1e3 * timing.low, 6), round(1e3 * timing.high, 6)],
            "rounds": timing.rounds,
            "ratio_to_first": _rounded(measured.ratio(name)),
            "error": float(f"{measured.errors[name]:.2e}"),
        }
        if case.minimum_bytes:
            line["minimum_bytes"] = case.minimum_bytes
            line["gb_per_s"] = _rounded(measured.bytes_per_second(name) / 1e9)
            line["copy_gb_per_s"] = _rounded(measured.copy_bytes_per_second / 1e9)
        if name in measured.peaks:
            line["peak_bytes"] = measured.peaks[name]
        about = [bar for bar in case.bars if judge and bar.provider == name]
        line["bars"] = [
            {
                "kind": bar.kind,
                "limit": bar.limit,
                "figure": _rounded(measured.figure(bar)),
                "met": measured.met(bar),
            }
            for bar in about
        ]
        lines.append(line)
    for name, why in {**measured.wrong, **measured.missing}.items():
        lines.append({**context, "op": case.op, "size": case.size, "provider": name, "failed": why})
    return lines


def _rounded(x: float | None) -> float | None:
    return None if x is None else float(f"{x:.4g}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; 0 when every provider agreed with the expected results, 1 when one did not."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(arguments)
    warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning)
    if options.threads:
        torch.set_num_threads(options.threads)
    judge = not options.quick
    scale = "quick" if options.quick else "full"
    with_compile = not options.no_compile
    everything = [*cases(scale, with_compile=with_compile)]
    everything += registry_linear.cases(scale, with_compile=with_compile)
    everything += trainer_step.cases(scale)
    chosen = list(selected(everything, options.op or []))
    if not chosen:
        known = sorted({case.op.replace(" ", "_") for case in everything})
        print(f"no op is called {', '.join(options.op)}; there are {', '.join(known)}")
        return 2
    now = datetime.datetime.now(datetime.timezone.utc)
    context: dict[str, Any] = {
        "date": now.isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks.run", *_without_paths(arguments)]),
        "machine": machine.machine(),
        "versions": machine.versions(),
    }
    about = context["machine"]
    print(
        f"{about['cpu']}, {about['cores']} cores, {about['threads']} threads, {about['capability']}; "
        + ", ".join(f"{k} {v}" for k, v in context["versions"].items()),
        end="\n\n",
    )
    lines: list[dict[str, Any]] = []
    is_wrong = False
    for case in chosen:
        measured = run_case(case, options.rounds or (3 if options.quick else 9))
        print(report(measured, judge), end="\n\n", flush=True)
        lines += records(measured, context, judge)
        is_wrong = is_wrong or bool(measured.wrong)
    target = options.json
    if target is None and judge and not options.op:
        target = RESULTS / machine.slug() / f"{now:%Y-%m-%d}.jsonl"
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    judged = [bar["met"] for line in lines for bar in line.get("bars", [])]
    if judged:
        print(f"{sum(map(bool, judged))} of {len(judged)} bars met")
    if is_wrong:
        print("a provider computes something else: its line says by how much")
    return 1 if is_wrong else 0


def _without_paths(arguments: Sequence[str]) -> list[str]:
    return [Path(a).name if "/" in a or "\\" in a else a for a in arguments]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--op", action="append", help="only this op (repeatable)")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, 3 rounds, bars not judged"
    )
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--rounds", type=int, help="rounds per provider (default 9)")
    parser.add_argument(
        "--threads", type=int, help="threads of torch (default: torch's own choice)"
    )
    parser.add_argument(
        "--json", type=Path, help="append the results here instead of benchmarks/results/"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
