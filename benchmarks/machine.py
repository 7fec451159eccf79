"""What a figure was measured with: processor, threads, instruction set, versions. No host names, no paths."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

import fastrl
from benchmarks.peers import version
from fastrl import _library


def machine() -> dict[str, Any]:
    """Processor, cores, threads of torch, and the instruction set that fastrl uses."""
    capability = "none"
    if _library.compiled_error is None:
        from fastrl import _C

        capability = _C.build_info()["capability"]
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": capability,
    }


def versions() -> dict[str, str | None]:
    """Versions of whatever took part."""
    return {
        "fastrl": fastrl.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "verl": version("verl"),
    }


def slug() -> str:
    """A folder name for the machine, such as ``amd-epyc-2-cores``."""
    name = re.sub(r"\(r\)|\(tm\)|cpu|processor|@.*", " ", _cpu_model().lower())
    return "-".join([*re.findall(r"[a-z0-9.]+", name), f"{os.cpu_count()}-cores"])


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()
