"""The CUDA kernels of this project compiled for the host: ``impl="cuda"`` then runs on CPU tensors.

Three builds of the same sources, chosen by ``FASTRL_CUDA_ON_HOST``:
    plain     optimised, for the op tests
    address   under AddressSanitizer and UBSan; the interpreter must have been started with their libraries preloaded
    checked   every access of a kernel is seen: races in shared memory are faults, bytes are counted
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils import cpp_extension

from fastrl import _backends, _library

HERE = Path(__file__).parent.resolve()
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
NAMESPACE = "fastrl_cuda_on_host"
TORCH_TARGET = "0x020a000000000000"

KINDS = {
    "plain": ["-fsanitize=alignment"],
    # Of UBSan the checks that memory and arithmetic need: all of them take ten times as long to compile, and one objects
    # to addresses of elements that are then not accessed.
    "address": [
        *("-O1", "-fno-omit-frame-pointer", "-fsanitize=address,alignment,bounds,bool,shift"),
        "-fsanitize=signed-integer-overflow,integer-divide-by-zero",
    ],
    # The instrumentation of ThreadSanitizer without its runtime. Scalar replacement would take vector loads apart.
    "checked": ["-fsanitize=thread,alignment", "-fno-tree-sra"],
}
# What watches every access.
CHECKED_ONLY = ("accesses", "races", "traffic")
# The runtime itself is no kernel: it is never instrumented.
RUNTIME = {
    "plain": [],
    "address": ["-DCUDA_ON_HOST_ADDRESS"],
    "checked": ["-DCUDA_ON_HOST_CHECKED"],
}
COMMON = [
    *("-std=c++20", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique"),
    *("-Wall", "-Wextra", "-Werror"),
]
KERNELS = [
    *("-x", "c++", "-DFASTRL_CUDA_ON_HOST", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"),
    # nvcc fuses multiply and add too.
    *("-march=native", "-ffp-contract=fast", "-fno-math-errno"),
    # Unrolling is nvcc's business; and registers of elements that do not exist stay undefined.
    *("-Wno-unknown-pragmas", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
]


def ninja_file(
    kind: str, sources: Iterable[Path], folder: Path, target: Path, with_torch: bool
) -> str:
    includes = [f"-I{HERE / 'include'}", f"-I{CSRC}"]
    link = ["-shared"]
    if with_torch:
        includes += [f"-isystem{p}" for p in cpp_extension.include_paths()]
        link += [f"-L{p}" for p in cpp_extension.library_paths()]
        link += ["-ltorch", "-ltorch_cpu", "-lc10"]
    tls = ["-mtls-dialect=gnu2"] if platform.machine() == "x86_64" else []
    kernels = [*COMMON, *tls, *KERNELS, *KINDS[kind], *includes]
    runtime = [*COMMON, *RUNTIME[kind], f"-I{HERE / 'include'}"]
    # The address build finds its runtime in the interpreter.
    link += KINDS[kind] if kind == "address" else ["-Wl,--no-undefined"]
    lines = [
        f"cxx = {os.environ.get('CXX', 'g++')}",
        f"kernel_flags = {' '.join(kernels)}",
        f"runtime_flags = {' '.join(runtime)}",
        f"link_flags = {' '.join(link)}",
    ]
    for rule in ("kernel", "runtime"):
        lines += [
            f"rule {rule}",
            "  description = compile $out",
            f"  command = $cxx -MMD -MF $out.d ${rule}_flags -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
        ]
    lines += ["rule link", "  description = link $out", "  command = $cxx $in -o $out $link_flags"]
    objects = []
    for rule, paths in (("kernel", sources), ("runtime", (HERE / "runtime").glob("*.cpp"))):
        for path in sorted(p.resolve() for p in paths):
            if rule == "runtime" and path.stem in CHECKED_ONLY and kind != "checked":
                continue
            objects.append(folder / f"{rule}-{path.stem}.o")
            lines.append(f"build {objects[-1]}: {rule} {path}")
    lines += [f"build {target}: link {' '.join(map(str, objects))}", f"default {target}", ""]
    return "\n".join(lines)


def build(kind: str, sources: Iterable[Path], name: str, with_torch: bool = True) -> Path:
    """Compile what has changed since the last time; return the library."""
    folder = ROOT / "build" / "cuda_on_host" / kind / name
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes start at the same time
        (folder / "build.ninja").write_text(ninja_file(kind, sources, folder, target, with_torch))
        command = [sys.executable, "-m", "ninja", "--quiet", "-C", str(folder)]
        jobs = os.environ.get("MAX_JOBS")
        done = subprocess.run(
            command + (["-j", jobs] if jobs else []),
            # The compiler works without the sanitizers' libraries.
            env={key: value for key, value in os.environ.items() if key != "LD_PRELOAD"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise RuntimeError(f"the kernels do not compile for the host:\n{done.stdout}{done.stderr}")
    return target


def chosen_kind() -> str:
    kind = os.environ.get("FASTRL_CUDA_ON_HOST", "plain")
    if kind not in KINDS:
        raise ValueError(f"FASTRL_CUDA_ON_HOST must be one of {', '.join(KINDS)}, got {kind!r}")
    return kind


class Kernels(NamedTuple):
    """The kernels of ``csrc`` in one build, and the operators that they implement."""

    library: ctypes.CDLL
    operators: dict[str, Any]


@functools.cache
def kernels(kind: str) -> Kernels:
    """Build and load. A process can have one kind: the dispatcher holds one kernel per operator."""
    path = build(kind, CSRC.rglob("*_cuda.cu"), "kernels")
    torch.ops.load_library(path)
    return Kernels(ctypes.CDLL(str(path)), _define_operators())


def route(operators: dict[str, Any]) -> Callable[[], None]:
    """Let ``impl="cuda"`` run ``operators`` on CPU tensors until the function that this returns is called."""
    on_device = {name: _library.definitions[name].operators["cuda"] for name in operators}
    unavailable_on_device = _backends._cuda_unavailable

    def cuda_unavailable(op: str, device_type: str) -> str | None:
        if device_type == "cpu" and op in operators:
            return None
        return unavailable_on_device(op, device_type)

    def use(table: dict[str, Any], unavailable: Callable[[str, str], str | None]) -> None:
        for name, operator in table.items():
            _library.definitions[name].operators["cuda"] = operator
        _backends._cuda_unavailable = unavailable
        _backends._chosen.clear()

    use(operators, cuda_unavailable)
    return lambda: use(on_device, unavailable_on_device)


def load(kind: str | None = None) -> None:
    """From here on ``impl="cuda"`` of every op that has a kernel runs it on the host."""
    route(kernels(kind or chosen_kind()).operators)


# A library's definitions go away with it.
_KEEP: list[torch.library.Library] = []


def _define_operators() -> dict[str, Any]:
    """Give every operator that the library implements the schema and the fake kernel of the package's own."""
    library = torch.library.Library(NAMESPACE, "DEF")
    _KEEP.append(library)
    operators = {}
    for name, definition in _library.definitions.items():
        library.define(name + definition.signature, tags=(torch.Tag.pt2_compliant_tag,))
        if name in _library.compositions:
            composition = _library.compositions[name]
            library.impl(name, _library.bound(composition.function, "cuda"), "CPU")
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", "CPU"):
            torch.library.register_fake(f"{NAMESPACE}::{name}", definition.fake, lib=library)
            operators[name] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return operators


def sanitizer_environment() -> dict[str, str]:
    """What a process needs in its environment to load the address build."""
    libraries = [
        subprocess.run(
            [os.environ.get("CXX", "g++"), f"-print-file-name={name}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
