"""What a crash, a full disk or a folder that cannot be written leaves behind, and what comes after."""

from __future__ import annotations

import json
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastrl.envs import Trajectory, read_trajectories
from fastrl.train.config import Config
from fastrl.train.journal import Journal
from fastrl.train.loop import train
from fastrl.train.storage import StorageError, replace_file
from tests.soak import KINDS, ROOT, assert_same, soak

OPTIONS = ("steps=4", "checkpoint.every=2", "log.samples_every=2")


def test_five_kills(tmp_path: Path) -> None:
    count = soak(5, 0, tmp_path)
    assert count.total() == 5
    assert {kind.partition(",")[0] for kind in count} == set(KINDS)


def steps(run_dir: Path, name: str) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / name).read_text().splitlines()]


def test_a_kill_before_the_first_checkpoint_repeats_no_evaluation(
    small: Callable[..., Config], tmp_path: Path
) -> None:
    config = small("grpo", *OPTIONS)
    train(config, tmp_path / "whole")
    train(config, tmp_path / "killed")
    # As it was in the middle of step 2.
    shutil.rmtree(tmp_path / "killed/checkpoints")
    (tmp_path / "killed/checkpoints").mkdir()
    for name in ("metrics.jsonl", "eval.jsonl", "eval_samples.jsonl"):
        file = tmp_path / "killed" / name
        file.write_text("".join(file.read_text().splitlines(True)[:1]))
    train(config, tmp_path / "killed", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize("lines", [0, 2])
def test_a_kill_in_the_final_evaluation_does_it_again(
    small: Callable[..., Config], tmp_path: Path, lines: int
) -> None:
    config = small("grpo", *OPTIONS)
    train(config, tmp_path / "whole")
    train(config, tmp_path / "killed")
    # The last checkpoint was written before. The evaluation had written its figures, or also some samples.
    assert steps(tmp_path / "killed", "eval.jsonl") == [0, 4]
    file = tmp_path / "killed/eval_samples.jsonl"
    file.write_text("".join(file.read_text().splitlines(True)[: 4 + lines]))
    train(config, tmp_path / "killed", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "killed")


def test_any_end_of_a_line_may_be_missing(small: Callable[..., Config], tmp_path: Path) -> None:
    # U+2028 ends a line for str.splitlines, and a cut may go through a character of several bytes.
    record = Trajectory(uid="0", prompt="", completion="a\u2028bü", answer="", step=1)
    torn = Trajectory(uid="1", prompt="", completion="ü" * 40, answer="", step=1)
    line = torn.to_json().encode()
    for cut in (1, line.index("ü".encode()) + 1, len(line) - 1):
        (tmp_path / "samples.jsonl").write_text(record.to_json() + "\n", encoding="utf-8")
        with open(tmp_path / "samples.jsonl", "ab") as file:
            file.write(line[:cut])
        Journal(tmp_path, small("grpo")).open(1, evaluated=-1)
        assert list(read_trajectories(tmp_path / "samples.jsonl")) == [record]
    # A whole line that only lacks its end is kept, one of a later step is not.
    (tmp_path / "samples.jsonl").write_bytes(line)
    Journal(tmp_path, small("grpo")).open(1, evaluated=-1)
    assert list(read_trajectories(tmp_path / "samples.jsonl")) == [torn]
    Journal(tmp_path, small("grpo")).open(0, evaluated=-1)
    assert (tmp_path / "samples.jsonl").read_bytes() == b""


def test_checkpoints_alone_are_a_run_too(small: Callable[..., Config], tmp_path: Path) -> None:
    train(small("grpo", "steps=1"), tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"already holds a run; pass --resume"):
        train(small("grpo", "steps=1"), tmp_path)


def test_damage_to_all_checkpoints_ends_with_a_message(
    small: Callable[..., Config], tmp_path: Path
) -> None:
    train(small("grpo", *OPTIONS), tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for manifest in tmp_path.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{}")
    with pytest.raises(ValueError, match=r"all 2 checkpoints in .* are damaged; put a copy back"):
        train(small("grpo", *OPTIONS), tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("algorithm", "override", "message"),
    [
        ("grpo", "model.hidden_size=64", r"must be \[.*32\], got|must be \[.*64\], got"),
        ("grpo", "model.num_layers=1", r"weights differ from those of the model"),
        ("ppo", "steps=5", r"has no critic.safetensors, only .*with the algorithm and model"),
    ],
)
def test_another_model_is_refused(
    small: Callable[..., Config], tmp_path: Path, algorithm: str, override: str, message: str
) -> None:
    train(small("grpo", "steps=1"), tmp_path)
    before = (tmp_path / "checkpoints/step_000001/policy.safetensors").read_bytes()
    with pytest.raises(ValueError, match=message):
        train(small(algorithm, override), tmp_path, resume=True)
    assert (tmp_path / "checkpoints/step_000001/policy.safetensors").read_bytes() == before


# --- where nothing can be written ----------------------------------------------------------------


def test_full_disks(tmp_path: Path) -> None:
    """The cases and what they check are in full_disk.py."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    wrap = ["unshare", *user, "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*wrap, "true"], check=False).returncode:
        pytest.skip("a small disk needs a mount namespace, and unshare --mount does not work here")
    command = [*wrap, sys.executable, "-m", "tests.train.full_disk", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 8


def test_a_limit_on_the_size_of_files(small: Callable[..., Config], tmp_path: Path) -> None:
    """Where no small disk can be made, this is the same error in the middle of a checkpoint."""
    config = small("grpo", *OPTIONS)
    train(config, tmp_path / "whole")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(
            StorageError, match=r"cannot write .*step_000002: File too large; raise"
        ):
            train(config, tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "run/checkpoints").iterdir()) == []
    train(config, tmp_path / "run", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("place", ["run", "run/checkpoints", "."])
def test_a_file_where_a_folder_must_be(
    small: Callable[..., Config], tmp_path: Path, place: str
) -> None:
    run_dir = tmp_path / "run"
    if place == "run/checkpoints":
        run_dir.mkdir()
    if place == ".":
        (tmp_path / "file").touch()
        run_dir = tmp_path / "file/run"
    else:
        (tmp_path / place).touch()
    with pytest.raises(StorageError, match=r"cannot write .*; name a folder with --run-dir"):
        train(small("grpo"), run_dir)


@pytest.fixture
def as_nobody() -> Iterator[None]:
    """Permissions mean nothing to root, so the test goes on as another user for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("place", ["", "checkpoints"])
def test_a_folder_of_someone_else(
    small: Callable[..., Config], place: str, tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("shared")
    config = small("grpo", "steps=1")
    train(config, folder / "run")
    # Everyone may read it, and the ways to it.
    for path in (folder, *folder.parents[:3]):
        path.chmod(stat.S_IMODE(path.stat().st_mode) | 0o055)
    open_to_all = [] if not place else [folder / "run"]
    for path in open_to_all:
        path.chmod(0o777)
    closed = folder / "run" / place
    closed.chmod(0o555)
    request.getfixturevalue("as_nobody")
    with pytest.raises(StorageError, match="Permission denied; make it writable for this user"):
        train(config, folder / "run", resume=True)
    closed_again = folder / "run/checkpoints/step_000001"
    assert (closed_again / "manifest.json").read_text()


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "a"
    replace_file(file, b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(StorageError, match="File too large"):
            replace_file(file, bytes(11))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
