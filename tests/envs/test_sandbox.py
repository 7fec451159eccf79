"""The sandbox, under each kind of isolation that this machine has: what it keeps in, and what it keeps out."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastrl.envs import sandbox
from fastrl.envs.sandbox import Limits, Sandbox, SandboxResult, SandboxUnavailable


@pytest.fixture(params=["bubblewrap", "unshare"])
def isolation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each kind of isolation in turn."""
    other = {"bubblewrap": "unshare", "unshare": "bwrap"}[request.param]
    found = shutil.which
    monkeypatch.setattr(shutil, "which", lambda p: None if p == other else found(p))
    sandbox.available_isolation.cache_clear()
    try:
        sandbox.available_isolation()
    except SandboxUnavailable as error:
        pytest.skip(f"{request.param} does not work here: {error}")
    yield request.param
    sandbox.available_isolation.cache_clear()


def python(code: str, limits: Limits | None = None, **files: str) -> SandboxResult:
    with Sandbox(limits) as box:
        box.write({"main.py": code, **files})
        return box.run(["python", "main.py"])


def test_a_program_runs_and_leaves_files(isolation: str) -> None:
    with Sandbox() as box:
        box.write({"lib/a.py": "def f(x):\n    return x + 1\n", "main.py": "from lib.a import f\nimport sys\n"
                   "print(f(int(sys.stdin.read())))\nopen('out.txt', 'w').write('done')\nsys.exit(3)\n"})  # fmt: skip
        result = box.run(["python", "main.py"], stdin="41")
        assert (result.returncode, result.output, result.ended_by) == (3, "42\n", "")
        assert box.read("out.txt") == "done"
        assert list(box.files()) == ["main.py", "out.txt", "lib/a.py"]
        folder = box.folder
    assert not folder.exists()


def test_nothing_outside_is_seen_or_written(isolation: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("password")
    code = f"""
import os
for path in ({str(tmp_path / "secret")!r}, "/etc/shadow", "/etc/passwd"):
    try:
        print("read", open(path).read())
    except OSError:
        pass
for path in ("/usr/planted", "/etc/planted", {str(tmp_path / "planted")!r}, {os.__file__!r}):
    try:
        open(path, "a").write("planted")
        print("wrote", path)
    except OSError:
        pass
print(sorted(k for k in os.environ if "SECRET" in k))
"""
    os.environ["FASTRL_TEST_SECRET"] = "password"
    try:
        result = python(code)
    finally:
        del os.environ["FASTRL_TEST_SECRET"]
    assert result.output == "[]\n"
    assert not (tmp_path / "planted").exists()
    assert not Path("/usr/planted").exists()


def test_there_is_no_network(isolation: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\n"
        result = python(code)
    assert result.returncode != 0
    assert "Error" in result.output


def test_processes_outside_are_not_seen(isolation: str) -> None:
    code = f"""
import os, signal
print(os.path.exists("/proc/{os.getpid()}/cmdline") and "pytest" in open("/proc/{os.getpid()}/cmdline").read())
print(max(int(p) for p in os.listdir("/proc") if p.isdigit()) < 100)
"""
    assert python(code).output == "False\nTrue\n"


def test_there_are_no_privileges(isolation: str) -> None:
    code = """
import os
status = open("/proc/self/status").read()
print([line.split()[1] for line in status.splitlines() if line.startswith(("CapEff", "CapBnd", "NoNewPrivs"))])
"""
    assert python(code).output == "['0000000000000000', '0000000000000000', '1']\n"


LIMITS = Limits(
    wall_seconds=2.0,
    cpu_seconds=1,
    memory_bytes=256 << 20,
    processes=16,
    file_bytes=1 << 20,
    folder_bytes=4 << 20,
    output_bytes=1000,
)

# What a program does, and a sign that a limit met it.
ABUSES: dict[str, tuple[str, Callable[[SandboxResult], bool]]] = {
    "sleep": ("import time\ntime.sleep(60)", lambda r: r.ended_by == "time"),
    "loop": ("while True: pass", lambda r: r.returncode != 0),
    "memory": ("x = bytearray(1 << 30)\nprint('got it')", lambda r: "MemoryError" in r.output),
    "file": (
        "open('big', 'wb').write(bytes(2 << 20))\nprint('got it')",
        lambda r: "got it" not in r.output,
    ),
    "disk": (
        "import time\nfor i in range(100):\n    open(f'f{i}', 'wb').write(bytes(1 << 20))\n"
        "    time.sleep(0.05)\nprint('got it')",
        lambda r: r.ended_by == "disk" or "got it" not in r.output,
    ),
    "output": ("while True: print('x' * 1000)", lambda r: r.ended_by == "output"),
    "forks": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        lambda r: r.ended_by == "time" or r.returncode != 0,
    ),
    "daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        time.sleep(60)\nprint('parent')",
        lambda r: set(r.output.split()) == {"parent"},
    ),
}


# Ways out that were tried, and what the program says when they are closed.
ESCAPES: dict[str, tuple[str, str]] = {
    "hard links": (
        "import os\nfor target in ('/usr/bin/env', '/proc/self/mem', '/dev/null'):\n    try:\n"
        "        os.link(target, 'a')\n        print('linked', target)\n    except OSError:\n        pass\nprint('end')",
        "end\n",
    ),
    "the root and devices in memory": (
        "import os\nfor place in ('/', '/dev', '/dev/shm', '/etc', '/root', '/home', '/srv', '/old', '/sys', '/run'):\n"
        "    try:\n        open(place + '/planted', 'w').write('x')\n        print('wrote', place)\n    except OSError:\n"
        "        pass\nprint('end')",
        "end\n",
    ),
    "signals to everyone": (
        "import os, signal\nfor pid in (-1, 1, os.getppid()):\n    for number in (signal.SIGTERM, signal.SIGKILL):\n"
        "        try:\n            os.kill(pid, number) if pid != os.getpid() else None\n"
        "        except OSError:\n            pass\n",
        "",
    ),
    "memory and root of other processes": (
        "import os\nfor pid in (1, os.getppid()):\n    for name in ('mem', 'environ', 'root/../old', 'cwd/../../etc/shadow'):\n"
        "        try:\n            data = open(f'/proc/{pid}/{name}', 'r+b').read(1)\n            print('opened', pid, name)\n"
        "        except (OSError, ValueError):\n            pass\nprint('end')",
        "end\n",
    ),
    "settings of the kernel": (
        "for name in ('kernel/core_pattern', 'vm/drop_caches', 'kernel/hostname'):\n    try:\n"
        "        open('/proc/sys/' + name, 'w').write('x')\n        print('wrote', name)\n    except OSError:\n        pass\n"
        "print('end')",
        "end\n",
    ),
    "open files of the caller": (
        "import os\nprint(sorted(int(f) for f in os.listdir('/proc/self/fd'))[:3], len(os.listdir('/proc/self/fd')) < 6)",
        "[0, 1, 2] True\n",
    ),
    "limits raised again": (
        "import resource as r\nfor name in (r.RLIMIT_NPROC, r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_FSIZE):\n    try:\n"
        "        r.setrlimit(name, (r.RLIM_INFINITY, r.RLIM_INFINITY))\n        print('raised', name)\n"
        "    except (OSError, ValueError):\n        pass\nprint('end')",
        "end\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("escape", ESCAPES)
def test_there_is_no_way_out(isolation: str, escape: str) -> None:
    code, said = ESCAPES[escape]
    started = time.monotonic()
    # Who kills everyone is among them.
    assert python(code, LIMITS).output in ((said,) if said else ("", "Killed\n"))
    assert time.monotonic() - started < 10


def test_sockets_without_a_network_are_not_reached(isolation: str, tmp_path: Path) -> None:
    name = f"\0fastrl-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as named:
        abstract.bind(name)
        abstract.listen()
        named.bind(str(tmp_path / "s"))
        named.listen()
        code = f"""
import socket
for address in ({name!r}, {str(tmp_path / "s")!r}):
    try:
        socket.socket(socket.AF_UNIX).connect(address)
        print("connected")
    except OSError as error:
        print(type(error).__name__)
"""
        assert set(python(code).output.split()) <= {"ConnectionRefusedError", "FileNotFoundError"}


ENTRIES = {
    "empty files": ("i = 0\nwhile True:\n    open(f'f{i}', 'w').close()\n    i += 1", {"disk"}),
    # Deeper than Python can recurse, by the time that it is seen.
    "nested folders": ("import os\nfor _ in range(1010):\n    os.mkdir('d')\n    os.chdir('d')", {"disk", ""}),
    "locked folders": ("import os\nos.mkdir('d')\nopen('d/f', 'w').close()\nos.chmod('d', 0)", {""}),
}  # fmt: skip


@pytest.mark.parametrize("entries", ENTRIES)
def test_entries_cost_space_and_are_removed(isolation: str, entries: str) -> None:
    code, ends = ENTRIES[entries]
    with Sandbox(LIMITS) as box:
        box.write({"main.py": code})
        assert box.run(["python", "main.py"]).ended_by in ends
        folder = box.folder
        before = stat.S_IMODE(folder.parent.stat().st_mode)
    assert not folder.exists()
    assert stat.S_IMODE(folder.parent.stat().st_mode) == before


@pytest.mark.parametrize("abuse", ABUSES)
def test_limits_hold(isolation: str, abuse: str) -> None:
    code, met = ABUSES[abuse]
    started = time.monotonic()
    result = python(code, LIMITS)
    assert met(result), result
    assert time.monotonic() - started < 10
    assert len(result.output) < 1100
    # Nothing of it is left: its processes run as a user, or in a namespace, that is gone.
    end = time.monotonic() + 5
    while left := _running():
        assert time.monotonic() < end, left
        time.sleep(0.05)


def _running() -> list[Path]:
    """Processes of any sandbox."""
    return [
        p for p in Path("/proc").glob("[0-9]*") if b"HOME=/tmp/sandbox-" in _bytes(p / "environ")
    ]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_links_and_special_files_are_not_followed(isolation: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("password")
    with Sandbox() as box:
        box.write({"main.py": f"import os\nos.symlink({str(tmp_path / 'secret')!r}, 'a')\nos.mkfifo('b')\n"
                   f"os.symlink({str(tmp_path)!r}, 'c')\n"})  # fmt: skip
        assert box.run(["python", "main.py"]).returncode == 0
        assert box.read("a") is None
        assert box.read("b") is None
        with pytest.raises(ValueError, match="outside"):
            box.read("c/secret")
        with pytest.raises(ValueError, match="outside"):
            box.write({"c/planted": ""})
        box.write({"a": "mine"})
        assert box.read("a") == "mine"
    assert (tmp_path / "secret").read_text() == "password"


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "", "a/"])
def test_paths_outside_are_refused(name: str) -> None:
    with Sandbox(unsandboxed=True) as box, pytest.raises(ValueError, match="sandbox: "):
        box.write({name: "x"})


def test_it_refuses_where_nothing_isolates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    sandbox.available_isolation.cache_clear()
    try:
        with pytest.raises(SandboxUnavailable, match="install bubblewrap"), Sandbox():
            pass
        with Sandbox(unsandboxed=True) as box:
            assert box.run(["python", "-c", "print(1)"]).output == "1\n"
    finally:
        sandbox.available_isolation.cache_clear()


def test_entering_is_needed() -> None:
    with pytest.raises(ValueError, match="with statement"):
        Sandbox(unsandboxed=True).run(["true"])
