"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastrl import _library
from tests import without_hypothesis

without_hypothesis.install()


def built_capabilities() -> list[str]:
    if _library.compiled_error is not None:
        return []
    from fastrl import _C

    return [name for name in _C.build_info()["capabilities_built"] if _C.set_capability(name)]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--impl",
        choices=("cuda", "triton", "cuda-on-host", "reference"),
        help="run the tests of the fixture `impl` over this implementation, and nothing else; kernels for GPUs run there "
        "(--device=cuda) or are interpreted (triton) or compiled for the host (cuda-on-host)",
    )
    parser.addoption(
        "--device", default="cpu", help="with --impl: where the tests make their tensors, e.g. cuda"
    )


def pytest_configure(config: pytest.Config) -> None:
    device = torch.device(config.getoption("--device"))
    if device.type != "cpu":
        if config.getoption("--impl") in (None, "cuda-on-host"):
            raise pytest.UsageError("--device needs --impl=cuda, triton or reference")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise pytest.UsageError("--device=cuda: torch finds no GPU")
        # Before collection, because some tests hold tensors of their module.
        torch.set_default_device(device)
    elif config.getoption("--impl") == "cuda":
        raise pytest.UsageError("--impl=cuda needs --device=cuda")
    elif config.getoption("--impl") == "triton" and not _library.triton_interprets:
        raise pytest.UsageError(
            "--impl=triton needs --device=cuda, or triton and TRITON_INTERPRET=1 in the environment"
        )
    if config.getoption("--impl") == "triton" and _library.triton_interprets:
        from tests import interpreter

        interpreter.speed_up_scans()
    if config.getoption("--impl") == "cuda-on-host":
        from tests.cuda_on_host import library

        library.load()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "impl" in metafunc.fixturenames:
        gpu_kernels = metafunc.config.getoption("--impl")
        on_cpu = ["reference", *(f"cpu-{name}" for name in built_capabilities())]
        metafunc.parametrize("impl", [gpu_kernels] if gpu_kernels else on_cpu, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--impl"):
        others = [i for i in items if "impl" not in getattr(i, "fixturenames", ())]
        config.hook.pytest_deselected(items=others)
        items[:] = [i for i in items if i not in set(others)]


@pytest.fixture
def impl(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every implementation in turn, the CPU kernels once per instruction set; the value goes to ``impl=``."""
    name, _, capability = request.param.partition("-")
    if name == "cuda":
        yield name
        return
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
