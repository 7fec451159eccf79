"""Budgets of what the GPU kernels take: ``python -m benchmarks.budget`` compares, ``--write`` makes today's figures the budget.

Registers and shared memory may not grow and the share of 128-bit loads may not fall, as far as the same compiler is
used; nothing may ever spill. What takes less passes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import tomllib

from benchmarks import cuda_resources
from benchmarks.cuda_resources import Resources

PATH = Path(__file__).with_suffix(".toml")
LIBRARIES = "build/cuda/lib*/fastrl/_C*.so"
PARTS = ("cuda", "triton.cuda", "triton.hip")


def exceeded(part: str, measured: Mapping[str, Resources], path: Path = PATH) -> list[str]:
    """One line per figure beyond its budget, with both figures."""
    table = tomllib.loads(path.read_text()).get(part, {})
    budgets = {name: b for name, b in table.items() if name != "compiler"}
    same_compiler = table.get("compiler") == compiler(part)
    found = []
    for name, now in measured.items():
        for what, count in (("spills", now.spills), ("bytes of stack", now.stack_bytes)):
            if count > 0:
                found.append(f"{part}: {name}: {count} {what}, budget 0")
        if name not in budgets:
            found.append(f"{part}: {name}: no budget; run python -m benchmarks.budget --write")
        elif same_compiler:
            found += [f"{part}: {name}: {line}" for line in _beyond(now, budgets[name])]
    found += [f"{part}: {name}: a budget without a kernel" for name in budgets.keys() - measured]
    return found


def _beyond(now: Resources, budget: Mapping[str, float]) -> Iterator[str]:
    if now.registers > budget["registers"]:
        yield f"{now.registers} registers, budget {budget['registers']}"
    if now.shared_bytes > budget["shared"]:
        yield f"{now.shared_bytes} bytes of shared memory, budget {budget['shared']}"
    if now.wide_load_share < budget["wide"]:
        yield f"{now.wide_load_share} of the loads of 128 bits, budget {budget['wide']}"


def compiler(part: str) -> str:
    """Figures of another one are no change of ours."""
    if part == "cuda":
        version = subprocess.run(["nvcc", "--version"], text=True, capture_output=True, check=True)
        found = re.search(r"release ([\d.]+)", version.stdout)
        return f"nvcc {found[1] if found else '?'}"
    import triton

    return f"triton {triton.__version__}"


def measure(part: str) -> Mapping[str, Resources]:
    if part == "cuda":
        libraries = list(Path().glob(LIBRARIES))
        if len(libraries) != 1:
            sys.exit(
                f"{len(libraries)} files match {LIBRARIES}, expected one; "
                "run FASTRL_CUDA=1 python setup.py build --build-base build/cuda"
            )
        return cuda_resources.resources(libraries[0])
    from benchmarks import triton_resources

    return triton_resources.all_resources(part.removeprefix("triton."))


def text_of(part: str, measured: Mapping[str, Resources]) -> str:
    lines = [f'["{part}"]', f'compiler = "{compiler(part)}"']
    lines += [
        f'"{name}" = {{ registers = {r.registers}, shared = {r.shared_bytes}, wide = {r.wide_load_share} }}'
        for name, r in measured.items()
    ]
    return "\n".join(lines) + "\n"


def _write(texts: Mapping[str, str]) -> None:
    """Parts without a new text keep theirs."""
    old = PATH.read_text() if PATH.exists() else ""
    kept = {match[1]: match[0] for match in re.finditer(r'^\["(.*)"\]\n(?:.+\n)*', old, re.M)}
    texts = kept | dict(texts)
    head = "# The largest over all architectures; written by python -m benchmarks.budget --write.\n"
    PATH.write_text("\n".join([head, *(texts[part] for part in PARTS if part in texts)]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budget", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"replace them in {PATH.name}")
    parser.add_argument("parts", nargs="*", default=PARTS, help=f"of {', '.join(PARTS)}")
    arguments = parser.parse_args()
    measured = {part: measure(part) for part in arguments.parts}
    if arguments.write:
        _write({part: text_of(part, kernels) for part, kernels in measured.items()})
        return
    found = [line for part, kernels in measured.items() for line in exceeded(part, kernels)]
    sys.exit("\n".join(found) or None)


if __name__ == "__main__":
    main()
