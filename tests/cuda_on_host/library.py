"""The CUDA kernels of this project compiled for the host: ``impl="cuda"`` then runs on CPU tensors.

Three builds of the same sources, chosen by ``FASTRL_CUDA_ON_HOST``:
    plain     optimised, for the op tests
    address   under AddressSanitizer and UBSan; the interpreter must have been started with their libraries preloaded
    checked   every access of a kernel is seen: races in shared memory are faults, bytes are counted
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

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
    "address": ["-fsanitize=address,undefined", "-fno-omit-frame-pointer"],
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
    (folder / "build.ninja").write_text(ninja_file(kind, sources, folder, target, with_torch))
    command = [sys.executable, "-m", "ninja", "--quiet", "-C", str(folder)]
    jobs = os.environ.get("MAX_JOBS")
    done = subprocess.run(
        command + (["-j", jobs] if jobs else []), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"the kernels do not compile for the host:\n{done.stdout}{done.stderr}")
    return target


def chosen_kind() -> str:
    kind = os.environ.get("FASTRL_CUDA_ON_HOST", "plain")
    if kind not in KINDS:
        raise ValueError(f"FASTRL_CUDA_ON_HOST must be one of {', '.join(KINDS)}, got {kind!r}")
    return kind


def load(kind: str | None = None) -> ctypes.CDLL:
    """Build and load the kernels of ``csrc``, and let ``impl="cuda"`` of every op they implement run them."""
    path = build(kind or chosen_kind(), CSRC.rglob("*_cuda.cu"), "kernels")
    torch.ops.load_library(path)
    implemented = _define_operators()
    on_device = _backends._cuda_unavailable

    def cuda_unavailable(op: str, device_type: str) -> str | None:
        if device_type == "cpu" and op in implemented:
            return None
        return on_device(op, device_type)

    _backends._cuda_unavailable = cuda_unavailable
    return ctypes.CDLL(str(path))


def _define_operators() -> set[str]:
    """Give every operator that the library implements its schema, and an overload as implementation "cuda"."""
    library = torch.library.Library(NAMESPACE, "DEF")
    _KEEP.append(library)
    implemented = set()
    for name, definition in _library.definitions.items():
        library.define(name + definition.signature, tags=(torch.Tag.pt2_compliant_tag,))
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", "CPU"):
            continue
        torch.library.register_fake(f"{NAMESPACE}::{name}", definition.fake, lib=library)
        definition.operators["cuda"] = getattr(getattr(torch.ops, NAMESPACE), name).default
        implemented.add(name)
    return implemented


# A library's definitions go away with it.
_KEEP: list[torch.library.Library] = []


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
