"""Writing to disk: what a file is called while it is not whole, and what is said when it cannot be written."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

__all__ = ["StorageError", "check_writable", "flush", "replace_file", "writing"]

_REMEDIES = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there, or raise the quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "mount it for writing, or name another folder with --run-dir",
    errno.EACCES: "make it writable for this user, or name another folder with --run-dir",
    errno.EPERM: "make it writable for this user, or name another folder with --run-dir",
    errno.ENOTDIR: "name a folder with --run-dir, not a file",
    errno.EEXIST: "name a folder with --run-dir, not a file",
}


class StorageError(OSError):
    """A file of a run could not be written."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors of the block become a StorageError that names `path`, the cause and the remedy."""
    try:
        yield
    except StorageError:
        raise
    except (OSError, SafetensorError) as error:
        code = _code(error)
        cause = os.strerror(code) if code else str(error)
        remedy = _REMEDIES.get(code, "see to its disk")
        raise StorageError(
            f"cannot write {path}: {cause}; {remedy}, and run it again (train with --resume); what was "
            "saved before is still there"
        ) from error


def _code(error: OSError | SafetensorError) -> int:
    """The system's number of the error; safetensors has it in its text alone."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else 0


def replace_file(path: Path, data: bytes) -> None:
    """Write the file at `path` so that a crash at any moment leaves the old one or the new one, whole."""
    draft = path.with_name(f"{path.name}.tmp")
    with writing(path):
        try:
            draft.write_bytes(data)
            flush(draft)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        os.replace(draft, path)
        flush(path.parent)


def flush(path: Path) -> None:
    """Wait until `path`, a file or the entries of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(folder: Path) -> None:
    """Make `folder` and try to write in it, so that a run fails before its first step, not after it."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable.{os.getpid()}"
        try:
            probe.write_bytes(b"x")
        finally:
            probe.unlink(missing_ok=True)
