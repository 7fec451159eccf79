"""Builds ``fastrl._C``: one object per kernel file and instruction set, driven by ninja.

Environment:
    FASTRL_CPP=0        install without compiled kernels (the reference implementations still work)
    FASTRL_CPP=1        fail when the kernels cannot be built; by default a missing compiler is a warning
    FASTRL_CUDA=1       build the CUDA kernels and fail when that is impossible; 0: leave them out. By default they are
                        built when nvcc is found and either torch has CUDA or architectures are named
    FASTRL_CUDA_ARCHS   e.g. ``80;90;100``, by default all that are supported and nvcc knows; ``TORCH_CUDA_ARCH_LIST``
                        (``8.0;9.0+PTX``) is read when it is not set. PTX of the newest is always included
    CUDA_HOME           where the toolkit is; by default where nvcc on PATH is
    FASTRL_SANITIZE     e.g. ``address,undefined``: instrument the kernels (see ``make sanitize``)
    FASTRL_WERROR=1     compiler warnings are errors (continuous integration)
    MAX_JOBS            parallel compilations
    CXX                 the C++ compiler
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
CSRC = ROOT / "csrc"
MIN_TORCH = "2.10"
# The stable ABI of torch 2.10, so that one build serves every later torch.
TORCH_TARGET = "0x020a000000000000"

CAPABILITY_FLAGS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": [
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
        "-mprefer-vector-width=512",
    ],
}


# Compute capabilities, with the first CUDA release whose nvcc knows them.
CUDA_ARCHS = {"80": 12.4, "86": 12.4, "89": 12.4, "90": 12.4, "100": 12.8, "120": 12.8}
MIN_CUDA = 12.4
# No kernel uses what an architecture has beyond the first of its family.
CUDA_FAMILIES = {"86": "80", "89": "80", "120": "100"}


class Unbuildable(Exception):
    """Why the kernels cannot be built on this machine."""


def torch_paths() -> tuple[list[str], list[str]]:
    """Include and library folders of the installed torch, after checking that there is one and that it is new enough."""
    from packaging.version import Version

    remedy = "install torch first and use `pip install --no-build-isolation`"
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        raise Unbuildable(f"torch is missing ({error}); {remedy}") from error
    if Version(torch.__version__) < Version(MIN_TORCH):
        raise Unbuildable(f"torch {torch.__version__} is older than {MIN_TORCH}; {remedy}")
    return cpp_extension.include_paths(), cpp_extension.library_paths()


def compiler() -> str:
    wanted = os.environ.get("CXX", "g++")
    found = shutil.which(shlex.split(wanted)[0])
    if found is None:
        raise Unbuildable(f"no C++ compiler: {wanted!r} is not on PATH; install g++ or set CXX")
    return wanted


def ninja() -> list[str]:
    """The package that pip installs, or the program of the system."""
    if importlib.util.find_spec("ninja") is not None:
        return [sys.executable, "-m", "ninja"]
    found = shutil.which("ninja")
    if found is None:
        raise Unbuildable("no ninja, neither as a Python package nor on PATH; pip install ninja")
    return [found]


def capabilities() -> list[str]:
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return ["baseline", "avx2", "avx512"] if x86 else ["baseline"]


class Cuda(NamedTuple):
    """The toolkit and the architectures to build for."""

    nvcc: str
    version: str
    root: Path
    archs: list[str]

    @classmethod
    def find(cls) -> Cuda:
        home = os.environ.get("CUDA_HOME")
        nvcc = shutil.which("nvcc", path=f"{home}/bin" if home else None)
        if nvcc is None:
            raise Unbuildable(
                "no nvcc on PATH or in CUDA_HOME; install the CUDA toolkit or set FASTRL_CUDA=0"
            )
        version = re.search(r"release (\d+\.\d+)", run(nvcc, "--version"))
        # nvcc on PATH may be a script or a link: it says itself where its toolkit is.
        root = re.search(
            r"^#\$ TOP=(.+)$", run(nvcc, "--dryrun", "-x", "cu", "-E", os.devnull), re.M
        )
        if version is None or root is None:
            raise Unbuildable(f"{nvcc} does not say which release it is and where it lies")
        if float(version[1]) < MIN_CUDA:
            raise Unbuildable(f"nvcc {version[1]} is older than {MIN_CUDA}")
        return cls(nvcc, version[1], Path(root[1].strip()), cuda_archs(float(version[1])))

    def gencode(self) -> list[str]:
        """Machine code for each architecture, from one intermediate code per family: half the time of one for each."""
        families: dict[str, list[str]] = {}
        for arch in self.archs:
            families.setdefault(CUDA_FAMILIES.get(arch, arch), []).append(arch)
        flags = [
            f"-gencode=arch=compute_{family},code=[{','.join(f'sm_{a}' for a in members)}]"
            for family, members in families.items()
        ]
        newest = max(families, key=lambda a: int(a.rstrip("af")))
        return [*flags, f"-gencode=arch=compute_{newest},code=compute_{newest}"]

    def libraries(self) -> list[str]:
        folders = [
            f for f in ("lib64", "lib", "targets/x86_64-linux/lib") if (self.root / f).is_dir()
        ]
        return [
            *(f"-L{self.root / f}" for f in folders),
            "-lcudart_static",
            "-ldl",
            "-lrt",
            "-lpthread",
        ]


def run(*command: str) -> str:
    done = subprocess.run(command, text=True, capture_output=True)
    return done.stdout + done.stderr


def cuda_archs(nvcc: float) -> list[str]:
    """``FASTRL_CUDA_ARCHS`` (80;90), ``TORCH_CUDA_ARCH_LIST`` (8.0;9.0+PTX), or all that this nvcc knows."""
    wanted = os.environ.get("FASTRL_CUDA_ARCHS") or os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    archs = [a.replace("+PTX", "").replace(".", "") for a in re.split(r"[;, ]+", wanted) if a]
    unknown = [a for a in archs if not re.fullmatch(r"\d+[af]?", a)]
    if unknown:
        raise Unbuildable(f"architectures are written like 90 or 9.0, got {unknown}")
    return archs or [a for a, since in CUDA_ARCHS.items() if since <= nvcc]


def find_cuda() -> Cuda | None:
    """The toolkit if the CUDA kernels are to be built; never asks whether a GPU is there."""
    wish = os.environ.get("FASTRL_CUDA", "")
    if wish == "0":
        return None
    if wish == "1":
        return Cuda.find()
    import torch

    named = os.environ.get("FASTRL_CUDA_ARCHS") or os.environ.get("TORCH_CUDA_ARCH_LIST")
    if torch.version.cuda is None and not named:
        return None
    try:
        return Cuda.find()
    except Unbuildable as reason:
        print(f"fastrl: WARNING: building without CUDA kernels: {reason}", file=sys.stderr)
        return None


def ninja_file(build_dir: Path, target: Path) -> str:
    """The whole build as a ninja file: kernels once per capability, the rest once."""
    includes, libraries = torch_paths()
    levels = capabilities()
    cuda = find_cuda()
    sanitize = os.environ.get("FASTRL_SANITIZE", "")
    includes = [*includes, sysconfig.get_paths()["include"]]
    # Error messages name source files; a wheel must not carry this machine's paths.
    no_paths = [f"-ffile-prefix-map={p}/=" for p in (ROOT, *includes)]
    include_flags = [f"-I{CSRC}", *(f"-isystem {p}" for p in includes)]
    cflags = [
        *("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno"),
        *("-fno-trapping-math", "-ffp-contract=fast"),
        *("-Wall", "-Wextra", "-Wno-psabi"),
        # g++ 12 reports the deliberately undefined registers of its own AVX-512 header.
        *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),
        *(["-Werror"] if os.environ.get("FASTRL_WERROR") == "1" else []),
        *no_paths,
        f'-DFASTRL_TORCH_TARGET=\\"{MIN_TORCH}\\"',
        f'-DFASTRL_SANITIZER=\\"{sanitize}\\"',
        *(f"-DFASTRL_HAS_{level.upper()}" for level in levels if level != "baseline"),
    ]
    # No rpath: importing torch has loaded its libraries already, and a wheel must not carry this machine's paths.
    ldflags = ["-shared", *(f"-L{p}" for p in libraries)]
    ldflags += ["-ltorch", "-ltorch_cpu", "-lc10"]
    defines = [f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"]
    module_flags = []
    if cuda is not None:
        module_flags.append(f'-DFASTRL_CUDA_ARCHS=\\"{",".join(cuda.archs)}\\"')
        module_flags.append(f'-DFASTRL_NVCC=\\"{cuda.version}\\"')
        ldflags += cuda.libraries()
    if sanitize:
        instrument = [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-g", "-O1"]
        cflags += instrument
        ldflags += instrument
    lines = [
        f"cxx = {compiler()}",
        f"cflags = {' '.join(cflags + defines + include_flags)}",
        f"ldflags = {' '.join(ldflags)}",
        "rule compile",
        "  description = compile $out",
        "  command = $cxx -MMD -MF $out.d $cflags $flags -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        *cuda_rule(cuda, defines + include_flags, no_paths),
        "rule link",
        "  description = link $out",
        "  command = $cxx $in $ldflags -o $out",
    ]
    objects = []
    for source in sorted(CSRC.rglob("*.cpp")):
        relative = source.relative_to(CSRC)
        is_kernel = source.stem.endswith("_kernel")
        for level in levels if is_kernel else ["baseline"]:
            suffix = f".{level}.o" if is_kernel else ".o"
            output = build_dir / relative.with_suffix(suffix)
            output.parent.mkdir(parents=True, exist_ok=True)
            flags = [*CAPABILITY_FLAGS[level], f"-DFASTRL_CAPABILITY={level}"] if is_kernel else []
            flags += module_flags if source.name == "module.cpp" else []
            lines += [f"build {output}: compile {source}", f"  flags = {' '.join(flags)}"]
            objects.append(str(output))
    for source in sorted(CSRC.rglob("*.cu")) if cuda is not None else ():
        output = build_dir / source.relative_to(CSRC).with_suffix(".cuda.o")
        output.parent.mkdir(parents=True, exist_ok=True)
        lines.append(f"build {output}: compile_cuda {source}")
        objects.append(str(output))
    lines += [f"build {target}: link {' '.join(objects)}", f"default {target}", ""]
    return "\n".join(lines)


def cuda_rule(cuda: Cuda | None, flags: list[str], no_paths: list[str]) -> list[str]:
    if cuda is None:
        return []
    host = ["-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", *no_paths]
    host += ["-Werror"] if os.environ.get("FASTRL_WERROR") == "1" else []
    nvcc_flags = ["-std=c++20", "-O3", f"-ccbin={shlex.split(compiler())[0]}"]
    nvcc_flags += [*cuda.gencode(), f"-Xcompiler={','.join(host)}"]
    return [
        f"nvcc = {cuda.nvcc}",
        f"nvcc_flags = {' '.join(nvcc_flags + flags)}",
        "rule compile_cuda",
        "  description = compile $out",
        "  command = $nvcc -MD -MF $out.d $nvcc_flags -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
    ]


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One build at a time: another waits for this one."""
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class NinjaBuild(build_ext):
    """Hands the build to ninja; without a compiler or torch it warns and leaves the package pure Python."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        sanitizer = os.environ.get("FASTRL_SANITIZE", "").replace(",", "-")
        build_dir = (
            ROOT
            / "build"
            / "-".join(filter(None, ("ninja", sys.implementation.cache_tag, sanitizer)))
        )
        build_dir.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            jobs = os.environ.get("MAX_JOBS")
            command = [*ninja(), "-C", str(build_dir)]
            with locked(build_dir):
                (build_dir / "build.ninja").write_text(ninja_file(build_dir, target))
                subprocess.run(command + (["-j", jobs] if jobs else []), check=True)
        except (Unbuildable, subprocess.CalledProcessError) as error:
            if os.environ.get("FASTRL_CPP") == "1":
                raise SystemExit(
                    f"fastrl: FASTRL_CPP=1, but the kernels were not built: {error}"
                ) from error
            print(
                f"fastrl: WARNING: installing without compiled kernels: {error}. The reference "
                "implementations work; `fastrl info` shows what is missing",
                file=sys.stderr,
            )

    def copy_extensions_to_source(self) -> None:
        built = [self.get_ext_filename(self.get_ext_fullname(ext.name)) for ext in self.extensions]
        if all((Path(self.build_lib) / name).exists() for name in built):
            super().copy_extensions_to_source()


want_kernels = os.environ.get("FASTRL_CPP") != "0"
setup(
    ext_modules=[Extension("fastrl._C", sources=[])] if want_kernels else [],
    cmdclass={"build_ext": NinjaBuild},
)
