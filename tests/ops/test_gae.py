"""``fastrl.gae``: hand-worked values, equivalences, the rules of DESIGN section 4, and the kernels against the reference."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import fastrl
from fastrl.ops.gae.op import gae_backward_op, gae_op
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
    with_threads,
)

HOLES = ("carry", "zero_step", "ignore")


def inputs(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


def reference(rewards: Tensor, values: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
    """The definition in float64."""
    options = {
        k: v.double() if k == "bootstrap" and v is not None else v for k, v in options.items()
    }
    return fastrl.gae(rewards.double(), values.double(), mask, impl="reference", **options)


def test_hand_worked_values(impl: str) -> None:
    """gamma 0.5, lambda 0.5: delta = (1 + 2 - 2, 0 + 1 - 4, 8 - 2) = (1, -3, 6), then A from the right."""
    rewards, values = torch.tensor([[1.0, 0.0, 8.0]]), torch.tensor([[2.0, 4.0, 2.0]])
    advantages, returns = fastrl.gae(rewards, values, gamma=0.5, lam=0.5, impl=impl)
    assert advantages.tolist() == [[1 - 1.5 / 4, -3 + 6 / 4, 6.0]]
    assert returns.tolist() == [[2.625, 2.5, 8.0]]


def test_hand_worked_hole_of_each_kind(impl: str) -> None:
    """Rewards 1, -, 8 around a masked token; gamma 1, lambda 0.5."""
    rewards, values = torch.tensor([[1.0, 5.0, 8.0]]), torch.tensor([[2.0, 3.0, 2.0]])
    mask = torch.tensor([[1, 0, 1]])
    got = {
        holes: fastrl.gae(
            rewards, values, mask, gamma=1.0, lam=0.5, holes=holes, impl=impl
        ).advantages.tolist()[0]
        for holes in HOLES
    }
    assert got["carry"] == [(1 + 2 - 2) + 0.5 * 6, 0.0, 6.0]  # straight to the next valid token
    # The hole is a step with r = V = 0: its delta is 2, its A is 2 + 0.5 * 6 = 5.
    assert got["zero_step"] == [(1 + 0 - 2) + 0.5 * 5, 0.0, 6.0]
    assert got["ignore"] == [(1 + 3 - 2) + 0.5 * ((5 + 2 - 3) + 0.5 * 6), 0.0, 6.0]


def test_bootstrap_and_dones(impl: str) -> None:
    """The bootstrap enters once, behind the last token; an episode's end keeps everything on its own side."""
    zeros = torch.zeros(1, 3)
    bootstrap = torch.tensor([16.0])
    free = fastrl.gae(zeros, zeros, gamma=0.5, lam=1.0, bootstrap=bootstrap, impl=impl)
    assert free.advantages.tolist() == [[2.0, 4.0, 8.0]]
    cut = fastrl.gae(
        *(zeros, zeros),
        gamma=0.5,
        lam=1.0,
        bootstrap=bootstrap,
        dones=torch.tensor([[0, 1, 0]]),
        impl=impl,
    )
    assert cut.advantages.tolist() == [[0.0, 0.0, 8.0]]


def test_lambda_one_is_return_minus_value_and_lambda_zero_the_td_error(impl: str) -> None:
    rewards, values = inputs((3, 40))
    returns = fastrl.discounted_returns(rewards, gamma=0.9, impl=impl)
    full = fastrl.gae(rewards, values, gamma=0.9, lam=1.0, impl=impl)
    torch.testing.assert_close(full.advantages, returns - values, atol=1e-5, rtol=1e-5)
    next_values = torch.cat([values[:, 1:], torch.zeros(3, 1)], 1)
    td = fastrl.gae(rewards, values, gamma=0.9, lam=0.0, impl=impl).advantages
    torch.testing.assert_close(td, rewards + 0.9 * next_values - values, atol=1e-6, rtol=1e-6)


def test_gae_is_an_affine_scan_of_the_td_errors(impl: str) -> None:
    rewards, values = inputs((2, 37))
    next_values = torch.cat([values[:, 1:], torch.zeros(2, 1)], 1)
    delta = rewards + 0.9 * next_values - values
    scan = fastrl.affine_scan(torch.full_like(delta, 0.9 * 0.8), delta, impl=impl)
    got = fastrl.gae(rewards, values, gamma=0.9, lam=0.8, impl=impl).advantages
    torch.testing.assert_close(got, scan, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_reference(impl: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Every hole rule with every set of options under a mask with holes, and in turn under the other masks."""
    rewards, values = inputs(shape, dtype)
    rows = shape[0]
    dones = torch.rand(shape) < 0.2
    variants: list[dict[str, Any]] = [
        {},
        {"lam": torch.rand(rows), "bootstrap": torch.randn(rows)},
        {"returns_lam": 1.0, "fill": "carry"},
        {"dones": dones, "fill": "carry", "bootstrap": torch.randn(rows)},
        {"dones": dones, "returns_lam": 0.5, "lam": torch.rand(rows)},
        {"gamma": 1.0, "lam": 1.0},
        {"gamma": 0.0},
    ]
    in_turn = itertools.cycle(variants)
    for (name, mask), holes in itertools.product(masks(shape), HOLES):
        for variant in variants if name == "holes" else [next(in_turn)]:
            options = {"gamma": 0.97, "lam": 0.9, "holes": holes} | variant
            got = fastrl.gae(rewards, values, mask, impl=impl, **options)
            for result, expected in zip(got, reference(rewards, values, mask, **options)):
                assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
                assert_close(result, expected, dtype)


def test_mixed_dtypes(impl: str) -> None:
    """Rewards from Python in float32, values from a critic in bfloat16."""
    rewards, values = torch.randn(2, 33), torch.randn(2, 33).to(torch.bfloat16)
    got = fastrl.gae(rewards, values, gamma=0.99, lam=0.95, impl=impl)
    for result, expected in zip(got, reference(rewards, values, gamma=0.99, lam=0.95)):
        assert_close(result, expected, torch.float32)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    density=st.floats(0, 1),
    seed=st.integers(0, 2**20),
)
def test_packed_equals_looped_for_any_lengths(
    lengths: list[int], density: float, seed: int
) -> None:
    torch.manual_seed(seed)
    width = max(lengths)
    rewards, values = inputs((len(lengths), width))
    mask = torch.rand(len(lengths), width) < density
    (r, offsets), (v, _), (m, _) = (pack(x, lengths) for x in (rewards, values, mask))
    packed = fastrl.gae(r, v, m, gamma=0.9, lam=0.9, cu_seqlens=offsets)
    for i, n in enumerate(lengths):
        row = [x[i : i + 1, :n] for x in (rewards, values, mask)]
        alone = fastrl.gae(*row, gamma=0.9, lam=0.9)
        for one, many in zip(alone, packed):
            assert same_bits(one[0], many[int(offsets[i]) : int(offsets[i + 1])])


# ---- rules of DESIGN section 4 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("holes", ["carry", "zero_step"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_rule_1_masked_positions_have_no_influence(impl: str, holes: str, poison: float) -> None:
    rewards, values = inputs((3, 50))
    for _, mask in masks((3, 50)):
        options = {"gamma": 0.9, "lam": 0.8, "holes": holes, "impl": impl}
        clean = fastrl.gae(rewards, values, mask, **options)
        dirty = fastrl.gae(
            poisoned(rewards, mask, poison), poisoned(values, mask, poison), mask, **options
        )
        for a, b in zip(clean, dirty):
            assert same_bits(a, b)


def test_rule_1_masked_gradients_are_exactly_zero(impl: str) -> None:
    mask = torch.rand(3, 50) < 0.6
    rewards, values = (poisoned(x, mask).requires_grad_() for x in inputs((3, 50)))
    out = fastrl.gae(rewards, values, mask, gamma=0.9, lam=0.8, impl=impl)
    (out.advantages.sum() + out.returns.square().sum()).backward()
    for grad in (rewards.grad, values.grad):
        assert grad is not None
        assert torch.all(grad[~mask] == 0)
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_rule_2_empty(impl: str, shape: tuple[int, int]) -> None:
    rewards, values = (torch.zeros(shape, requires_grad=True) for _ in range(2))
    bootstrap = torch.ones(shape[0], requires_grad=True)
    out = fastrl.gae(rewards, values, gamma=0.9, lam=0.8, bootstrap=bootstrap, impl=impl)
    assert out.advantages.shape == shape
    (out.advantages.sum() + out.returns.sum()).backward()
    assert rewards.grad is not None and rewards.grad.shape == shape
    packed = torch.zeros(0)
    empty = fastrl.gae(
        packed, packed, gamma=0.9, lam=0.8, cu_seqlens=torch.tensor([0, 0, 0]), impl=impl
    )
    assert empty.advantages.shape == (0,)


def test_rule_2_all_masked_gives_zeros(impl: str) -> None:
    rewards, values = (torch.full((2, 40), float("nan")) for _ in range(2))
    out = fastrl.gae(rewards, values, torch.zeros(2, 40), gamma=0.9, lam=0.8, impl=impl)
    assert torch.count_nonzero(out.advantages) == 0
    assert torch.count_nonzero(out.returns) == 0


@pytest.mark.parametrize("holes", HOLES)
def test_rule_5_same_bits_for_any_number_of_threads(holes: str) -> None:
    rewards, values = inputs((64, 700))
    mask = torch.rand(64, 700) < 0.7
    options = {"gamma": 0.99, "lam": 0.95, "holes": holes, "impl": "cpu"}
    one, two = (
        with_threads(n, lambda: torch.cat(fastrl.gae(rewards, values, mask, **options)))
        for n in (1, 2)
    )
    assert same_bits(one, two)


def test_rule_5_same_bits_alone_in_a_batch_padded_and_packed(impl: str) -> None:
    """Right padding, left padding and packing of rows with holes, for rows as long as the batch and shorter."""
    length, width = 45, 83
    rewards, values = inputs((3, length))
    mask = torch.rand(3, length) < 0.7
    mask[1, -6:] = False
    options = {"gamma": 0.99, "lam": 0.95, "impl": impl}
    batch = fastrl.gae(rewards, values, mask, **options)
    for i in range(3):
        alone = fastrl.gae(rewards[i : i + 1], values[i : i + 1], mask[i : i + 1], **options)
        assert same_bits(alone.advantages[0], batch.advantages[i])

    nan = torch.full((3, width - length), float("nan"))
    for side in ("left", "right"):
        order = slice(None) if side == "right" else slice(None, None, -1)
        padded = [torch.cat([x, nan][order], 1) for x in (rewards, values)]
        wide_mask = torch.cat([mask, torch.zeros(nan.shape, dtype=torch.bool)][order], 1)
        got = fastrl.gae(*padded, wide_mask, **options)
        start = 0 if side == "right" else width - length
        for x, y in zip(got, batch):
            assert same_bits(x[:, start : start + length], y)

    (r, offsets), (v, _), (m, _) = (pack(x, [length] * 3) for x in (rewards, values, mask))
    for dtype in (torch.int32, torch.int64):
        got = fastrl.gae(r, v, m, cu_seqlens=offsets.to(dtype), **options)
        for x, y in zip(got, batch):
            assert same_bits(x, y.flatten())


def test_rule_5_same_bits_with_thousands_of_tokens_of_padding(impl: str) -> None:
    """More than the 2048 that a thread block of a GPU looks through at once for the end of a row."""
    rewards, values = inputs((2, 4500))
    mask = torch.zeros(2, 4500, dtype=torch.bool)
    mask[0, :37], mask[1, :2300] = True, True
    options = {"gamma": 0.99, "lam": 0.95, "impl": impl}
    got = fastrl.gae(rewards, values, mask, **options)
    for i, length in enumerate((37, 2300)):
        alone = fastrl.gae(rewards[i : i + 1, :length], values[i : i + 1, :length], **options)
        for x, y in zip(got, alone):
            assert same_bits(x[i, :length], y[0])
            assert not x[i, length:].any()


def test_rule_5_same_bits_whether_results_bypass_the_caches(impl: str) -> None:
    """Large results are stored past the caches; halves of the batch are below that size. Rows end anywhere in a line."""
    rewards, values = inputs((258, 8195))
    mask = torch.rand(rewards.shape) < 0.9
    options = {"gamma": 0.99, "lam": 0.95, "impl": impl}
    if impl in (
        "reference",
        "triton",
    ):  # thousands of steps or tiles to interpret, and one kind of store
        rewards, values, mask = (x[:, :64] for x in (rewards, values, mask))
    whole = fastrl.gae(rewards, values, mask, **options)
    halves = [fastrl.gae(*(x[i::2] for x in (rewards, values, mask)), **options) for i in (0, 1)]
    for i, half in enumerate(halves):
        for x, y in zip(half, whole):
            assert same_bits(x, y[i::2])


def test_rule_7_shapes_beyond_2_to_the_31() -> None:
    with FakeTensorMode():
        rewards = torch.empty(2**17, 2**15)
        out = gae_op["cpu"](
            *(rewards, rewards, None, None, None, None, None), 0.9, 0.9, -1.0, 0, False
        )
        assert out[0].numel() == 2**32


def test_rule_8_strides_do_not_matter_and_inputs_are_not_modified(impl: str) -> None:
    rewards, values = inputs((3, 40))
    mask = torch.rand(3, 40) < 0.7
    options = {"gamma": 0.9, "lam": 0.8, "impl": impl}
    expected = fastrl.gae(rewards, values, mask, **options)
    for r, v, m in zip(strided(rewards), strided(values), strided(mask)):
        before = r.clone(), v.clone(), m.clone()
        got = fastrl.gae(r, v, m, **options)
        assert same_bits(got.advantages, expected.advantages)
        assert same_bits(got.returns, expected.returns)
        assert all(same_bits(a, b) for a, b in zip(before, (r, v, m)))
    row = rewards[:1].expand(3, 40)
    torch.testing.assert_close(
        fastrl.gae(row, row, **options).advantages,
        fastrl.gae(row.contiguous(), row.contiguous(), **options).advantages,
    )


def test_rule_8_time_first(impl: str) -> None:
    rewards, values = inputs((3, 40))
    mask, dones = torch.rand(3, 40) < 0.7, torch.rand(3, 40) < 0.1
    options = {"gamma": 0.9, "lam": 0.8, "impl": impl}
    expected = fastrl.gae(rewards, values, mask, dones=dones, **options)
    turned = [x.t().contiguous() for x in (rewards, values, mask)]
    got = fastrl.gae(*turned, dones=dones.t().contiguous(), time_dim=0, **options)
    for x, y in zip(got, expected):
        assert same_bits(x.t(), y)


def test_rule_10_unmasked_nan_reaches_the_result(impl: str) -> None:
    rewards, values = inputs((2, 40))
    rewards[0, 20] = float("nan")
    out = fastrl.gae(rewards, values, gamma=0.9, lam=0.8, impl=impl).advantages
    assert torch.isnan(out[0, 20])
    assert torch.isfinite(out[0, 21:]).all()
    assert torch.isfinite(out[1]).all()


# ---- gradients, compilation, options --------------------------------------------------------------------------------


@pytest.mark.parametrize("holes", HOLES)
@pytest.mark.parametrize("fill", ["zero", "carry"])
def test_gradients_against_reference(impl: str, holes: str, fill: str) -> None:
    shape = (3, 37)
    for _, mask in masks(shape):
        for extra in (
            {},
            {"returns_lam": 0.5},
            {"dones": torch.rand(shape) < 0.2, "lam": torch.rand(3)},
        ):
            options = {"gamma": 0.9, "lam": 0.8, "holes": holes, "fill": fill} | extra
            weights = torch.randn(2, *shape)
            grads = []
            base = (*inputs(shape), torch.randn(3))
            for which, dtype in ((impl, torch.float32), ("reference", torch.float64)):
                leaves = [leaf(x, dtype) for x in base]
                out = fastrl.gae(*leaves[:2], mask, bootstrap=leaves[2], impl=which, **options)
                (torch.stack(out) * weights).sum().backward()
                grads.append([x.grad for x in leaves])
            for got, expected in zip(*grads):
                assert_close(got, expected, torch.float32)


def test_gradcheck_in_double(impl: str) -> None:
    mask = torch.rand(2, 9) < 0.7
    leaves = [torch.randn(2, 9, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    bootstrap = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda r, v, b: tuple(
            fastrl.gae(r, v, mask, gamma=0.9, lam=0.8, returns_lam=0.6, bootstrap=b, impl=impl)
        ),
        (*leaves, bootstrap),
    )


def test_gradient_dtype_is_the_input_dtype(impl: str) -> None:
    rewards = torch.randn(2, 20, requires_grad=True)
    values = torch.randn(2, 20, dtype=torch.bfloat16, requires_grad=True)
    fastrl.gae(rewards, values, gamma=0.9, lam=0.8, impl=impl).returns.sum().backward()
    assert rewards.grad is not None and rewards.grad.dtype == torch.float32
    assert values.grad is not None and values.grad.dtype == torch.bfloat16


def test_no_graph_without_need(impl: str) -> None:
    rewards, values = (x.requires_grad_() for x in inputs((2, 8)))
    with torch.no_grad():
        out = fastrl.gae(rewards, values, gamma=0.9, lam=0.8, impl=impl)
    assert not out.advantages.requires_grad


def test_out_is_written_and_returned(impl: str) -> None:
    rewards, values = inputs((3, 50))
    mask = torch.rand(3, 50) < 0.5
    expected = fastrl.gae(rewards, values, mask, gamma=0.9, lam=0.8, impl=impl)
    out = (torch.full((3, 50), float("nan")), torch.full((3, 50), float("nan")))
    got = fastrl.gae(rewards, values, mask, gamma=0.9, lam=0.8, out=out, impl=impl)
    assert got.advantages is out[0]
    for x, y in zip(got, expected):
        assert same_bits(x, y)


def test_opcheck() -> None:
    rewards, values = inputs((3, 20))
    mask, bootstrap = torch.rand(3, 20) < 0.5, torch.randn(3)
    torch.library.opcheck(
        gae_op["cpu"], (rewards, values, mask, None, bootstrap, None, None, 0.9, 0.8, 0.5, 0, True)
    )
    offsets = torch.tensor([0, 20, 45, 60])
    flat = (rewards.flatten(), values.flatten(), mask.flatten())
    torch.library.opcheck(
        gae_op["cpu"], (*flat, None, None, torch.rand(3), offsets, 0.9, 1.0, -1.0, 1, False)
    )
    out = (torch.empty(3, 20), torch.empty(3, 20))
    torch.library.opcheck(
        torch.ops.fastrl.gae_out.default,
        (rewards, values, None, None, None, None, None, 0.9, 0.8, -1.0, 0, False, *out),
    )
    torch.library.opcheck(
        gae_backward_op["cpu"], (rewards, values, mask, None, None, None, 0.9, 0.8, -1.0, 0)
    )
    torch.library.opcheck(
        gae_backward_op["cpu"], (rewards, None, mask, None, None, None, 0.9, 1.0, -1.0, 0)
    )


def test_compile_fullgraph_with_dynamic_lengths() -> None:
    compiles = CompileCounter()

    def loss(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        out = fastrl.gae(rewards, values, mask, gamma=0.9, lam=0.8)
        return (out.advantages * out.returns).sum()

    torch._dynamo.reset()
    counted = torch.compile(loss, fullgraph=True, dynamic=True, backend=compiles)
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 30), (3, 17), (4, 55)):
        rewards, values = (x.requires_grad_() for x in inputs(shape))
        mask = torch.rand(shape) < 0.5
        counted(rewards, values, mask)
        got = torch.autograd.grad(compiled(rewards, values, mask), (rewards, values))
        expected = torch.autograd.grad(loss(rewards, values, mask), (rewards, values))
        for x, y in zip(got, expected):
            torch.testing.assert_close(x, y)
    assert compiles.frame_count == 1


def test_errors_name_op_argument_expected_got_and_remedy() -> None:
    r, v = torch.zeros(2, 5), torch.zeros(2, 5)
    cases: list[tuple[str, Any]] = [
        (r"gae: values must have the shape of rewards, \[2, 5\], got \[2, 4\]", lambda: fastrl.gae(r, v[:, :4], gamma=1, lam=1)),
        (r"gae: rewards must be \[B, T\], or \[N\] with cu_seqlens, got \[5\]; .*unsqueeze", lambda: fastrl.gae(r[0], v[0], gamma=1, lam=1)),
        (r"gae: rewards must be float32.*got torch.int64; convert it", lambda: fastrl.gae(r.long(), v, gamma=1, lam=1)),
        (r"gae: gamma must be a finite number in \[0, 1\], got 1.5", lambda: fastrl.gae(r, v, gamma=1.5, lam=1)),
        (r"gae: lam must have the shape of one value per row, \[2\], got \[3\]", lambda: fastrl.gae(r, v, gamma=1, lam=torch.ones(3))),
        (r"gae: holes must be one of 'carry', 'zero_step', 'ignore', got 'skip'", lambda: fastrl.gae(r, v, gamma=1, lam=1, holes="skip")),
        (r"gae: mask must have the shape of rewards", lambda: fastrl.gae(r, v, torch.ones(2, 4), gamma=1, lam=1)),
        (r"gae: rewards and values must both be float64 or neither", lambda: fastrl.gae(r, v.double(), gamma=1, lam=1)),
        (r"gae: cu_seqlens must start at 0 and end at the number of tokens, 5, got 0 and 4", lambda: fastrl.gae(r[0], v[0], gamma=1, lam=1, cu_seqlens=torch.tensor([0, 4]))),
        (r"gae: cu_seqlens must not decrease", lambda: fastrl.gae(r[0], v[0], gamma=1, lam=1, cu_seqlens=torch.tensor([0, 4, 2, 5]))),
        (r"gae: out\[0\] must be contiguous torch.float32", lambda: fastrl.gae(r, v, gamma=1, lam=1, out=(r.double(), v))),
        (r"gae: impl='cuda' cannot run.*available on cpu: .*reference", lambda: fastrl.gae(r, v, gamma=1, lam=1, impl="cuda")),
        (r"gae: impl must be one of auto, cpu, cuda, triton, reference, got 'fast'", lambda: fastrl.gae(r, v, gamma=1, lam=1, impl="fast")),
    ]  # fmt: skip
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match=r"gae: rewards must be a torch.Tensor, got list"):
        fastrl.gae([1.0], v, gamma=1, lam=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"gae: gamma must be a number, got str"):
        fastrl.gae(r, v, gamma="1", lam=1)  # type: ignore[arg-type]


def test_direct_calls_of_the_operator_are_checked() -> None:
    """Whoever goes past the Python checks gets an error, not a read out of bounds."""
    r = torch.zeros(5)
    bad = (
        torch.tensor([0, 9]),
        torch.tensor([0, 3, 1, 5]),
        torch.tensor([1, 5]),
        torch.tensor([0.0, 5.0]),
    )
    for offsets in bad:
        with pytest.raises(RuntimeError, match="cu_seqlens"):
            gae_op["cpu"](*(r, r, None, None, None, None, offsets), 0.9, 0.9, -1.0, 0, False)
    with pytest.raises(RuntimeError, match="values has another shape"):
        gae_op["cpu"](
            *(r, r[:4], None, None, None, None, torch.tensor([0, 5])), 0.9, 0.9, -1.0, 0, False
        )
