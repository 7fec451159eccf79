"""Runs commands over files that a model wrote, so that they can do no harm and forge no result.

Each run has a process tree of its own in new namespaces: no network, no other processes in sight, a
file system that is read-only but for one temporary folder, and limits on CPU time, memory, processes,
file size and output. `bubblewrap` builds it where installed, util-linux `unshare` otherwise. Where
neither works the sandbox refuses to run, unless it is told to do without (`unsandboxed=True`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import selectors
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

__all__ = ["Limits", "Sandbox", "SandboxResult", "SandboxUnavailable"]


class SandboxUnavailable(RuntimeError):
    """Nothing on this machine can isolate a process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one run may use."""

    wall_seconds: float = 10.0
    """Time on the clock."""
    cpu_seconds: int = 10
    """CPU time of each process."""
    memory_bytes: int = 1 << 30
    """Address space of each process."""
    processes: int = 64
    """Processes and threads of the run."""
    file_bytes: int = 16 << 20
    """Size of any one file written."""
    folder_bytes: int = 64 << 20
    """Size of the folder, after which the run is ended; also that of its /tmp, which lies in memory."""
    output_bytes: int = 100_000
    """Output kept; the run is ended when it writes ten times as much."""


class SandboxResult(NamedTuple):
    """How a run ended."""

    returncode: int
    """Exit code of the command; 128 + n, or -n, when signal n ended it."""
    output: str
    """Standard output and standard error, mixed, cut in the middle to `output_bytes`."""
    ended_by: str
    """Which limit of the run ended it: "time", "output" or "disk"; "" when it ended by itself."""
    seconds: float
    """Time on the clock."""


class Sandbox:
    """A temporary folder, and commands that run in it. A context manager, which removes the folder.

    >>> with Sandbox(unsandboxed=True) as box:   # the doctest runs where no namespaces may exist
    ...     box.write({"hello.py": "print(6 * 7)"})
    ...     box.run(["python", "hello.py"]).output
    '42\\n'

    The command sees the folder as its home and working directory, `python` is this interpreter, and
    of the environment only what is listed here. Raises SandboxUnavailable, when entered, if nothing
    can isolate and `unsandboxed` is not set.
    """

    def __init__(self, limits: Limits | None = None, *, unsandboxed: bool = False) -> None:
        self.limits = limits or Limits()
        self._unsandboxed = unsandboxed
        self._folder: Path | None = None

    def __enter__(self) -> Sandbox:
        self._wrap = _bare if self._unsandboxed else _WRAPPERS[available_isolation()]
        self._folder = _new_folder()
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            _remove(self._folder)
            self._folder = None

    @property
    def folder(self) -> Path:
        """The folder, as the caller sees it."""
        if self._folder is None:
            raise ValueError("sandbox: it must be entered first; use it in a with statement")
        return self._folder

    def write(self, files: Mapping[str, str]) -> None:
        """Write text files by relative path; ValueError for a path that leaves the folder."""
        for name, text in files.items():
            path = self._inside(name)
            self._make_folders(path.parent)
            # A link or a special file that a command left there must not be written through.
            path.unlink(missing_ok=True)
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
            if _is_root():
                owner = self.folder.stat().st_uid
                os.chown(path, owner, owner)

    def _make_folders(self, path: Path) -> None:
        missing = [p for p in (path, *path.parents) if not p.exists()]
        for folder in reversed(missing):
            folder.mkdir()
            if _is_root():
                os.chown(folder, *[self.folder.stat().st_uid] * 2)

    def read(self, name: str) -> str | None:
        """The text of a file; None when there is none. Links are not followed: they may lead outside."""
        path = self._inside(name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > self.limits.file_bytes:
                return None
            return file.read().decode("utf-8", errors="replace")

    def files(self) -> Iterator[str]:
        """Relative paths of all regular files, sorted."""
        for root, folders, names in os.walk(self.folder, followlinks=False):
            folders.sort()
            for name in sorted(names):
                path = Path(root, name)
                if path.is_file() and not path.is_symlink():
                    yield str(path.relative_to(self.folder))

    def _inside(self, name: str) -> Path:
        """The path of `name`; ValueError when it, or a link on its way, leaves the folder."""
        path = self.folder / name
        parent = path.parent.resolve()
        if not (parent == self.folder.resolve() or self.folder.resolve() in parent.parents):
            raise ValueError(f"sandbox: {name!r} is outside of the folder; give a relative path")
        if path.is_dir() or not name or name.endswith("/"):
            raise ValueError(f"sandbox: {name!r} is a folder; give the path of a file")
        return path

    def run(self, command: Sequence[str], *, stdin: str = "") -> SandboxResult:
        """Run `command` in the folder; "python" as its first word is this interpreter."""
        folder = self.folder
        command = [sys.executable if command[0] == "python" else command[0], *command[1:]]
        limits = self.limits
        started = time.monotonic()
        process = subprocess.Popen(
            self._wrap(folder, limits, command),
            cwd=folder if self._unsandboxed else "/",
            env=_environment(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, ended_by = _drain(
                process, stdin.encode(), started + limits.wall_seconds, limits, folder
            )
        finally:
            _kill(process)
        if len(output) > limits.output_bytes:
            half = limits.output_bytes // 2
            cut = len(output) - 2 * half
            output = output[:half] + f"\n[{cut} bytes left out]\n".encode() + output[-half:]
        return SandboxResult(
            process.returncode,
            output.decode("utf-8", errors="replace"),
            ended_by,
            time.monotonic() - started,
        )


# --- isolation ---------------------------------------------------------------------------------

Wrapper: TypeAlias = Callable[[Path, Limits, Sequence[str]], list[str]]


@functools.cache
def available_isolation() -> str:
    """ "bubblewrap" or "unshare", whichever works first; SandboxUnavailable when neither does."""
    problems = []
    for name, program in (("bubblewrap", "bwrap"), ("unshare", "unshare")):
        if shutil.which(program) is None:
            problems.append(f"{program} is not installed")
            continue
        folder = _new_folder()
        try:
            command = _WRAPPERS[name](folder, Limits(), ["true"])
            tried = subprocess.run(
                command, env=_environment(folder), capture_output=True, timeout=20, cwd="/"
            )
            if tried.returncode == 0:
                return name
            problems.append(f"{program}: {tried.stderr.decode(errors='replace').strip()[:200]}")
        except (OSError, subprocess.TimeoutExpired) as error:
            problems.append(f"{program}: {error}")
        finally:
            _remove(folder)
    raise SandboxUnavailable(
        f"sandbox: nothing here can isolate a process ({'; '.join(problems)}); install bubblewrap, allow "
        "user namespaces, or pass unsandboxed=True to run model-written code without protection"
    )


def _bare(folder: Path, limits: Limits, command: Sequence[str]) -> list[str]:
    return [*_limited(limits), *command]


def _bubblewrap(folder: Path, limits: Limits, command: Sequence[str]) -> list[str]:
    namespaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    if _is_root():
        # Only to give up being root inside.
        capabilities = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
        namespaces += [a for c in capabilities for a in ("--cap-add", c)]
    else:
        namespaces += ["--unshare-user", "--cap-drop", "ALL"]
    # Folders on the way to a bound one would be for root alone.
    ways = {str(p) for path in _visible() for p in Path(path).parents if str(p) != "/"}
    return [
        *("bwrap", "--die-with-parent", "--new-session", *namespaces),
        # First, so that an interpreter that lies in it is seen on top.
        *("--perms", "1777", "--size", str(limits.folder_bytes), "--tmpfs", "/tmp"),
        *(a for path in sorted(ways - {"/tmp"}) for a in ("--perms", "0755", "--dir", path)),
        *(a for path in _visible() for a in ("--ro-bind", path, path)),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--bind", str(folder), str(folder)),
        # They lie in memory without a limit, and are this user's where it is not root.
        *("--remount-ro", "/dev", "--remount-ro", "/"),
        *("--chdir", str(folder), "--"),
        *_unprivileged(folder),
        *_limited(limits),
        *command,
    ]


def _unshare(folder: Path, limits: Limits, command: Sequence[str]) -> list[str]:
    """The same as bubblewrap builds, by mount(8): a new root in memory, the system read-only in it."""
    root, quoted = _mount_point(), shlex.quote
    lines = [
        "set -e",
        # The folder stays reachable under a descriptor's path whatever the new root covers.
        f"mount -t tmpfs -o size=16m,mode=755 tmpfs {root}",
        f"mkdir -p {root}/tmp",
        f"mount -t tmpfs -o size={limits.folder_bytes},mode=1777,nosuid,nodev tmpfs {root}/tmp",
    ]
    keep = quoted(f"/proc/self/fd/{_FOLDER_DESCRIPTOR}")
    for path in _visible():
        target = quoted(root + path)
        if os.path.islink(path):
            lines.append(f"mkdir -p {quoted(root + os.path.dirname(path))}")
            lines.append(f"ln -s {quoted(os.readlink(path))} {target}")
            continue
        parent = root + (path if os.path.isdir(path) else os.path.dirname(path))
        lines.append(f"mkdir -p {quoted(parent)}")
        if not os.path.isdir(path):
            lines.append(f"touch {target}")
        lines.append(f"mount --bind {quoted(path)} {target}")
        lines.append(f"mount -o remount,bind,ro,nosuid,nodev {target}")
    lines += [
        f"mkdir -p {root}/proc {root}/dev {root}/old",
        *(
            f"touch {root}/dev/{d}; mount --bind /dev/{d} {root}/dev/{d}"
            for d in ("null", "zero", "random", "urandom")
        ),
        f"mkdir -p {quoted(root + str(folder))}",
        f"mount --bind {keep} {quoted(root + str(folder))}",
        f"mount -t proc -o nosuid,nodev,noexec proc {root}/proc",
        f"cd {root}",
        "pivot_root . old",
        # The old root is detached: nothing of it can be reached any more.
        "umount -l /old",
        "rmdir /old",
        # Of the mount alone: with its options, which name users outside, a user namespace refuses it.
        "mount -o remount,bind,ro /",
        f"cd {quoted(str(folder))}",
        f"exec {_FOLDER_DESCRIPTOR}<&-",
        "exec " + shlex.join([*_unprivileged(folder), *_limited(limits), *command]),
    ]
    script = f"exec {_FOLDER_DESCRIPTOR}<{quoted(str(folder))}\n" + "\n".join(lines)
    user = [] if _is_root() else ["--user", "--map-root-user"]
    return [
        *("unshare", *user, "--mount", "--net", "--ipc", "--uts", "--pid", "--fork"),
        *("--kill-child", "sh", "-c", script),
    ]


def _mount_point() -> str:
    """A folder to mount the new root on: nothing that must be seen in it may lie there."""
    for place in ("/tmp", "/mnt", "/media", "/srv"):
        if os.path.isdir(place) and not any(p.startswith(place + "/") for p in _visible()):
            return place
    raise SandboxUnavailable(
        "sandbox: the interpreter lies in every folder that a new root could be mounted on; "
        "use one in another place"
    )


_FOLDER_DESCRIPTOR = 9
_BLOCK = 4096
"""What an empty file costs, or they could be made without end."""
_WRAPPERS: dict[str, Wrapper] = {"bubblewrap": _bubblewrap, "unshare": _unshare}


def _limited(limits: Limits) -> list[str]:
    """Inside the namespaces, because processes are counted per namespace."""
    return [
        "prlimit",
        f"--cpu={limits.cpu_seconds}",
        f"--as={limits.memory_bytes}",
        f"--nproc={limits.processes}",
        f"--fsize={limits.file_bytes}",
        "--core=0",
        "--nofile=256",
    ]


def _unprivileged(folder: Path) -> list[str]:
    """Give up every privilege. Root becomes the owner of the folder, a user that exists nowhere else."""
    drop = ["setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    if not _is_root():
        return drop
    owner = folder.stat().st_uid
    return [*drop, f"--reuid={owner}", f"--regid={owner}", "--clear-groups"]


def _is_root() -> bool:
    return os.geteuid() == 0


def _new_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="sandbox-")).resolve()
    if _is_root():
        # The limit on processes does not hold for root, and counts all processes of any other user.
        user = 1_000_000_000 + secrets.randbelow(1_000_000_000)
        os.chown(folder, user, user)
    return folder


def _visible() -> list[str]:
    """What a Python process has to read: the system's libraries and this interpreter."""
    wanted = ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"]
    wanted += [p for p in (sys.base_prefix, sys.prefix) if not p.startswith("/usr/")]
    return [p for p in dict.fromkeys(wanted) if os.path.lexists(p)]


def _environment(folder: Path) -> dict[str, str]:
    """All of the environment that a command sees: no variable of ours, which may hold a secret."""
    return {
        "HOME": str(folder),
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }


# --- running -----------------------------------------------------------------------------------


def _drain(
    process: subprocess.Popen[bytes], stdin: bytes, end: float, limits: Limits, folder: Path
) -> tuple[bytes, str]:
    """Feed `stdin`, read the output; stop at the end of the process or at a limit of the run."""
    output = bytearray()
    assert process.stdout is not None and process.stdin is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if stdin:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        else:
            process.stdin.close()
        while True:
            if time.monotonic() >= end:
                return bytes(output), "time"
            for key, _ in selector.select(0.05):
                if key.fileobj is process.stdin:
                    try:
                        stdin = stdin[os.write(key.fd, stdin[:4096]) :]
                    except OSError:
                        stdin = b""
                    if not stdin:
                        selector.unregister(process.stdin)
                        with contextlib.suppress(OSError):
                            process.stdin.close()
                    continue
                block = os.read(key.fd, 65536)
                if not block:
                    # Closed, but perhaps by a process that wants to go on unseen.
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(max(end - time.monotonic(), 0.0))
                        return bytes(output), ""
                    return bytes(output), "time"
                output += block
            if len(output) > 10 * limits.output_bytes:
                return bytes(output), "output"
            if _exceeds(folder, limits.folder_bytes):
                return bytes(output), "disk"
            if process.poll() is not None:
                # A child left behind may hold the pipe open; it is killed, not waited for.
                return bytes(output) + _rest(process.stdout.fileno(), limits), ""


def _rest(descriptor: int, limits: Limits) -> bytes:
    os.set_blocking(descriptor, False)
    rest = bytearray()
    with contextlib.suppress(BlockingIOError):
        while len(rest) <= limits.output_bytes and (block := os.read(descriptor, 65536)):
            rest += block
    return bytes(rest)


def _exceeds(folder: Path, limit: int) -> bool:
    """Whether the folder is larger, with a block for each entry; what vanishes meanwhile counts nothing."""
    total, folders = 0, [str(folder)]
    # Not os.walk, which recurses: a command may nest folders deeper than Python can. No further than the
    # limit, because a command may make files faster than they are counted.
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    total += max(entry.stat(follow_symlinks=False).st_size, _BLOCK)
                    if total > limit:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
    return False


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the run. Its first process is the init of a namespace, with which all others end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def _remove(folder: Path) -> None:
    """Remove a folder whatever is in it; chmod and rm follow no links on their way down."""

    def call(*command: str) -> None:
        subprocess.run([*command, "--", str(folder)], check=False, capture_output=True)

    # Not shutil.rmtree: folders may be nested deeper than Python can follow.
    call("rm", "-rf")
    # Permissions may have been taken away, and processes that are being killed may go on for a moment and
    # write what was just removed.
    for pause in (0.0, 0.05, 0.2, 1.0):
        if not folder.exists():
            return
        time.sleep(pause)
        call("chmod", "-R", "u+rwx")
        call("rm", "-rf")
