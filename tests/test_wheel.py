"""The wheel: what is in it, and that it works by itself from where it was installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import fastrl
from fastrl import _library

ROOT = Path(__file__).parent.parent


def pip(*arguments: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def as_built() -> dict[str, str]:
    """The environment that the objects of the last build agree with, so that they are used again."""
    build = ROOT / "build" / f"ninja-{sys.implementation.cache_tag}" / "build.ninja"
    text = build.read_text() if build.exists() else ""
    return {
        "FASTRL_CPP": "1",
        "FASTRL_WERROR": "1" if "-Werror" in text else "",
        "FASTRL_CUDA": "" if "nvcc" in text else "0",
    }


@pytest.mark.skipif(
    _library.compiled_error is not None,
    reason="the kernels are not built: no compiler to build a wheel",
)
def test_a_wheel_works_where_it_is_installed(tmp_path: Path) -> None:
    pip("wheel", "--no-build-isolation", "--no-deps", "-w", str(tmp_path), ".", **as_built())
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"fastrl_kernels-{fastrl.__version__}-cp")
    names = zipfile.ZipFile(wheel).namelist()
    compiled = f"fastrl/_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert {compiled, "fastrl/py.typed", "fastrl/ops/gae/api.py"} <= set(names)
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"fastrl"}
    code = zipfile.ZipFile(wheel).read(compiled)
    for path in (ROOT, sys.prefix, sysconfig.get_paths()["include"]):
        assert str(path).encode() not in code

    home = tmp_path / "installed"
    pip("install", "--no-deps", "--target", str(home), str(wheel))
    program = (
        "import json, sys\n"
        # The development install would come first otherwise.
        "sys.meta_path = [f for f in sys.meta_path if 'Editable' not in str(f)]\n"
        "import torch, fastrl\n"
        "from fastrl import info\n"
        "torch.manual_seed(0)\n"
        "r, v, mask = torch.randn(3, 50), torch.randn(3, 50), torch.rand(3, 50) < 0.7\n"
        "a, b = (fastrl.gae(r, v, mask, gamma=0.9, lam=0.8, impl=i) for i in ('cpu', 'reference'))\n"
        "difference = max(float((x - y).abs().max()) for x, y in zip(a, b))\n"
        "print(json.dumps([fastrl.__file__, difference, info.collect()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    where, difference, report = json.loads(done.stdout)
    assert Path(where).is_relative_to(home)
    assert difference < 1e-5
    assert report["build"]["compiled"] is True
    assert all(op["cpu"]["auto"] == "cpu" for op in report["ops"].values())
