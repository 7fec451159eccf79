"""``fastrl.whiten``: hand-worked values, the rules of DESIGN section 4, ranks, and the kernels against the reference."""

from __future__ import annotations

import itertools
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import fastrl
from fastrl.ops.whiten.merge import merge_moments
from fastrl.ops.whiten.op import EPS_MODES, masked_moments_op, whiten_apply_op
from fastrl.ops.whiten.reference import masked_moments_reference
from tests.helpers import (
    DTYPES,
    SHAPES,
    assert_close,
    masks,
    poisoned,
    same_bits,
    strided,
    thinned,
    with_threads,
)
from tests.ops.whiten_rank import whiten_rank

NAN, INF = float("nan"), float("inf")


def reference(x: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """The definition in float64."""
    return fastrl.whiten(x.double(), mask, impl="reference", **options)


def moments(x: Tensor, mask: Tensor | None, impl: str) -> Tensor:
    return (
        masked_moments_reference(x, mask)
        if impl == "reference"
        else masked_moments_op[impl](x, mask)
    )


# 1, 2, 6 are valid: mean 3, sum of squares 4 + 1 + 9 = 14, variance 7 or 14 / 3.
@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({"ddof": 1, "eps": 0.0}, 1 / math.sqrt(7)),
        ({"ddof": 0, "eps": 0.0}, 1 / math.sqrt(14 / 3)),
        ({"eps": 2.0}, 1 / math.sqrt(9)),
        ({"eps": 2.0, "eps_mode": "rsqrt_max"}, 1 / math.sqrt(7)),
        ({"eps": 16.0, "eps_mode": "rsqrt_max"}, 1 / 4),
        ({"eps": 2.0, "eps_mode": "std_add"}, 1 / (math.sqrt(7) + 2)),
    ],
)
def test_hand_worked_values(impl: str, options: dict[str, Any], factor: float) -> None:
    x, mask = torch.tensor([1.0, 9.0, 2.0, 6.0]), torch.tensor([1, 0, 1, 1])
    got = fastrl.whiten(x, mask, impl=impl, **options)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx([-2 * factor, 0.0, -factor, 3 * factor])
    kept = fastrl.whiten(x, mask, shift_mean=False, impl=impl, **options)
    assert kept.tolist() == pytest.approx([3 - 2 * factor, 0.0, 3 - factor, 3 + 3 * factor])


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_reference(impl: str, dtype: torch.dtype) -> None:
    cases = itertools.product((*SHAPES, (7, 1300)), (0, 1), EPS_MODES, (True, False))
    for shape, ddof, eps_mode, shift in thinned(impl, cases):
        x = (torch.randn(shape) * 3 + 1).to(dtype)
        for _, mask in masks(shape):
            options = {"ddof": ddof, "eps_mode": eps_mode, "shift_mean": shift, "eps": 1e-4}
            got = fastrl.whiten(x, mask, impl=impl, **options)
            assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert_close(got, reference(x, mask, **options), dtype)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.booleans()), max_size=70),
    st.integers(0, 1),
    st.sampled_from(list(EPS_MODES)),
)
def test_any_elements_against_reference(
    elements: list[tuple[float, bool]], ddof: int, eps_mode: str
) -> None:
    x = torch.tensor([value for value, _ in elements], dtype=torch.float64)
    mask = torch.tensor([valid for _, valid in elements], dtype=torch.bool)
    got = fastrl.whiten(x, mask, ddof=ddof, eps_mode=eps_mode)
    torch.testing.assert_close(
        got, reference(x, mask, ddof=ddof, eps_mode=eps_mode), atol=1e-8, rtol=1e-8
    )


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (2, 1, 3, 1, 5)])
def test_any_number_of_dimensions(impl: str, shape: tuple[int, ...]) -> None:
    x, mask = torch.randn(shape), torch.rand(shape) < 0.7
    got = fastrl.whiten(x, mask, impl=impl)
    assert got.shape == shape
    flat = fastrl.whiten(x.reshape(-1), mask.reshape(-1), impl=impl)
    assert same_bits(got.reshape(-1), flat)


# ---- the rules of DESIGN section 4 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_rule_1_masked_elements_have_no_influence(impl: str, poison: float) -> None:
    for shape in SHAPES:
        x = torch.randn(shape)
        for name, mask in masks(shape):
            got = fastrl.whiten(poisoned(x, mask, poison), mask, impl=impl)
            assert same_bits(got, fastrl.whiten(x, mask, impl=impl)), name
            if mask is not None:
                assert (got[mask == 0] == 0).all()


@pytest.mark.parametrize("eps_mode", EPS_MODES)
@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_rule_2_empty(impl: str, shape: tuple[int, ...], eps_mode: str) -> None:
    for mask in (None, torch.ones(shape)):
        got = fastrl.whiten(torch.zeros(shape), mask, eps_mode=eps_mode, impl=impl)
        assert got.shape == shape


@pytest.mark.parametrize("eps", [1e-8, 0.0])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps_mode", EPS_MODES)
def test_rule_2_none_and_one_valid(impl: str, eps_mode: str, ddof: int, eps: float) -> None:
    """verl raises for both, others return NaN."""
    options: dict[str, Any] = {"eps_mode": eps_mode, "ddof": ddof, "eps": eps, "impl": impl}
    x, mask = torch.full((2, 9), 0.3), torch.zeros(2, 9)
    assert fastrl.whiten(x, mask, **options).tolist() == torch.zeros(2, 9).tolist()
    assert (
        fastrl.whiten(x, mask, shift_mean=False, **options).tolist() == torch.zeros(2, 9).tolist()
    )
    mask[1, 3] = 1
    assert fastrl.whiten(x, mask, **options).tolist() == torch.zeros(2, 9).tolist()
    kept = fastrl.whiten(x, mask, shift_mean=False, **options)
    assert torch.equal(kept, torch.where(mask != 0, x, 0.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [1e-8, 0.0])
@pytest.mark.parametrize("eps_mode", EPS_MODES)
def test_rule_3_equal_elements_give_exactly_zero(
    impl: str, eps_mode: str, eps: float, dtype: torch.dtype
) -> None:
    for value, count in itertools.product((0.1, -0.3, 1e4, 1e-30), (2, 7, 5000)):
        x = torch.full((count,), value).to(dtype)
        got = fastrl.whiten(x, eps=eps, eps_mode=eps_mode, impl=impl)
        assert (got == 0).all(), (value, count)
        kept = fastrl.whiten(x, eps=eps, eps_mode=eps_mode, shift_mean=False, impl=impl)
        assert torch.equal(kept, x.to(kept.dtype))


@pytest.mark.parametrize("offset", [1e4, 1e6])
def test_rule_4_variance_survives_a_large_offset(impl: str, offset: float) -> None:
    """In float32 E[x^2] - E[x]^2 is all rounding error here; the steps of 1/4 are exact at either offset."""
    x = torch.randint(0, 9, (20000,)) / 4
    torch.testing.assert_close(fastrl.whiten(x + offset, impl=impl), fastrl.whiten(x, impl=impl))


def test_rule_4_an_outlier_in_front(impl: str) -> None:
    """The first element is where sums are measured from; it must not cost the others their digits."""
    x = torch.cat([torch.tensor([1e6]), 1 + 0.01 * torch.randn(9999)]).double()
    got = moments(x, torch.cat([torch.zeros(1), torch.ones(9999)]), impl)
    rest = x[1:]
    expected = [9999.0, float(rest.mean()), float((rest - rest.mean()).square().sum())]
    assert got.tolist() == pytest.approx(expected, rel=1e-12)
    assert float(moments(x, None, impl)[2]) == pytest.approx(float(x.var() * 9999), rel=1e-12)


def test_rule_5_same_bits_for_any_number_of_threads() -> None:
    x, mask = torch.randn(300, 1001), torch.rand(300, 1001) < 0.7
    for valid in (mask, None, mask.long()):
        one, two = (with_threads(n, lambda m=valid: fastrl.whiten(x, m)) for n in (1, 2))
        assert same_bits(one, two)


def test_rule_5_padding_changes_nothing_but_rounding(impl: str) -> None:
    x, mask = torch.randn(5, 40), torch.rand(5, 40) < 0.7
    got = fastrl.whiten(x, mask, impl=impl)
    packed = fastrl.whiten(x[mask], impl=impl)
    torch.testing.assert_close(got[mask], packed)
    padded = fastrl.whiten(
        torch.nn.functional.pad(x, (9, 30), value=NAN),
        torch.nn.functional.pad(mask, (9, 30)),
        impl=impl,
    )
    torch.testing.assert_close(padded[:, 9:49], got)


def test_rule_7_shapes_beyond_2_to_the_31() -> None:
    with FakeTensorMode():
        x = torch.empty(2**16, 2**16, dtype=torch.bfloat16)
        assert fastrl.whiten(x, torch.empty(x.shape, dtype=torch.bool)).shape == x.shape


def test_rule_8_strides_do_not_matter_and_inputs_are_not_modified(impl: str) -> None:
    x, mask = torch.randn(6, 20), torch.rand(6, 20) < 0.7
    before = x.clone(), mask.clone()
    expected = fastrl.whiten(x, mask, impl=impl)
    for odd, odd_mask in itertools.product(strided(x), strided(mask)):
        assert same_bits(fastrl.whiten(odd, odd_mask, impl=impl), expected)
    row = torch.randn(1, 20)
    assert same_bits(
        fastrl.whiten(row.expand(6, 20), mask, impl=impl),
        fastrl.whiten(row.repeat(6, 1), mask, impl=impl),
    )
    assert same_bits(x, before[0])
    assert torch.equal(mask, before[1])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_rule_10_a_valid_element_that_is_not_finite_shows(impl: str, bad: float) -> None:
    x, mask = torch.randn(3, 50), torch.rand(3, 50) < 0.7
    x[1, 7], mask[1, 7] = bad, True
    got = fastrl.whiten(x, mask, impl=impl)
    assert got[mask].isnan().all()
    assert (got[~mask] == 0).all()


# ---- ranks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(5, 7), (0, 4), (4, 0), (0, 0), (1, 1), (3000, 1, 0, 50)])
def test_merged_moments_are_those_of_the_union(impl: str, sizes: tuple[int, ...]) -> None:
    parts = [torch.randn(n, dtype=torch.float64) * 10**i + 1e4 for i, n in enumerate(sizes)]
    merged = merge_moments(torch.stack([moments(part, None, impl) for part in parts]))
    torch.testing.assert_close(
        merged, moments(torch.cat(parts), None, impl), rtol=1e-10, atol=1e-10
    )


def test_merging_equal_elements_leaves_no_rounding(impl: str) -> None:
    parts = [torch.full((n,), 0.1) for n in (7, 0, 3, 10)]
    merged = merge_moments(torch.stack([moments(part, None, impl) for part in parts]))
    assert merged.tolist() == [20.0, float(torch.tensor(0.1)), 0.0]


def test_two_ranks_whiten_like_one() -> None:
    x, mask = torch.randn(5, 30) * 3 + 100, torch.rand(5, 30) < 0.6
    with tempfile.TemporaryDirectory() as folder:
        torch.save((x, mask), Path(folder) / "inputs.pt")
        mp.spawn(whiten_rank, (folder,), nprocs=2)
        ranks = [torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(2)]
    for name in ("auto", "reference"):
        together = torch.cat([rank[name] for rank in ranks])
        torch.testing.assert_close(together, fastrl.whiten(x, mask))
    assert ranks[0]["empty"].shape == (0, 30)
    torch.testing.assert_close(ranks[1]["empty"], fastrl.whiten(x[2:]))
    assert all((rank["equal"] == 0).all() for rank in ranks)
    torch.testing.assert_close(ranks[0]["alone"], fastrl.whiten(x[:2], mask[:2]))


# ---- the operators --------------------------------------------------------------------------------------------------


def test_opcheck() -> None:
    x, mask = torch.randn(3, 20), torch.rand(3, 20) < 0.5
    for values, valid in ((x, mask), (x.double().T, None), (x[0].bfloat16(), mask[0].long())):
        torch.library.opcheck(masked_moments_op["cpu"], (values, valid))
        statistics = masked_moments_op["cpu"](values, valid)
        torch.library.opcheck(
            whiten_apply_op["cpu"], (values, valid, statistics, 1, 1e-8, 2, False)
        )


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_compile_fullgraph_with_dynamic_shapes(implementation: str) -> None:
    compiles = CompileCounter()

    def both(x: Tensor, mask: Tensor) -> Tensor:
        first = fastrl.whiten(x, mask, impl=implementation)
        return first + fastrl.whiten(x, ddof=0, eps_mode="std_add", impl=implementation)

    torch._dynamo.reset()
    counted = torch.compile(both, fullgraph=True, dynamic=True, backend=compiles)
    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 30), (3, 17), (4, 55)):
        x, mask = torch.randn(shape), torch.rand(shape) < 0.5
        counted(x, mask)
        torch.testing.assert_close(compiled(x, mask), both(x, mask))
    assert compiles.frame_count == 1


def test_gradients_are_refused_not_dropped(impl: str) -> None:
    x = torch.randn(4, requires_grad=True)
    with pytest.raises(ValueError, match=r"whiten: x must not require grad.*pass x.detach\(\)"):
        fastrl.whiten(x, impl=impl)
    with torch.no_grad():
        got = fastrl.whiten(x, impl=impl)
    assert not got.requires_grad
    assert same_bits(got, fastrl.whiten(x.detach(), impl=impl))


def test_errors_name_op_argument_expected_got_and_remedy() -> None:
    x = torch.zeros(2, 5)
    cases: list[tuple[str, Any]] = [
        (r"whiten: x must be float32.*got torch.int64; convert it", lambda: fastrl.whiten(x.long())),
        (r"whiten: mask must have the shape of x, \[2, 5\], got \[2, 4\]", lambda: fastrl.whiten(x, x[:, :4])),
        (r"whiten: mask must be bool, integer or floating", lambda: fastrl.whiten(x, x.to(torch.complex64))),
        (r"whiten: ddof must be 0 \(population\) or 1 \(sample\), got 2", lambda: fastrl.whiten(x, ddof=2)),
        (r"whiten: eps must be a finite number in \[0, inf\], got -1", lambda: fastrl.whiten(x, eps=-1)),
        (r"whiten: eps_mode must be one of 'rsqrt_add', .*got 'add'", lambda: fastrl.whiten(x, eps_mode="add")),
        (r"impl must be one of auto", lambda: fastrl.whiten(x, impl="fast")),
    ]  # fmt: skip
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match=r"whiten: x must be a torch.Tensor, got list; wrap it"):
        fastrl.whiten([1.0])  # type: ignore[arg-type]


def test_direct_calls_of_the_operators_are_checked() -> None:
    x, statistics = torch.zeros(2, 5), torch.zeros(3, dtype=torch.float64)
    for call in (
        lambda: masked_moments_op["cpu"](x, x[0]),
        lambda: masked_moments_op["cpu"](x.long(), None),
        lambda: whiten_apply_op["cpu"](x, x[0], statistics, 1, 1e-8, 0, True),
        lambda: whiten_apply_op["cpu"](x, None, statistics[:2], 1, 1e-8, 0, True),
        lambda: whiten_apply_op["cpu"](x, None, statistics.float(), 1, 1e-8, 0, True),
        lambda: whiten_apply_op["cpu"](x, None, statistics, 1, 1e-8, 3, True),
    ):
        with pytest.raises(RuntimeError, match="fastrl: "):
            call()
