"""The table "In the real trainers" of the README names tests; each exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_named_test_exists() -> None:
    text = (ROOT / "README.md").read_text()
    section = text.split("## In the real trainers")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 4
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for row in rows:
        for cell in row.strip("|").split("|")[1:]:
            names = re.findall(r"`(test_\w+)`", cell)
            assert names or "not covered" in cell or "has none" in cell, cell
            for name in names:
                assert f"def {name}(" in sources, name
