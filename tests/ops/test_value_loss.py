"""``fastrl.value_loss``: hand-worked values, the rules of DESIGN section 4, and the kernels against the reference."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import fastrl
from fastrl._losses import AGGREGATIONS
from fastrl.ops.value_loss.op import value_loss_op
from tests.helpers import (
    DTYPES,
    SHAPES,
    assert_close,
    leaf,
    masks,
    pack,
    poisoned,
    same_bits,
    strided,
    uneven_lengths,
    with_threads,
)
from tests.ops.losses import metric

INF = float("inf")
NONFINITE = fastrl.VALUE_METRICS.index("nonfinite")


class Batch(NamedTuple):
    values: Tensor
    old_values: Tensor
    returns: Tensor

    def map(self, change: Any) -> Batch:
        return Batch(*map(change, self))


def batch(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Batch:
    """Values on both sides of the clip and errors on both sides of the Huber bend, none within a flip band of either."""
    values = torch.randn(shape).to(dtype)
    old_values = (values.double() + 0.6 * torch.randn(shape)).to(dtype)
    returns = torch.randn(shape).to(dtype)
    for _ in range(3):
        moved = (values.double() - old_values.double()).abs()
        near = (moved - 0.5).abs() < 4e-3
        old_values = torch.where(near, old_values + 0.03, old_values)
        # Both losses are equal also where the return lies in the middle between the value and its clip.
        clipped = torch.minimum(torch.maximum(values.double(), old_values - 0.5), old_values + 0.5)
        tie = (values.double() - returns).abs() - (clipped - returns).abs()
        near = (tie.abs() < 4e-3) & (moved > 0.5)
        returns = torch.where(near, returns + 0.03, returns)
    return Batch(values, old_values, returns)


def run(impl: str, data: Batch, mask: Tensor | None, **options: Any) -> list[Tensor]:
    """Loss, metrics and gradient."""
    values = leaf(data.values)
    out = fastrl.value_loss(values, data.old_values, data.returns, mask, impl=impl, **options)
    out.loss.backward()
    assert values.grad is not None
    return [out.loss.detach(), out.metrics, values.grad]


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    for x, y in zip(a, b):
        assert same_bits(x, y)


def assert_agree(impl: str, a: list[Tensor], b: list[Tensor]) -> None:
    """The same bits from a kernel; the reference sums in an order that torch picks by layout."""
    if impl == "reference":
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    else:
        assert_same(a, b)


def test_hand_worked_clip(impl: str) -> None:
    """Old values 0, clip 1: 3 towards the return 4 counts as 1, and so does -3 away from it."""
    data = Batch(
        torch.tensor([[3.0, -3.0, 0.5, 9.0]]), torch.zeros(1, 4), torch.tensor([[4.0, 4.0, 4.0, 0]])
    )
    mask = torch.tensor([[1, 1, 1, 0]])
    loss, metrics, grad = run(impl, data, mask, clip=1.0, agg="token_sum")
    # 9/2 of the clipped value against 1/2; 49/2 against 25/2 of the clipped one; 3.5^2/2.
    assert loss.item() == 4.5 + 24.5 + 6.125
    assert grad.tolist() == [[0.0, -7.0, -3.5, 0.0]]
    assert dict(zip(fastrl.VALUE_METRICS, metrics.tolist())) == {
        "tokens": 3,
        "sequences": 1,
        "nonfinite": 0,
        "clipped": 1,
        "error_sum": -1 - 7 - 3.5,
        "error_sq_sum": 1 + 49 + 12.25,
        "return_sum": 12,
        "return_sq_sum": 48,
        "value_sum": 0.5,
    }
    plain, _, grad = run(impl, data, mask, clip=None, agg="token_sum")
    assert plain.item() == 0.5 + 24.5 + 6.125
    assert grad.tolist() == [[-1.0, -7.0, -3.5, 0.0]]
    unread = fastrl.value_loss(data.values, None, data.returns, mask, clip=None, impl=impl)
    assert unread.loss.item() == pytest.approx(plain.item() / 3)


def test_hand_worked_huber(impl: str) -> None:
    """delta 2: errors 1, -3 and 5 cost 1/2, 2 (3 - 1) and 2 (5 - 1); clip 1 keeps the last value at 1, which costs more."""
    data = Batch(
        torch.tensor([[1.0, -3.0, 5.0]]), torch.tensor([[1.0, -3.0, 0.0]]), torch.zeros(1, 3)
    )
    options = {"loss": "huber", "huber_delta": 2.0, "agg": "token_sum"}
    loss, _, grad = run(impl, data, None, clip=None, **options)
    assert (loss.item(), grad.tolist()) == (0.5 + 4 + 8, [[1.0, -2.0, 2.0]])
    far = data._replace(returns=torch.tensor([[0.0, 0.0, 6.0]]))
    loss, _, grad = run(impl, far, None, clip=1.0, **options)
    assert (loss.item(), grad.tolist()) == (0.5 + 4 + 2 * (5 - 1), [[1.0, -2.0, 0.0]])


def test_hand_worked_aggregations(impl: str) -> None:
    """Rows of 1, 3 and 0 valid tokens with losses 2 and 0.5 per token, in a width of 4."""
    mask = torch.tensor([[1, 0, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]])
    values = torch.tensor([2.0, 1.0, 7.0]).unsqueeze(1).expand(3, 4)
    expected = {
        "token_mean": 3.5 / 4,
        "token_sum": 3.5,
        "seq_mean_token_sum": 3.5 / 2,
        "seq_mean_token_mean": 2.5 / 2,
        "seq_mean_token_sum_norm": 3.5 / 8,
    }
    for agg, value in expected.items():
        arguments = (values, None, torch.zeros(3, 4), mask)
        out = fastrl.value_loss(*arguments, clip=None, agg=agg, impl=impl)
        assert out.loss.item() == pytest.approx(value)
        if agg != "token_sum":
            for denom in (10, torch.tensor(10.0)):
                got = fastrl.value_loss(*arguments, clip=None, agg=agg, denom=denom, impl=impl)
                total = 2.5 if agg == "seq_mean_token_mean" else 3.5
                assert got.loss.item() == pytest.approx(total / 10)


@pytest.mark.parametrize("shape", [*SHAPES, (2, 4200)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_reference(impl: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Every mask, with losses, clips and aggregations varied alongside."""
    data = batch(shape, dtype)
    variants = itertools.product((None, 0.5), ("mse", "huber"), AGGREGATIONS)
    for (_, mask), (clip, loss, agg) in zip(itertools.cycle(masks(shape)), variants):
        options = {"clip": clip, "loss": loss, "huber_delta": 0.77, "agg": agg}
        got = run(impl, data, mask, **options)
        expected = run("reference", data.map(Tensor.double), mask, **options)
        tokens = max(expected[1][0].item(), 1)
        scale = tokens if agg in ("token_sum", "seq_mean_token_sum") else 1
        assert_close(got[0] / scale, expected[0] / scale, dtype)
        assert_close(got[1] / tokens, expected[1] / tokens, dtype)
        assert_close(got[2], expected[2], dtype, grad=True)
        assert got[2].dtype == dtype


# ---- rules of DESIGN section 4 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [float("nan"), INF, -INF])
def test_rule_1_masked_positions_have_no_influence(impl: str, poison: float) -> None:
    data = batch((3, 50))
    for (_, mask), loss in itertools.product(masks((3, 50)), ("mse", "huber")):
        clean = run(impl, data, mask, loss=loss)
        dirty = data.map(lambda x: poisoned(x, mask, poison))  # noqa: B023
        got = run(impl, dirty, mask, loss=loss)
        assert_same(got, clean)
        if mask is not None:
            outside = got[2][mask == 0]
            assert same_bits(outside, torch.zeros_like(outside))


@pytest.mark.parametrize("agg", AGGREGATIONS)
def test_rule_2_empty(impl: str, agg: str) -> None:
    for shape in ((0, 5), (3, 0), (0, 0), (2, 20)):
        mask = torch.zeros(shape) if shape == (2, 20) else None
        data = batch(shape).map(lambda x: torch.full_like(x, float("nan")))
        loss, metrics, grad = run(impl, data, mask, agg=agg)
        assert loss.item() == 0
        assert torch.count_nonzero(metrics) == 0
        assert grad.shape == shape and torch.count_nonzero(grad) == 0


def test_rule_5_same_bits_for_any_number_of_threads() -> None:
    for shape in ((64, 700), (1, 50_000)):
        data, mask = batch(shape), torch.rand(shape) < 0.7
        one, two = (with_threads(n, lambda: run("cpu", data, mask)) for n in (1, 2))  # noqa: B023
        assert_same(one, two)


def test_rule_5_same_bits_padded_on_either_side(impl: str) -> None:
    for length in (45, 2100):
        data, mask = batch((3, length)), torch.rand(3, length) < 0.7
        mask[:, 0] = mask[:, -1] = True
        expected = run(impl, data, mask, agg="seq_mean_token_mean")
        pad = torch.full((3, 38), float("nan"))
        for side in ("left", "right"):
            order = slice(None) if side == "right" else slice(None, None, -1)
            wide = data.map(lambda x: torch.cat([x, pad][order], 1))  # noqa: B023
            wide_mask = torch.cat([mask, torch.zeros(pad.shape, dtype=torch.bool)][order], 1)
            got = run(impl, wide, wide_mask, agg="seq_mean_token_mean")
            start = 0 if side == "right" else 38
            got[2] = got[2][:, start : start + length]
            assert_agree(impl, got, expected)


def test_rule_5_same_bits_of_many_rows_of_uneven_lengths(impl: str) -> None:
    for lengths, has_holes in itertools.product(uneven_lengths(impl), (False, True)):
        shape = (len(lengths), max(lengths))
        data = batch(shape)
        inside = torch.arange(shape[1]) < torch.tensor(lengths).unsqueeze(1)
        mask = inside & (torch.rand(shape) < 0.7) if has_holes else inside
        padded = run(impl, data, mask, agg="seq_mean_token_mean")
        expected = run("reference", data.map(Tensor.double), mask, agg="seq_mean_token_mean")
        torch.testing.assert_close(
            [x.double() for x in padded], [x.double() for x in expected], atol=1e-4, rtol=1e-4
        )
        flat = data.map(lambda x: pack(x, lengths)[0])  # noqa: B023
        flat_mask, offsets = pack(mask, lengths)
        packed = run(
            *(impl, flat, flat_mask if has_holes else None),
            cu_seqlens=offsets,
            agg="seq_mean_token_mean",
        )
        padded[2] = pack(padded[2], lengths)[0]
        assert_agree(impl, packed, padded)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    density=st.floats(0, 1),
    seed=st.integers(0, 2**20),
)
def test_rule_5_packed_equals_padded_for_any_lengths_and_mask(
    lengths: list[int], density: float, seed: int
) -> None:
    torch.manual_seed(seed)
    shape = (len(lengths), max(lengths))
    data = batch(shape)
    inside = torch.arange(shape[1]) < torch.tensor(lengths).unsqueeze(1)
    mask = (torch.rand(shape) < density) & inside
    padded = run("cpu", data, mask, agg="seq_mean_token_mean")
    packed_mask, offsets = pack(mask, lengths)
    flat = data.map(lambda x: pack(x, lengths)[0])
    packed = run("cpu", flat, packed_mask, cu_seqlens=offsets, agg="seq_mean_token_mean")
    padded[2] = pack(padded[2], lengths)[0]
    assert_same(padded, packed)


def test_rule_7_shapes_beyond_2_to_the_31() -> None:
    with FakeTensorMode():
        x = torch.empty(2**17, 2**15)
        out = value_loss_op["cpu"](*(x, x, x, None, None, None), 0.0, 0.5, INF, 0, True)
        assert out[2].numel() == 2**32


def test_rule_8_strides_do_not_matter_and_inputs_are_not_modified(impl: str) -> None:
    data, mask = batch((3, 40)), torch.rand(3, 40) < 0.7
    expected = run(impl, data, mask)
    layouts = [list(strided(x)) for x in data]
    for *inputs, mask_layout in zip(*layouts, strided(mask)):
        before = [x.clone() for x in (*inputs, mask_layout)]
        assert_agree(impl, run(impl, Batch(*inputs), mask_layout), expected)
        assert all(same_bits(a, b) for a, b in zip(before, (*inputs, mask_layout)))


def test_rule_10_what_is_not_finite_at_a_valid_token_is_counted(impl: str) -> None:
    data = batch((2, 40))
    for field, value in itertools.product(data._fields, (float("nan"), INF)):
        x = getattr(data, field).clone()
        x[0, 20] = x[1, 3] = value
        loss, metrics, _ = run(impl, data._replace(**{field: x}), None)
        assert metrics[NONFINITE] == 2, (field, value)
        if field != "old_values":
            assert not torch.isfinite(loss), (field, value)


# ---- gradients, compilation, options --------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["mse", "huber"])
def test_gradcheck_in_double(impl: str, loss: str) -> None:
    data, mask = batch((2, 9)).map(Tensor.double), torch.rand(2, 9) < 0.7
    assert torch.autograd.gradcheck(
        lambda v: (
            fastrl.value_loss(
                *(v, data.old_values, data.returns, mask), loss=loss, huber_delta=0.77, impl=impl
            ).loss
        ),
        leaf(data.values),
    )


def test_any_upstream_gradient(impl: str) -> None:
    data, mask = batch((3, 50)), torch.rand(3, 50) < 0.7
    grad = run(impl, data, mask)[2]
    for scale in (3.0, -0.5, 0.0):
        values = leaf(data.values)
        out = fastrl.value_loss(values, data.old_values, data.returns, mask, impl=impl)
        (out.loss * scale).backward()
        torch.testing.assert_close(values.grad, grad * scale)
    values = leaf(data.values)
    loss = fastrl.value_loss(values, data.old_values, data.returns, mask, impl=impl).loss
    loss.backward(retain_graph=True)
    assert values.grad is not None
    values.grad.mul_(0)  # must not reach what the graph has saved
    loss.backward()
    torch.testing.assert_close(values.grad, grad)


def test_only_values_have_a_gradient(impl: str) -> None:
    data = batch((2, 20)).map(leaf)
    fastrl.value_loss(*data, impl=impl).loss.backward()
    assert [x.grad is not None for x in data] == [True, False, False]
    with torch.no_grad():
        assert not fastrl.value_loss(*data, impl=impl).loss.requires_grad


def test_micro_batches_with_the_global_denominator_add_up(impl: str) -> None:
    data, mask = batch((6, 50)), torch.rand(6, 50) < 0.6
    whole = run(impl, data, mask)
    rows = (slice(0, 2), slice(2, 6))
    parts = [run(impl, data.map(lambda x: x[r]), mask[r], denom=mask.sum()) for r in rows]  # noqa: B023
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0])
    torch.testing.assert_close(parts[0][1] + parts[1][1], whole[1])
    torch.testing.assert_close(torch.cat([part[2] for part in parts]), whole[2])


def test_mixed_dtypes_and_autocast(impl: str) -> None:
    """A critic in bfloat16 against float32 returns; autocast changes nothing."""
    data = batch((3, 40), torch.bfloat16)
    data = data._replace(returns=data.returns.float())
    got = run(impl, data, None)
    expected = run("reference", data.map(Tensor.double), None)
    assert_close(got[0], expected[0], torch.bfloat16)
    assert_close(got[2], expected[2], torch.bfloat16, grad=True)
    assert got[2].dtype == torch.bfloat16
    with torch.autocast(data[0].device.type, dtype=torch.bfloat16):
        assert_same(run(impl, data, None), got)


def test_opcheck() -> None:
    data, mask = batch((3, 20)), torch.rand(3, 20) < 0.5
    torch.library.opcheck(value_loss_op["cpu"], (*data, mask, None, None, 0.0, 0.5, INF, 3, True))
    offsets, denom = torch.tensor([0, 20, 45, 60]), torch.tensor(7.0, dtype=torch.float64)
    flat = (data.values.flatten(), None, data.returns.flatten())
    torch.library.opcheck(
        value_loss_op["cpu"], (*flat, mask.flatten(), offsets, denom, 0.0, INF, 1.0, 0, False)
    )


def test_compile_fullgraph_with_dynamic_lengths() -> None:
    compiles = CompileCounter()

    def loss(data: Batch, mask: Tensor) -> tuple[Tensor, Tensor]:
        out = fastrl.value_loss(*data, mask, loss="huber", denom=mask.sum())
        return out.loss * 2, out.metrics

    torch._dynamo.reset()
    counted = torch.compile(loss, fullgraph=True, dynamic=True, backend=compiles)
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 30), (3, 17), (4, 55)):
        data, mask = batch(shape), torch.rand(shape) < 0.5
        data = data._replace(values=leaf(data.values))
        counted(data, mask)
        (got, got_metrics), (expected, metrics) = compiled(data, mask), loss(data, mask)
        torch.testing.assert_close(got_metrics, metrics)
        x, y = (torch.autograd.grad(value, data.values)[0] for value in (got, expected))
        torch.testing.assert_close(x, y)
    assert compiles.frame_count == 1


def test_errors_name_op_argument_expected_got_and_remedy() -> None:
    x = torch.zeros(2, 5)

    def call(*arguments: Any, **options: Any) -> Any:
        return lambda: fastrl.value_loss(*arguments, **options)

    cases = [
        (r"value_loss: returns must have the shape of values, \[2, 5\], got \[2, 4\]", call(x, x, x[:, :4])),
        (r"value_loss: old_values must be given for clip=0.5, got None; pass them, or clip=None", call(x, None, x)),
        (r"value_loss: clip must be a finite number in \[0, inf\], got -1", call(x, x, x, clip=-1)),
        (r"value_loss: loss must be one of 'mse', 'huber', got 'l1'", call(x, x, x, loss="l1")),
        (r"value_loss: huber_delta must be greater than 0, got 0; use loss='mse'", call(x, x, x, huber_delta=0)),
        (r"value_loss: values and returns must both be float64 or neither", call(x, x, x.double())),
        (r"value_loss: mask must have the shape of values", call(x, x, x, x[:1])),
        (r"value_loss: agg must be one of", call(x, x, x, agg="mean")),
        (r"value_loss: values must be \[B, T\], or \[N\] with cu_seqlens", call(x[0], x[0], x[0])),
    ]  # fmt: skip
    for message, bad in cases:
        with pytest.raises(ValueError, match=message):
            bad()
    with pytest.raises(RuntimeError, match="no such aggregation"):
        value_loss_op["cpu"](*(x, x, x, None, None, None), 0.0, 0.5, INF, 5, True)


def test_named_gives_views(impl: str) -> None:
    x = torch.zeros(2, 5)
    out = fastrl.value_loss(x, x, x, impl=impl)
    assert tuple(out.named()) == fastrl.VALUE_METRICS
    assert metric(out, "tokens") == 10
