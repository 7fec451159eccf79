"""``benchmarks/gpu_check.sh``: build for the GPU at hand, test, check with compute-sanitizer, measure, write a table.

Needs torch with CUDA, Triton, nvcc, g++, ninja, setuptools and pytest, in whatever versions there are, and no network. Every
step is bounded, one that fails is reported, and the rest goes on. Records, a table and what the steps printed go to the
folder that OUT names, otherwise to `benchmarks/results/<gpu>/`; those of a dry run to a temporary one.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

Record = dict[str, Any]

ROOT = Path(__file__).parent.parent
PYTHON = sys.executable
# Seconds: of everything, of the build, of the tests and the sanitizers, which run side by side. Measuring gets the rest.
LIMIT, BUILD, CHECKS = 450, 170, 110
# How often measuring starts again behind a provider that ended the process.
ATTEMPTS = 6


class Step(NamedTuple):
    name: str
    command: Sequence[str]
    seconds: float
    environment: Mapping[str, str] = {}


def run(step: Step, log: Path) -> Record:
    """Run the step and append what it printed to the log."""
    if not step.command:
        return {"step": step.name, "result": "not available", "seconds": 0.0, "said": ""}
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env=os.environ | step.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(step.seconds)
            result = "passed" if code == 0 else f"failed, exit code {code}"
        except subprocess.TimeoutExpired:
            result = f"stopped after {step.seconds:.0f} s"
            _stop(process)
        output.seek(0)
        printed = output.read().replace(str(ROOT), ".").replace(PYTHON, "python")
    seconds = round(time.monotonic() - start, 1)
    with log.open("a") as file:
        file.write(f"==== {step.name}: {result}, {seconds} s\n{printed}\n")
    record = {"step": step.name, "result": result, "seconds": seconds, "said": _said(printed)}
    print(f"{step.name}: {result}, {seconds} s. {record['said']}", flush=True)
    return record


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the step and the processes that it started, by an interrupt if that will do: pytest then says what it has."""
    for number, patience in ((signal.SIGINT, 8), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
            return
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


def _said(printed: str) -> str:
    """The summary of a sanitizer, or the last line."""
    lines = [line.strip("= ") for line in printed.splitlines() if line.strip("= ")]
    summaries = [line for line in lines if "SUMMARY" in line]
    return (summaries or lines or [""])[-1].replace("|", "/")[:300]


def build(arch: str) -> Step:
    environment = {"FASTRL_CPP": "1", "FASTRL_CUDA": "1", "FASTRL_CUDA_ARCHS": arch}
    return Step("build", (PYTHON, "setup.py", "build_ext", "--inplace"), BUILD, environment)


def checks(dry_run: bool, built: bool) -> list[Step]:
    """The op tests per implementation, and the sanitizers; a dry run takes few tests and no sanitizer."""
    device = "cpu" if dry_run else "cuda"

    def tests(impl: str, *arguments: str) -> Step:
        # The project's own options ask for plugins that may not be there.
        plain = ("-o", "addopts=", "-p", "no:cacheprovider", "--tb=short", "-q", "-rf")
        command = (PYTHON, "-m", "pytest", "tests/ops", f"--impl={impl}", f"--device={device}")
        return Step(f"tests {impl}", (*command, *plain, *arguments), CHECKS)

    # The reference tells a test that cannot run on a GPU from a kernel that is wrong there.
    steps = [tests("reference", "-k", "hand_worked")]
    if dry_run:
        return [*steps, Step("smoke", (PYTHON, "-m", "benchmarks.gpu_smoke", "--dry-run"), CHECKS)]
    has_workers = importlib.util.find_spec("xdist") is not None
    workers = ("-n", str(max(1, (os.cpu_count() or 1) // 3))) if has_workers else ()
    steps += [tests("cuda", *workers)] if built else [Step("tests cuda", (), 0)]
    return [*steps, tests("triton", *workers), sanitizer("memcheck"), sanitizer("racecheck")]


def sanitizer(tool: str) -> Step:
    nvcc = shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    places = [os.environ.get("PATH", ""), f"{home}/bin"]
    places += [str(Path(nvcc).resolve().parent)] if nvcc else []
    program = shutil.which("compute-sanitizer", path=os.pathsep.join(places))
    if program is None:
        return Step(tool, (), 0)
    # Without torch's cache every tensor is an allocation of its own, and an access behind its end shows.
    command = (program, "--tool", tool, "--error-exitcode", "86", PYTHON, "-m")
    no_cache = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return Step(tool, (*command, "benchmarks.gpu_smoke"), CHECKS, no_cache)


def measure(records: Path, ends: float, dry_run: bool, log: Path) -> Record:
    """Start again behind whatever ended the process, until everything has its record or the time is over."""
    seconds, done = 0.0, {}
    for _ in range(ATTEMPTS):
        left = ends - time.monotonic()
        if left < 20:
            break
        command = [PYTHON, "-m", "benchmarks.gpu", f"--records={records}", f"--seconds={left - 15}"]
        command += ["--dry-run"] if dry_run else []
        done = run(Step("measure", command, left), log)
        seconds += done["seconds"]
        if done["result"] == "passed":
            break
    else:
        done["result"] += f", {ATTEMPTS} times"
    nothing = {"step": "measure", "result": "not begun: the time was over", "said": ""}
    return {**(done or nothing), "seconds": round(seconds, 1)}


def report(records: Path, steps: Sequence[Record], dry_run: bool) -> list[Record]:
    """Complete the records in their file and write the table beside it."""
    # Not before the build: this loads the compiled module.
    from benchmarks import gpu, gpu_cases, gpu_report

    found = gpu_report.finished(gpu.read(records), gpu_cases.cases(dry_run), judge=not dry_run)
    lines = [json.dumps(line) + "\n" for line in (*steps, *found)]
    records.write_text("".join(lines))
    table = gpu_report.markdown(found, steps)
    records.with_suffix(".md").write_text(table)
    print(f"\n{table}", flush=True)
    return found


def _folder(dry_run: bool) -> Path:
    """Where the results go."""
    given = os.environ.get("OUT")
    if given:
        folder = Path(given)
    elif dry_run:
        folder = Path(tempfile.mkdtemp(prefix="gpu_check-"))
    else:
        slug = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
        folder = ROOT / "benchmarks" / "results" / slug
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every step passed and every kernel that is there was measured."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_check.sh", description=__doc__)
    parser.add_argument(
        "--dry-run", action="store_true", help="on CPU, with what is built, at next to no size"
    )
    dry_run = parser.parse_args(arguments).dry_run
    if not dry_run and not torch.cuda.is_available():
        print("torch finds no GPU; --dry-run goes through the motions without one")
        return 2
    torch.set_default_device("cpu" if dry_run else "cuda")
    records = _folder(dry_run) / f"{datetime.date.today():%Y-%m-%d}.jsonl"
    log = records.with_suffix(".log")
    for old in (records, log):
        old.unlink(missing_ok=True)

    steps = []
    if not dry_run:
        steps.append(run(build("".join(map(str, torch.cuda.get_device_capability()))), log))
    built = all(step["result"] == "passed" for step in steps)
    side_by_side = checks(dry_run, built)
    with ThreadPoolExecutor(len(side_by_side)) as pool:
        steps += pool.map(lambda step: run(step, log), side_by_side)
    steps.append(measure(records, start + LIMIT, dry_run, log))
    found = report(records, steps, dry_run)
    print(f"{time.monotonic() - start:.0f} s; {records.with_suffix('.md')}")
    failed = [s for s in steps if s["result"] not in ("passed", "not available")]
    failed += [
        r
        for r in found
        if r["provider"].startswith("fastrl")
        and not r.get("failed", "not available").startswith("not available")
    ]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
