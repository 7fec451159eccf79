"""What the CUDA kernels of a compiled library take: registers, shared memory, spills, and how wide their loads are."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

# The architecture whose machine code is read; of the others only what the assembler reports.
DISASSEMBLED = "sm_90"


class Resources(NamedTuple):
    """Of one kernel: the largest over its architectures, instructions as on `DISASSEMBLED`."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    spills: int  # loads and stores of local memory
    wide_load_share: (
        float  # of the loads of global memory, those of 128 bits; 1 when there are none
    )


def cuobjdump() -> str | None:
    """NVIDIA's disassembler, on PATH or as triton brings it."""
    spec = importlib.util.find_spec("triton")
    beside = Path(spec.origin).parent / "backends/nvidia/bin" if spec and spec.origin else None
    return shutil.which("cuobjdump") or shutil.which("cuobjdump", path=beside)


def architectures(library: Path) -> set[str]:
    """Those with machine code in the library."""
    found = re.findall(r"sm_\d+[af]?", _run("-lelf", library))
    return set(found)


def resources(library: Path, architecture: str | None = DISASSEMBLED) -> dict[str, Resources]:
    """By demangled name without the argument list; ``architecture`` None for a file with code of a single one."""
    usage: dict[str, list[dict[str, int]]] = defaultdict(list)
    for name, line in re.findall(r"Function (\S+):\s*\n\s*(REG.*)", _run("-res-usage", library)):
        usage[name].append({k: int(v) for k, v in re.findall(r"(\w+):(\d+)", line)})
    only = ("-arch", architecture) if architecture else ()
    loads = _instructions(_run("-sass", *only, library))
    names = {_demangled(name) for name in usage}
    assert len(names) == len(usage), "two kernels under one name"
    return {
        _demangled(name): Resources(
            registers=max(u["REG"] for u in by_arch),
            shared_bytes=max(u["SHARED"] for u in by_arch),
            stack_bytes=max(u["STACK"] + u["LOCAL"] for u in by_arch),
            spills=loads[name].count("local"),
            wide_load_share=_share(loads[name]),
        )
        for name, by_arch in sorted(usage.items())
    }


def _instructions(sass: str) -> dict[str, list[str]]:
    """The memory instructions of each function: local, wide (a global load of 128 bits) or narrow."""
    found: dict[str, list[str]] = defaultdict(list)
    name = ""
    for line in sass.splitlines():
        if match := re.search(r"Function : (\S+)", line):
            name = match[1]
        elif re.search(r"\b(LDL|STL)\b", line):
            found[name].append("local")
        elif match := re.search(r"\bLDG(\S*)", line):
            found[name].append("wide" if ".128" in match[1] else "narrow")
    return found


def _share(instructions: list[str]) -> float:
    wide, narrow = instructions.count("wide"), instructions.count("narrow")
    return round(wide / (wide + narrow), 3) if wide + narrow else 1.0


def _demangled(name: str) -> str:
    plain = subprocess.run(["c++filt", name], text=True, capture_output=True, check=True).stdout
    plain = plain.strip().removeprefix("void ").replace("fastrl::cuda::", "")
    # Template arguments first: an enumerator or bool is printed as (type)number, which is no argument list.
    plain = plain.replace("(bool)1", "true").replace("(bool)0", "false")
    return re.sub(r"\(.*", "", re.sub(r"\([\w:]+\)(\d+)", r"\1", plain))


def _run(*arguments: str | Path) -> str:
    tool = cuobjdump()
    if tool is None:
        raise FileNotFoundError("no cuobjdump on PATH and no triton that brings it")
    command = [tool, *map(str, arguments)]
    return subprocess.run(command, text=True, capture_output=True, check=True).stdout
