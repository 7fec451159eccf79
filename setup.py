"""Builds ``fastrl._C``: one object per kernel file and instruction set, driven by ninja.

Environment:
    FASTRL_CPP=0        install without compiled kernels (the reference implementations still work)
    FASTRL_CPP=1        fail when the kernels cannot be built; by default a missing compiler is a warning
    FASTRL_SANITIZE     e.g. ``address,undefined``: instrument the kernels (see ``make sanitize``)
    FASTRL_WERROR=1     compiler warnings are errors (continuous integration)
    MAX_JOBS            parallel compilations
    CXX                 the C++ compiler
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

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


def capabilities() -> list[str]:
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return ["baseline", "avx2", "avx512"] if x86 else ["baseline"]


def ninja_file(build_dir: Path, target: Path) -> str:
    """The whole build as a ninja file: kernels once per capability, the rest once."""
    includes, libraries = torch_paths()
    levels = capabilities()
    sanitize = os.environ.get("FASTRL_SANITIZE", "")
    include_flags = [f"-I{CSRC}"]
    include_flags += [f"-isystem{p}" for p in [*includes, sysconfig.get_paths()["include"]]]
    cflags = [
        *("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno"),
        *("-fno-trapping-math", "-ffp-contract=fast"),
        *("-Wall", "-Wextra", "-Wno-psabi"),
        # g++ 12 reports the deliberately undefined registers of its own AVX-512 header.
        *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),
        *(["-Werror"] if os.environ.get("FASTRL_WERROR") == "1" else []),
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET}",
        f'-DFASTRL_TORCH_TARGET=\\"{MIN_TORCH}\\"',
        f'-DFASTRL_SANITIZER=\\"{sanitize}\\"',
        *(f"-DFASTRL_HAS_{level.upper()}" for level in levels if level != "baseline"),
    ]
    # No rpath: importing torch has loaded its libraries already, and a wheel must not carry this machine's paths.
    ldflags = ["-shared", *(f"-L{p}" for p in libraries)]
    ldflags += ["-ltorch", "-ltorch_cpu", "-lc10"]
    if sanitize:
        instrument = [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-g", "-O1"]
        cflags += instrument
        ldflags += instrument
    lines = [
        f"cxx = {compiler()}",
        f"cflags = {' '.join(cflags + include_flags)}",
        f"ldflags = {' '.join(ldflags)}",
        "rule compile",
        "  description = compile $out",
        "  command = $cxx -MMD -MF $out.d $cflags $flags -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
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
            lines += [f"build {output}: compile {source}", f"  flags = {' '.join(flags)}"]
            objects.append(str(output))
    lines += [f"build {target}: link {' '.join(objects)}", f"default {target}", ""]
    return "\n".join(lines)


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
            (build_dir / "build.ninja").write_text(ninja_file(build_dir, target))
            jobs = os.environ.get("MAX_JOBS")
            command = [sys.executable, "-m", "ninja", "-C", str(build_dir)]
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
