"""The CUDA kernels compile for every supported architecture, the library loads without a GPU, and budgets are kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import budget, cuda_resources

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "cuda"
ARCHITECTURES = {"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"}

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")


@pytest.fixture(scope="module")
def library() -> Path:
    """The extension with CUDA kernels, in a copy of the package of its own."""
    environment = os.environ | {"FASTRL_CUDA": "1", "FASTRL_CPP": "1", "FASTRL_WERROR": "1"}
    for name in ("FASTRL_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST"):
        environment.pop(name, None)
    for old in BUILD.glob("lib*"):
        shutil.rmtree(old)
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-base", str(BUILD)]
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (library,) = BUILD.glob("lib*/fastrl/_C*.so")
    return library


def run_there(library: Path, *arguments: str) -> str:
    """Python with the package beside the library instead of this one."""
    package = library.parent.parent
    environment = os.environ | {"PYTHONPATH": str(package)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=package, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(1200)
def test_builds_for_every_architecture(library: Path) -> None:
    if cuda_resources.cuobjdump() is None:
        pytest.skip("no cuobjdump, neither on PATH nor in triton")
    assert cuda_resources.architectures(library) == ARCHITECTURES


def test_no_kernel_spills_and_all_keep_their_budgets(library: Path) -> None:
    if cuda_resources.cuobjdump() is None:
        pytest.skip("no cuobjdump, neither on PATH nor in triton")
    assert not budget.exceeded("cuda", cuda_resources.resources(library))


def test_every_op_has_a_cuda_kernel_and_says_why_it_does_not_run_here(library: Path) -> None:
    info = json.loads(run_there(library, "-m", "fastrl.info", "--json"))
    assert info["build"]["cuda_archs"] == [
        a.removeprefix("sm_") for a in sorted(ARCHITECTURES, key=lambda a: int(a[3:]))
    ]
    for op, devices in info["ops"].items():
        assert devices["cpu"]["auto"] == "cpu", op
        assert devices["cpu"]["missing"]["cuda"].startswith("built, but"), op
        assert "cuda" in devices["cuda"]["available"], op


def test_cpu_kernels_of_a_build_with_cuda(library: Path) -> None:
    program = (
        "import torch, fastrl\n"
        "r, v = torch.randn(3, 50), torch.randn(3, 50)\n"
        "for x, y in zip(fastrl.gae(r, v, gamma=0.9, lam=0.9), fastrl.gae(r, v, gamma=0.9, lam=0.9, impl='reference')):\n"
        "    torch.testing.assert_close(x, y)\n"
        "print(fastrl.__file__)"
    )
    assert run_there(library, "-c", program).strip() == str(library.parent / "__init__.py")


def test_device_code_is_free_of_torch() -> None:
    found = [
        p
        for p in (ROOT / "csrc").rglob("*.cuh")
        if "<torch" in p.read_text() or "torch::" in p.read_text()
    ]
    assert not found
