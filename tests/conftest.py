"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastrl import _library


def built_capabilities() -> list[str]:
    if _library.compiled_error is not None:
        return []
    from fastrl import _C

    return [name for name in _C.build_info()["capabilities_built"] if _C.set_capability(name)]


IMPLEMENTATIONS = ["reference", *(f"cpu-{name}" for name in built_capabilities())]


@pytest.fixture(params=IMPLEMENTATIONS)
def impl(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every implementation in turn, the CPU kernels once per instruction set; the value goes to ``impl=``."""
    name, _, capability = request.param.partition("-")
    if capability:
        from fastrl import _C

        best = built_capabilities()[-1]
        assert _C.set_capability(capability)
        yield name
        assert _C.set_capability(best)
    else:
        yield name


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _outputs_are_born_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fresh memory holds NaN while an op test runs, so that an element which nobody writes cannot pass."""
    if "ops" not in request.path.parts:
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
