"""Rewards between 0 and 1 for work that is partly right.

All-or-nothing rewards leave early groups without variance: every sample scores 0, every advantage is
0, nothing is learnt. Each function here returns a share, and None where it cannot judge.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Mapping

__all__ = [
    "compiles",
    "format_share",
    "lint_share",
    "patch_place",
    "patch_size",
    "share_passed",
    "valid_call_share",
]


def share_passed(results: Mapping[str, bool]) -> float | None:
    """Tests passed / tests; None without tests.

    >>> share_passed({"test_a": True, "test_b": False})
    0.5
    """
    return sum(results.values()) / len(results) if results else None


def compiles(source: str) -> float:
    """1 when `source` is valid Python, else 0; nothing is run.

    >>> compiles("x = 1"), compiles("x = ")
    (1.0, 0.0)
    """
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.0
    return 1.0


def lint_share(source: str) -> float:
    """1 - findings / statements, at least 0; 0 when `source` is not valid Python.

    Findings: an unused import, a bare except, a comparison with None by ==, a mutable default.

    >>> lint_share("import os\\nx = 1")
    0.5
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.0
    statements = [n for n in ast.walk(tree) if isinstance(n, ast.stmt)]
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    findings = 0
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [(a.asname or a.name).partition(".")[0] for a in node.names]
            findings += sum(n not in used and n != "*" for n in names)
        elif isinstance(node, ast.ExceptHandler):
            findings += node.type is None
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            equal = any(isinstance(o, (ast.Eq, ast.NotEq)) for o in node.ops)
            findings += equal and any(
                isinstance(s, ast.Constant) and s.value is None for s in sides
            )
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            defaults = [*node.args.defaults, *node.args.kw_defaults]
            findings += sum(isinstance(d, (ast.List, ast.Dict, ast.Set)) for d in defaults)
    return max(1 - findings / len(statements), 0.0) if statements else 1.0


def patch_size(before: str, after: str, *, budget: int = 10) -> float:
    """1 up to `budget` changed lines, then budget / changed; 0 for no change.

    >>> patch_size("a\\nb", "a\\nc", budget=10), patch_size("a", "a")
    (1.0, 0.0)
    """
    changed = len(_changed_lines(before, after))
    return min(budget / changed, 1.0) if changed else 0.0


def patch_place(before: str, after: str, *, first: int, last: int) -> float | None:
    """Changed lines of `before` within lines `first` to `last` (from 1) / changed lines; None for no change.

    >>> patch_place("a\\nb\\nc", "a\\nx\\ny", first=2, last=2)
    0.5
    """
    places = [n for sign, n in _changed_lines(before, after) if sign == "-"]
    places = places or [n for _, n in _changed_lines(before, after)]
    return sum(first <= n <= last for n in places) / len(places) if places else None


def _changed_lines(before: str, after: str) -> list[tuple[str, int]]:
    """("-", line of `before`) for each removed line, ("+", place in `before`) for each added one."""
    a, b = before.splitlines(), after.splitlines()
    result = []
    for tag, a0, a1, b0, b1 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            result += [("-", n + 1) for n in range(a0, a1)]
            result += [("+", a0 + 1)] * (b1 - b0)
    return result


def valid_call_share(valid: int, calls: int) -> float | None:
    """Valid tool calls / tool calls; None without calls.

    >>> valid_call_share(1, 2)
    0.5
    """
    return valid / calls if calls else None


def format_share(text: str, patterns: Mapping[str, str]) -> float | None:
    """Share of the regular expressions in `patterns` that `text` has; None without patterns.

    >>> format_share("<think>a</think> 7", {"thought": "<think>.*</think>", "answer": r"\\d+$"})
    1.0
    """
    found = [bool(re.search(p, text, re.DOTALL)) for p in patterns.values()]
    return sum(found) / len(found) if found else None
