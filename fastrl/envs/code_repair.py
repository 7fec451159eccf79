"""Repair of a small Python repository with tools, scored by hidden cases.

How reward hacking is closed off: hidden cases are data (a function, arguments, what must come of it),
and only functions and arguments enter the sandbox. What comes out is compared outside, by this process.
So there is no hidden test to read or edit, no test runner to patch, no exit code to forge; who prints a
forged result has to know the right one. The tool `run_tests` only informs: no reward is read from it.
"""

from __future__ import annotations

import difflib
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from fastrl.envs.code_repair_tasks import TASKS
from fastrl.envs.env import Message
from fastrl.envs.partial_credit import compiles, patch_size, share_passed
from fastrl.envs.sandbox import Limits, Sandbox
from fastrl.envs.tools import ToolEnv

__all__ = ["CodeRepair", "case_results"]

_INSTRUCTIONS = (
    "{problem}\nThe files are {files}. Find the fault and repair it with the tools; run_tests runs the "
    "visible tests. When you are done, say what was wrong. Other cases than the visible tests decide."
)


class CodeRepair(ToolEnv):
    """A repository with a fault; tools read_file, write_file and run_tests.

    `tasks` replaces the built-in ones: mappings with `name`, `problem`, `files` (text by path), `module`
    (the file that holds the fault) and `cases`, each `{"call": function, "args": [...]}` with "expect" (a
    JSON value) or "raises" (the name of an exception).

    Reward parts: `solved`, 1 when every hidden case passes; `hidden`, (p - p0) / (1 - p0) and at least 0,
    with p the share of hidden cases that pass and p0 that share before the repair; `compiles`, 1 when
    the module is valid Python; `small_patch`, 1 up to ten changed lines, then less; `valid_calls`.
    `info` holds the patch as a unified diff and the result of each case.

    Model-written code runs in the sandbox alone; SandboxUnavailable is raised where there is none, unless
    `unsandboxed`.
    """

    weights: Mapping[str, float] = {
        "solved": 0.0,
        "hidden": 1.0,
        "compiles": 0.1,
        "small_patch": 0.0,
        "valid_calls": 0.1,
    }

    def __init__(
        self,
        *,
        tasks: Sequence[Mapping[str, Any]] = TASKS,
        wall_seconds: float = 10.0,
        unsandboxed: bool = False,
    ) -> None:
        self._tasks = tasks
        self._limits = Limits(wall_seconds=wall_seconds)
        self._unsandboxed = unsandboxed
        self._box_folder: Sandbox | None = None
        super().__init__([self.read_file, self.write_file, self.run_tests])

    def tasks(self, *, size: int, seed: int) -> Sequence[Mapping[str, Any]]:
        """The first `size` tasks; `seed` changes nothing."""
        return list(self._tasks[:size])

    def reset(self, task: Mapping[str, Any]) -> list[Message]:
        """Lay out the files of `task` in a fresh sandbox."""
        self.close()
        self.begin()
        self._task = task
        self.info: dict[str, Any] = {}
        self._box_folder = Sandbox(self._limits, unsandboxed=self._unsandboxed)
        self._sandbox = self._box_folder.__enter__()
        self._sandbox.write(task["files"])
        text = _INSTRUCTIONS.format(problem=task["problem"], files=", ".join(task["files"]))
        return [{"role": "user", "content": text}]

    def close(self) -> None:
        """Remove the sandbox."""
        if self._box_folder is not None:
            self._box_folder.__exit__(None, None, None)
            self._box_folder = None

    # --- tools

    def read_file(self, path: str) -> str:
        """Read a file.

        path: relative path
        """
        text = self._sandbox.read(path)
        if text is None:
            raise ValueError(f"no file {path}; there are {', '.join(self._sandbox.files())}")
        return text

    def write_file(self, path: str, content: str) -> str:
        """Replace or create a file.

        path: relative path
        content: the whole new text
        """
        if len(content) > 100_000:
            raise ValueError("content must have at most 100000 characters")
        self._sandbox.write({path: content})
        return f"wrote {len(content)} characters to {path}"

    def run_tests(self) -> str:
        """Run the visible tests and show their results."""
        result = self._sandbox.run(["python", "-I", "-c", _TEST_RUNNER])
        limit = f"\n[ended: limit of {result.ended_by}]" if result.ended_by else ""
        return result.output + limit

    # --- rewards

    def finish(self, answer: str) -> Mapping[str, float | None]:
        """Run the hidden cases on the module as it now is."""
        name = self._task["module"]
        before = self._task["files"][name]
        try:
            after = self._sandbox.read(name)
        except (ValueError, OSError, RuntimeError):
            # A folder, or a way of links, where the module was: no module, and no failed episode.
            after = None
        results = case_results(
            after, self._task, limits=self._limits, unsandboxed=self._unsandboxed
        )
        at_first = case_results(
            before, self._task, limits=self._limits, unsandboxed=self._unsandboxed
        )
        share, share_before = share_passed(results) or 0.0, share_passed(at_first) or 0.0
        improved = (share - share_before) / (1 - share_before) if share_before < 1 else share
        diff = difflib.unified_diff(
            before.splitlines(True), (after or "").splitlines(True), f"a/{name}", f"b/{name}"
        )
        self.info = {"patch": "".join(diff), "tests": results}
        return {
            "solved": float(share == 1.0),
            "hidden": max(improved, 0.0),
            "compiles": compiles(after) if after is not None else 0.0,
            "small_patch": patch_size(before, after) if after is not None else 0.0,
        }

    def cut(self) -> Mapping[str, float | None]:
        """An episode that ran into a limit is scored by the files it left."""
        return self.finish("")


def case_results(
    source: str | None, task: Mapping[str, Any], *, limits: Limits, unsandboxed: bool = False
) -> dict[str, bool]:
    """Which hidden cases of `task` pass when its module reads `source`.

    The module runs in a sandbox of its own, together with the untouched other files of the task but
    nothing else that an episode wrote.
    """
    cases = task["cases"]
    names = [f"{i}: {case['call']}" for i, case in enumerate(cases)]
    if source is None:
        return dict.fromkeys(names, False)
    mark = secrets.token_hex(16)
    asked = {
        "module": task["module"],
        "mark": mark,
        "calls": [[case["call"], case["args"]] for case in cases],
    }
    with Sandbox(limits, unsandboxed=unsandboxed) as box:
        box.write({**task["files"], task["module"]: source})
        output = box.run(["python", "-I", "-c", _CASE_RUNNER], stdin=json.dumps(asked)).output
    given: dict[int, Any] = {}
    for line in output.splitlines():
        # The mark keeps what the module prints apart; knowing it helps no one, the answers are not inside.
        _, found, rest = line.partition(mark)
        try:
            number, answer = json.loads(rest) if found else (-1, None)
            given[int(number)] = answer
        except (ValueError, TypeError, RecursionError):
            continue
    return {name: _passes(given.get(i), cases[i]) for i, name in enumerate(names)}


def _passes(answer: Any, case: Mapping[str, Any]) -> bool:
    if not isinstance(answer, dict):
        return False
    if "raises" in case:
        return answer.get("raises") == case["raises"]
    return "value" in answer and _equal(answer["value"], case["expect"])


def _equal(a: Any, b: Any) -> bool:
    """Equality of JSON values; True is not 1, and floats may differ in the last digits."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        try:
            return a == b or math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
        except OverflowError:  # an integer that no float can hold
            return False
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    return bool(type(a) is type(b) and a == b)


# Both run with -I: nothing in the folder is imported before they say so, sitecustomize.py included.

_CASE_RUNNER = """
import importlib.util, json, os, sys
asked = json.loads(sys.stdin.read())
sys.path.append(os.getcwd())
def write(number, answer):
    os.write(1, ("\\n" + asked["mark"] + json.dumps([number, answer]) + "\\n").encode())
name = asked["module"]
spec = importlib.util.spec_from_file_location(name.rpartition("/")[2].removesuffix(".py"), name)
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
for number, (function, arguments) in enumerate(asked["calls"]):
    try:
        answer = {"value": getattr(module, function)(*arguments)}
        json.dumps(answer)
    except BaseException as error:
        answer = {"raises": type(error).__name__}
    write(number, answer)
"""

_TEST_RUNNER = """
import glob, importlib.util, os, sys, traceback
sys.path.append(os.getcwd())
passed = failed = 0
for file in sorted(glob.glob("**/test_*.py", recursive=True)):
    spec = importlib.util.spec_from_file_location(file.rpartition("/")[2].removesuffix(".py"), file)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        failed += 1
        print(file + ": cannot be imported\\n" + traceback.format_exc(limit=-2))
        continue
    for name, function in list(vars(module).items()):
        if name.startswith("test_") and callable(function):
            try:
                function()
            except BaseException:
                failed += 1
                print(file + "::" + name + " failed\\n" + traceback.format_exc(limit=-1))
            else:
                passed += 1
print(f"{passed} passed, {failed} failed")
"""
