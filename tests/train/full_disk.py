"""A disk that is full, or read-only, at each kind of write: a script that mounts small file systems of its own.

`python -m tests.train.full_disk FOLDER` needs a mount namespace (`unshare --mount`), with an empty FOLDER.
Each case ends with a message that names the file and the remedy, leaves every earlier checkpoint valid, and
goes on with --resume once there is space, to the same bytes as a run that never met a full disk.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fastrl import cli
from fastrl.train import checkpoint
from fastrl.train.journal import Journal
from tests.soak import OPTIONS, ROOT, assert_same

SIZE = "3m"
# More than a page at a time, which no page that a file has already can take.
LONG = ("log.samples=16", "eval.size=16")

# What is called just before the write, at which of its calls the disk is full, bytes left then, and the file
# that the message must name. The line of step 3 goes beyond the first page of metrics.jsonl.
CASES: dict[str, tuple[Any, str, int, int, str]] = {
    "metrics": (Journal, "metrics", 3, 0, "metrics.jsonl"),
    "samples": (Journal, "samples", 3, 0, "samples.jsonl"),
    "evaluation": (Journal, "evaluation", 2, 0, "eval_samples.jsonl"),
    "checkpoint, at once": (checkpoint, "save", 3, 0, "checkpoints/step_000003"),
    "checkpoint, in the middle": (checkpoint, "save", 3, 40_000, "checkpoints/step_000003"),
    "checkpoint, at its end": (checkpoint, "save", 3, 400_000, "checkpoints/step_000003"),
}


def command(*arguments: str) -> tuple[int, str]:
    """Exit code and standard error of `fastrl`; its standard output is dropped."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = cli.main(arguments)
    return code, errors.getvalue()


def train(run_dir: Path, *more: str) -> tuple[int, str]:
    options = [part for option in (*OPTIONS, *LONG) for part in ("--set", option)]
    file = str(ROOT / "configs/grpo_tiny.toml")
    return command("train", file, "--run-dir", str(run_dir), *options, *more)


def mount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def fill(folder: Path, left: int) -> None:
    """Write until the disk is full, and then free about `left` bytes."""
    with contextlib.suppress(OSError), open(folder / "ballast", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    size = (folder / "ballast").stat().st_size
    with open(folder / "ballast", "r+b") as file:
        file.truncate(size - left)


@contextlib.contextmanager
def full_at(owner: Any, name: str, call: int, disk: Path, left: int) -> Iterator[None]:
    """The disk is filled just before call number `call` of the function."""
    function, calls = getattr(owner, name), [0]

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            fill(disk, left)
        return function(*args, **kwargs)

    with mock.patch.object(owner, name, watched):
        yield


def check(case: str, folder: Path, whole: Path) -> None:
    owner, name, call, left, file = CASES[case]
    disk = folder / case.replace(", ", "_").replace(" ", "_")
    disk.mkdir()
    mount(disk, f"size={SIZE}")
    run_dir = disk / "run"
    with full_at(owner, name, call, disk, left):
        code, said = train(run_dir)
    assert code == 1, (code, said)
    assert said.count("\n") == 1, said
    assert f"cannot write {run_dir}/{file}: No space left on device; free some space there" in said
    assert "run it again (train with --resume)" in said
    print(f"{case}: {said.strip()}")
    # Nothing half-written counts, and what was finished is whole.
    saved = [p.name for p in sorted((run_dir / "checkpoints").iterdir())]
    assert all(name.startswith("step_") and not name.endswith(".tmp") for name in saved), saved
    found = checkpoint.load_latest(run_dir / "checkpoints", _fail)
    assert found is not None
    assert found.path.name == saved[-1]
    # To try again while it is still full loses nothing either.
    (disk / "more").write_bytes(b"")
    with contextlib.suppress(OSError):
        (disk / "more").write_bytes(bytes(int(4e6)))
    code, said = train(run_dir, "--resume")
    assert code == 1, said
    assert "No space left on device" in said, said
    assert checkpoint.load_latest(run_dir / "checkpoints", _fail) is not None
    (disk / "more").unlink()
    (disk / "ballast").unlink()
    assert train(run_dir, "--resume") == (0, "")
    assert_same(whole, run_dir)


def _fail(message: str) -> None:
    raise AssertionError(message)


def check_report_and_read_only(folder: Path) -> None:
    disk = folder / "report"
    disk.mkdir()
    mount(disk, f"size={SIZE}")
    assert train(disk / "run", "--set", "steps=1") == (0, "")
    fill(disk, 20_000)
    code, said = command("report", str(disk / "run"))
    assert code == 1
    assert "cannot write" in said
    assert "/run/report" in said
    assert "No space left on device; free some space" in said, said
    print(f"report: {said.strip()}")
    (disk / "ballast").unlink()
    assert command("report", str(disk / "run")) == (0, "")
    assert "</html>" in (disk / "run/report/index.html").read_text()
    remount(disk, "ro")
    for arguments in ((disk / "run", "--resume"), (disk / "other",)):
        code, said = train(arguments[0], *arguments[1:])  # type: ignore[arg-type]
        assert code == 1
        assert "Read-only file system; mount it for writing, or name another folder" in said, said
    print(f"read-only: {said.strip()}")


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    assert train(folder / "whole") == (0, "")
    for case in CASES:
        check(case, folder, folder / "whole")
    check_report_and_read_only(folder)


if __name__ == "__main__":
    main()
