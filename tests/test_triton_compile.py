"""The Triton kernels compile for every GPU without one and keep their budgets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastrl import _library

pytest.importorskip("triton", reason="triton is not installed")
if _library.triton_interprets:
    pytest.skip("Triton interprets, so that nothing compiles", allow_module_level=True)

from benchmarks import budget, cuda_resources, triton_resources
from benchmarks.cuda_resources import Resources


@pytest.fixture(autouse=True)
def _compiles_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", triton_resources.TARGETS)
def test_every_example_keeps_its_budget(backend: str) -> None:
    if backend == "cuda" and cuda_resources.cuobjdump() is None:
        pytest.skip("no cuobjdump, neither on PATH nor in triton")
    measured = triton_resources.all_resources(backend)
    assert not budget.exceeded(f"triton.{backend}", measured)


def test_a_change_beyond_the_budget_shows_both_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "budget.toml"
    kept = Resources(registers=40, shared_bytes=512, stack_bytes=0, spills=0, wide_load_share=0.5)
    path.write_text(budget.text_of("triton.cuda", {"a": kept, "gone": kept}))
    more = Resources(registers=41, shared_bytes=516, stack_bytes=8, spills=2, wide_load_share=0.4)
    less = Resources(registers=39, shared_bytes=0, stack_bytes=0, spills=0, wide_load_share=1.0)
    assert budget.exceeded("triton.cuda", {"a": kept, "gone": less}, path) == []
    assert budget.exceeded("triton.cuda", {"a": more, "new": kept}, path) == [
        "triton.cuda: a: 2 spills, budget 0",
        "triton.cuda: a: 8 bytes of stack, budget 0",
        "triton.cuda: a: 41 registers, budget 40",
        "triton.cuda: a: 516 bytes of shared memory, budget 512",
        "triton.cuda: a: 0.4 of the loads of 128 bits, budget 0.5",
        "triton.cuda: new: no budget; run python -m benchmarks.budget --write",
        "triton.cuda: gone: a budget without a kernel",
    ]
    monkeypatch.setattr(budget, "compiler", lambda part: "another")
    other = budget.exceeded("triton.cuda", {"a": more, "gone": kept}, path)
    assert [line.split(": ")[2] for line in other] == [
        "2 spills, budget 0",
        "8 bytes of stack, budget 0",
    ]


def test_scans_combine_neighbours_in_the_same_order_whichever_way_a_row_goes() -> None:
    """A thread with several neighbours would sum them first, and a row cut up would not have the bits of a whole one."""
    examples, target = triton_resources.examples(), triton_resources.TARGETS["cuda"][1]
    names = [
        "gae",
        "gae, T <= 32",
        "gae, packed, long",
        "affine_scan, long",
        "affine_scan_backward",
    ]
    for name in names:
        launches = triton_resources.launches(examples[name])
        scanned = [_layouts_of_scans(launch.compile(target).asm["ttgir"]) for launch in launches]
        found = [layout for layouts in scanned for layout in layouts]
        assert found
        for layout in found:
            assert "sizePerThread = [1, 1], threadsPerWarp = [1, 32]" in layout, name


def _layouts_of_scans(code: str) -> list[str]:
    layouts = dict(re.findall(r"^(#\w+) = (#ttg.*)$", code, re.M))
    used = re.findall(r'"tt\.scan".*?\}\) : \(tensor<\w+, (#\w+)>', code, re.S)
    return [layouts[name] for name in used]
