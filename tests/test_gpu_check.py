"""The check of a GPU, without one: a dry run has every row, and failures are reported instead of ending it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu, gpu_check, gpu_report, gpu_timing
from benchmarks.gpu_cases import Bar, Case, Provider, cases
from benchmarks.peers import MissingPeer

ROOT = Path(__file__).parent.parent


def test_a_dry_run_has_every_row(tmp_path: Path) -> None:
    done = subprocess.run(
        ["benchmarks/gpu_check.sh", "--dry-run"],
        cwd=ROOT,
        env=os.environ
        | {"OUT": str(tmp_path), "PYTHON": sys.executable, "TRITON_INTERPRET": "1"}
        | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (records,) = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    steps = {line["step"]: line["result"] for line in lines if "step" in line}
    assert steps == {"tests reference": "passed", "smoke": "passed", "measure": "passed"}
    rows = [line for line in lines if "step" not in line]
    expected = [(c.op, c.size, p.name) for c in cases(tiny=True) for p in c.providers]
    tolerance = {(c.op, c.size): c.tolerance for c in cases(tiny=True)}
    assert [gpu.key(row) for row in rows] == expected
    for row in rows:
        if "failed" in row:
            assert row["failed"].startswith("not available: "), row
            continue
        assert row["median_ms"] > 0 and row["device_median_ms"] > 0 and row["copies"] >= 1
        assert row["device_by"] == "host clock"
        assert row["bars"] == []  # sizes next to nothing are not judged
        if row["op"] != "launch" and row["provider"] != "matrix products":
            assert row["error"] <= tolerance[row["op"], row["size"]]
    for op in ("gae", "group_advantages", "whiten", "policy_loss", "token_logprobs"):
        measured = {r["provider"] for r in rows if r["op"] == op and "failed" not in r}
        assert {"fastrl cpu", "eager"} <= measured
    table = records.with_suffix(".md").read_text()
    assert table.count("\n| | ") == len(rows)
    assert "==== smoke: passed" in records.with_suffix(".log").read_text()
    text = table + records.read_text()
    assert str(ROOT) not in text and str(tmp_path) not in text


def toy(*providers: Provider, bars: tuple[Bar, ...] = ()) -> Case:
    def inputs() -> tuple[Tensor, ...]:
        return (torch.arange(8.0),)

    return Case("toy", "8 elements", 64, bars, inputs, lambda x: (2 * x.double(),), providers)


def doubles(x: Tensor) -> tuple[Tensor]:
    return (2 * x,)


def test_failures_are_reported_and_the_others_measured(tmp_path: Path) -> None:
    def raises(x: Tensor) -> tuple[Tensor]:
        raise RuntimeError("an illegal | access\nand more")

    def missing() -> Any:
        raise MissingPeer("peer: not installed")

    providers = (
        Provider("fastrl raises", lambda: raises),
        Provider("slow", lambda: doubles, starts_slowly=True),
        Provider("fastrl wrong", lambda: lambda x: (2.001 * x,)),
        Provider("peer", missing),
        Provider("fastrl right", lambda: doubles),
    )
    case, file = toy(*providers), tmp_path / "records.jsonl"
    context = {"copy_gb_per_s": 100.0}
    gpu.run([case], file, context, time.monotonic() + 60)
    found = gpu_report.finished(gpu.read(file), [case], judge=True)
    assert [r["provider"] for r in found] == [p.name for p in providers]
    by_name = {r["provider"]: r for r in found}
    assert by_name["fastrl raises"]["failed"] == "RuntimeError: an illegal | access"
    assert by_name["fastrl wrong"]["failed"].startswith("Disagreement: differs by 5.0e-04")
    assert by_name["peer"]["failed"] == "not available: peer: not installed"
    assert by_name["fastrl right"]["median_ms"] > 0
    assert by_name["slow"]["ratio_to_first"] == 1.0  # the first one that was timed
    table = gpu_report.markdown(found, [])
    assert "RuntimeError: an illegal \\| access |" in table
    assert "differs by 5.0e-04 from float64" in table

    before = file.read_text()
    gpu.run([case], file, context, time.monotonic() + 60)
    assert file.read_text() == before  # nothing is done twice


def test_what_the_time_did_not_suffice_for_says_so(tmp_path: Path) -> None:
    case, file = toy(Provider("fastrl", lambda: doubles)), tmp_path / "records.jsonl"
    gpu.run([case], file, {}, time.monotonic() - 1)
    (record,) = gpu_report.finished(gpu.read(file), [case], judge=True)
    assert record["failed"] == "not measured: the time was over"
    (record,) = gpu_report.finished([], [case], judge=True)
    assert record["failed"] == "not measured: the run ended before"


def test_a_provider_that_ends_the_process_is_passed_over_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from benchmarks import gpu\n"
        "from benchmarks.gpu_cases import Provider\n"
        "from tests.test_gpu_check import doubles, toy\n"
        "providers = (Provider('ends', lambda: lambda x: os._exit(9)), Provider('goes on', lambda: doubles))\n"
        "gpu.cases = lambda tiny: [toy(*providers)]\n"
        "sys.exit(gpu.main(['--dry-run', '--records', sys.argv[1]]))"
    )
    file = tmp_path / "records.jsonl"
    codes = [
        subprocess.run([sys.executable, "-c", code, str(file)], cwd=ROOT).returncode
        for _ in range(2)
    ]
    assert codes == [9, 0]
    ended, went_on = gpu.read(file)
    assert ended["failed"] == "did not finish: the process ended"
    assert went_on["median_ms"] > 0


@pytest.mark.parametrize(
    ("bar", "figure", "met"),
    [
        (Bar("bandwidth", 0.85), 0.8, False),
        (Bar("bandwidth", 0.8), 0.8, True),
        (Bar("device_ms", 2.0), 2.0, True),
        (Bar("device_ms", 1.9), 2.0, False),
        (Bar("call_ms", 2.5), 3.0, False),
        (Bar("products", 1.5), 2.0, False),
    ],
)
def test_bars(bar: Bar, figure: float, met: bool) -> None:
    record = {"gb_per_s": 80.0, "copy_gb_per_s": 100.0, "device_median_ms": 2.0, "median_ms": 3.0}
    timed = {"matrix products": {"device_median_ms": 1.0}}
    judged = gpu_report.judged(bar, record, timed)
    assert (judged["figure"], judged["met"]) == (figure, met)


def test_a_bar_against_something_that_was_not_measured_is_open() -> None:
    assert gpu_report.judged(Bar("products", 1.5), {"device_median_ms": 1.0}, {})["met"] is None


@pytest.mark.parametrize("can_be_captured", [True, False])
def test_times_with_the_clocks_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, can_be_captured: bool
) -> None:
    """The host's clock stands in for the device's, and a shorter call for the replay of a graph."""

    def captured(run: Callable[[], object]) -> Callable[[], object]:
        if can_be_captured:
            return lambda: time.sleep(2e-3)
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(gpu_timing, "is_gpu", lambda: True)
    monkeypatch.setattr(gpu_timing, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_timing, "by_device_clock", gpu_timing.by_host_clock)
    monkeypatch.setattr(gpu_timing, "captured", captured)
    monkeypatch.setattr(gpu_timing, "l2_bytes", lambda: 1000)
    assert [gpu_timing.copies_past_cache(n) for n in (10**6, 1500, 1, 0)] == [1, 2, 256, 256]

    turns: list[int] = []

    def call(i: int) -> None:
        turns.append(i)
        time.sleep(4e-3)

    times = gpu_timing.times([lambda: call(0), lambda: call(1)], seconds=0.3)
    assert turns[:4] == [0, 1, 0, 1]
    for timing in (times.call, times.events):
        assert 4e-3 <= timing.low <= timing.median <= timing.high
        assert 3 <= timing.rounds <= 30
    if can_be_captured:
        assert times.device_by == "graph" and 1e-3 <= times.device.median < times.call.median
    else:
        assert (times.device_by, times.device) == ("events", times.events)
        assert times.why == "RuntimeError: operation not permitted"


def test_steps_that_fail_hang_or_are_not_there(tmp_path: Path) -> None:
    log = tmp_path / "log"
    fails = (
        sys.executable,
        "-c",
        "print('== ERROR SUMMARY: 3 errors\\nlast'); raise SystemExit(86)",
    )
    hangs = (sys.executable, "-c", "print('begun', flush=True); import time; time.sleep(60)")
    got = [
        gpu_check.run(gpu_check.Step(name, command, 3), log)
        for name, command in (("fails", fails), ("hangs", hangs), ("absent", ()))
    ]
    assert [g["result"] for g in got] == [
        "failed, exit code 86",
        "stopped after 3 s",
        "not available",
    ]
    assert got[0]["said"] == "ERROR SUMMARY: 3 errors"
    assert got[1]["seconds"] < 20
    assert "begun" in log.read_text()


def test_every_bar_of_the_design_for_gpus_has_its_case() -> None:
    bars = {(c.op, c.size.split(",")[0]): c.bars for c in cases()}
    for size in ("2048 x 4096 float32", "8192 x 4096 float32"):
        assert bars["gae", size] == (Bar("bandwidth", 0.85),)
    assert bars["gae", "16 x 131072 float32"] == (Bar("device_ms", 0.1),)
    assert bars["gae", "8 elements"] == (Bar("call_ms", 0.01),)
    assert bars["policy_loss", "1024 x 8192 float32"] == (Bar("bandwidth", 0.8),)
    forward = next(c for c in cases() if c.size == "8192 x 151936 bfloat16, entropy")
    assert forward.bars == (Bar("device_ms", 0.75),)
