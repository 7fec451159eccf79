"""The package itself: what importing costs, builds without a compiler, capabilities, `fastrl info`, public names."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastrl
from fastrl import _backends, info
from tests.conftest import built_capabilities

ROOT = Path(__file__).parent.parent
PUBLIC_OPS = (
    *("affine_scan", "discounted_returns", "gae", "group_advantages", "group_ids"),
    *(
        "linear_policy_loss",
        "linear_token_logprobs",
        "policy_loss",
        "token_logprobs",
        "value_loss",
        "whiten",
    ),
)


def run(*command: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=300
    )


def python(code: str, cwd: Path = ROOT, **environment: str) -> str:
    done = run(sys.executable, "-c", code, cwd=cwd, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_pulls_in_neither_the_trainer_nor_dynamo() -> None:
    heavy = (
        "transformers",
        "matplotlib",
        "rich",
        "reasoning_gym",
        "torch._dynamo",
        "triton",
        "pandas",
    )
    code = f"import sys, fastrl; print([m for m in {heavy!r} if m in sys.modules])"
    before = f"import sys, torch; print([m for m in {heavy!r} if m in sys.modules])"
    assert python(code) == python(before)


@pytest.mark.parametrize("on_path", [True, False])
def test_builds_with_the_ninja_of_the_system_or_says_that_there_is_none(
    tmp_path: Path, on_path: bool
) -> None:
    """Here with a ninja that refuses to work, and without the Python package."""
    compiler = tmp_path / "compiler"
    ninja = tmp_path / "ninja"
    for program in (compiler, ninja) if on_path else (compiler,):
        program.write_text("#!/bin/sh\nexit 3\n")
        program.chmod(0o755)
    code = (
        "import importlib.util, runpy, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *_: None if name == 'ninja' else find(name, *_)\n"
        f"sys.argv = ['setup.py', 'build', '--build-base', {str(tmp_path / 'build')!r}]\n"
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    build = run(
        *(sys.executable, "-c", code),
        PATH=str(tmp_path),
        CXX=str(compiler),
        FASTRL_CPP="",
        FASTRL_CUDA="0",
        FASTRL_SANITIZE="no-such",  # objects in a folder of their own
    )
    assert build.returncode == 0, build.stderr
    found = f"Command '['{ninja}', '-C'," if on_path else "no ninja, neither as a Python package"
    assert f"installing without compiled kernels: {found}" in build.stderr


def test_installs_and_works_without_a_compiler(tmp_path: Path) -> None:
    """A missing compiler is a warning; the reference then runs and `fastrl info` names what is missing."""
    build = run(
        *(sys.executable, "setup.py", "build", "--build-base", str(tmp_path)),
        CXX="no-such-compiler",
        FASTRL_CPP="",
    )
    assert build.returncode == 0, build.stderr
    assert (
        "installing without compiled kernels: no C++ compiler: 'no-such-compiler'" in build.stderr
    )
    (package,) = tmp_path.glob("lib*")
    out = python(
        # The development install would supply its compiled module for the one that is missing here.
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'Editable' not in str(f)]\n"
        "import torch, fastrl, json\n"
        "from fastrl import info\n"
        "a = fastrl.gae(torch.ones(1, 2), torch.zeros(1, 2), gamma=1.0, lam=1.0).advantages.tolist()\n"
        "print(json.dumps([a, fastrl.__file__, info.collect()]))",
        cwd=package,
    )
    advantages, where, report = json.loads(out)
    assert Path(where).is_relative_to(package)
    assert advantages == [[2.0, 1.0]]
    assert report["build"]["compiled"] is False
    assert report["ops"]["gae"]["cpu"]["auto"] == "reference"
    assert "fastrl._C is not loaded" in report["ops"]["gae"]["cpu"]["missing"]["cpu"]


def test_a_demanded_build_fails_without_a_compiler(tmp_path: Path) -> None:
    build = run(
        *(sys.executable, "setup.py", "build", "--build-base", str(tmp_path)),
        CXX="no-such-compiler",
        FASTRL_CPP="1",
    )
    assert build.returncode != 0
    assert "FASTRL_CPP=1, but the kernels were not built: no C++ compiler" in build.stderr


def test_kernels_can_be_left_out_on_purpose(tmp_path: Path) -> None:
    build = run(
        *(sys.executable, "setup.py", "build", "--build-base", str(tmp_path)), FASTRL_CPP="0"
    )
    assert build.returncode == 0, build.stderr
    assert not list(tmp_path.rglob("_C*.so"))


@pytest.mark.parametrize(
    ("version", "message"),
    [("2.9.1", "torch 2.9.1 is older than 2.10"), (None, "torch is missing")],
)
def test_an_old_or_missing_torch_is_named(
    tmp_path: Path, version: str | None, message: str
) -> None:
    """Versions are compared as versions: 2.9.1 is older than 2.10."""
    fake = tmp_path / "torch"
    (fake / "utils").mkdir(parents=True)
    content = "raise ImportError('not here')" if version is None else f"__version__ = {version!r}"
    (fake / "__init__.py").write_text(content)
    (fake / "utils" / "__init__.py").write_text("")
    (fake / "utils" / "cpp_extension.py").write_text("")
    build = run(
        *(sys.executable, "setup.py", "build", "--build-base", str(tmp_path / "out")),
        PYTHONPATH=str(tmp_path),
        FASTRL_CPP="1",
    )
    assert build.returncode != 0
    assert message in build.stderr


@pytest.mark.skipif(not built_capabilities(), reason="fastrl._C is not built here")
def test_capability_can_be_lowered_by_the_environment() -> None:
    code = "from fastrl import _C; print(_C.build_info()['capability'])"
    for name in built_capabilities():
        assert python(code, FASTRL_CPU_CAPABILITY=name) == name
    assert python(code, FASTRL_CPU_CAPABILITY="unknown") == built_capabilities()[-1]


def test_environment_chooses_the_implementation_but_an_argument_wins() -> None:
    code = (
        "import torch; from fastrl import _backends; d = torch.device('cpu');"
        "print(_backends.resolve('gae', 'auto', d), _backends.resolve('gae', 'cpu', d))"
    )
    if not built_capabilities():
        pytest.skip("fastrl._C is not built here")
    assert python(code, FASTRL_IMPL="reference") == "reference cpu"


def test_a_named_implementation_never_falls_back() -> None:
    with pytest.raises(ValueError, match=r"gae: impl='triton' cannot run: .*; available on cpu:"):
        _backends.resolve("gae", "triton", torch.device("cpu"))


def test_info_prints_every_op_and_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert info.main([]) == 0
    text = capsys.readouterr().out
    assert info.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for op in info.OPS:
        assert op in text
        assert report["ops"][op]["cpu"]["auto"] in report["ops"][op]["cpu"]["available"]
    assert set(info.OPS) | {"group_ids"} == set(PUBLIC_OPS)


@pytest.mark.parametrize("name", PUBLIC_OPS)
def test_public_docstrings_state_the_conventions(name: str) -> None:
    text = inspect.getdoc(getattr(fastrl, name)) or ""
    for part in ("Args:", "Returns:", "Raises:", ">>>", "eterministic", "Source:"):
        assert part in text, f"{name} does not state {part!r}"
    assert name in fastrl.__all__


def test_kernel_headers_are_free_of_torch() -> None:
    headers = [*ROOT.glob("csrc/**/*_kernel.*"), *ROOT.glob("csrc/**/*_core.h")]
    headers += [
        ROOT / "csrc/common" / f"{name}.h" for name in ("vec", "scan", "views", "hd", "math")
    ]
    assert headers
    for header in headers:
        assert "#include <torch" not in header.read_text(), header


def test_no_source_file_is_longer_than_600_lines() -> None:
    files = [
        p
        for pattern in ("fastrl/**/*.py", "csrc/**/*", "tests/**/*.py", "benchmarks/**/*.py")
        for p in ROOT.glob(pattern)
    ]
    long = {
        str(p.relative_to(ROOT)): n
        for p in files
        if p.is_file() and (n := len(p.read_text(errors="ignore").splitlines())) > 600
    }
    assert not long


def test_links_between_pages_lead_somewhere() -> None:
    pages = [
        p
        for pattern in ("*.md", "csrc/*.md", "fastrl/**/*.md", "benchmarks/*.md")
        for p in ROOT.glob(pattern)
    ]
    assert len(pages) > 12
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
    for op in PUBLIC_OPS:
        assert (ROOT / "fastrl/ops" / op / "README.md").exists()
