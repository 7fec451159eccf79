"""Root and other users are isolated in different ways; where the tests run as root, this runs some as a user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USER = 54321
SOME = "leaves_files or outside or network or privileges or way_out or links or locked"


def as_user(command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    drop = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "env"]
    return subprocess.run(
        [*drop, *command], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )  # fmt: skip


def interpreter() -> str | None:
    """This one where others may read it (it may lie in root's home), or the system's of the same version."""
    wanted = f"{sys.version_info[:2]}"
    for python in (sys.executable, "/usr/bin/python3"):
        said = as_user([python, "-c", "import sys; print(sys.version_info[:2])"])
        if said.returncode == 0 and said.stdout.strip() == wanted:
            return python
    return None


def test_the_sandbox_of_a_user() -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("not root, so test_sandbox.py has done this already")
    python = interpreter()
    if python is None:
        pytest.skip("no interpreter of this version can be read by other users")
    if as_user(["unshare", "--user", "true"]).returncode:
        pytest.skip("users may not make namespaces here")
    folder = tempfile.mkdtemp()
    try:
        os.chown(folder, USER, USER)
        done = as_user(
            [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", f"--basetemp={folder}/t",
             "tests/envs/test_sandbox.py", "-k", SOME],
            HOME=folder, TMPDIR=folder, PYTHONPATH=sysconfig.get_path("purelib"), PYTHONDONTWRITEBYTECODE="1",
        )  # fmt: skip
    finally:
        shutil.rmtree(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
