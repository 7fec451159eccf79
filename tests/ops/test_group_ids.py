"""``fastrl.group_ids``: a dict from label to number is the definition, for every kind of labels."""

from __future__ import annotations

import random
import uuid
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastrl
from fastrl import _library
from fastrl.errors import FastrlError
from fastrl.ops.group_ids import api
from fastrl.ops.group_ids.reference import group_ids_reference


@pytest.fixture(params=["compiled", "dict"], autouse=True)
def _with_and_without_the_compiled_module(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.param == "compiled" and _library.compiled_error is not None:
        pytest.skip(f"fastrl._C is not loaded: {_library.compiled_error}")
    if request.param == "dict":
        monkeypatch.setattr(api._library, "compiled_error", "disabled by the test")


def by_dict(labels: Any) -> list[int]:
    seen: dict[Any, int] = {}
    return [seen.setdefault(label, len(seen)) for label in labels]


def copied(text: str) -> str:
    """An equal string at another address."""
    return (text + ".")[:-1]


def test_hand_worked() -> None:
    ids = fastrl.group_ids(["b", "a", "b", "c", "a"])
    assert ids.tolist() == [0, 1, 0, 2, 1]
    assert ids.dtype == torch.int64
    assert ids.device.type == "cpu"


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["007", "7", "7.0", "7"], [0, 1, 2, 1]),
        ([7, "7", 7.0, True, 1, None], [0, 1, 0, 2, 2, 3]),
        ([1.2, 1.7, 1.2], [0, 1, 0]),
        ([-1, 10**9, -1, 2**62, -(2**63)], [0, 1, 0, 2, 3]),
        ([2**64, 1, 2**64, -(2**70)], [0, 1, 0, 2]),
        ([("uid", 1), ("uid", 2), ("uid", 1)], [0, 1, 0]),
        (["", "a", "", "\x00", "a\x00"], [0, 1, 0, 2, 3]),
        (["é", "e", "日本", "é", "😀", "日本"], [0, 1, 2, 0, 3, 2]),
        ([b"a", "a", b"a"], [0, 1, 0]),
        ((1, 2, 1), [0, 1, 0]),
        (range(3, 0, -1), [0, 1, 2]),
    ],
)
def test_nothing_is_coerced(labels: Any, expected: list[int]) -> None:
    """verl's as_torch_index merges "007" with "7", truncates 1.2 and 1.7, and indexes by negative labels."""
    assert fastrl.group_ids(labels).tolist() == expected == by_dict(labels)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint64, ">i4", bool])
def test_integer_arrays(dtype: Any) -> None:
    labels = np.array([3, 0, 3, 1, 0, 2], dtype=dtype)
    assert fastrl.group_ids(labels).tolist() == by_dict(labels.tolist())


def test_integers_wider_than_int64_stay_apart() -> None:
    labels = np.array([2**64 - 1, 0, 2**63, 2**64 - 1], dtype=np.uint64)
    assert fastrl.group_ids(labels).tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble])
def test_float_arrays(dtype: Any) -> None:
    labels = np.array([0.5, -0.0, 0.0, np.inf, 0.5, -np.inf], dtype=dtype)
    assert fastrl.group_ids(labels).tolist() == [0, 1, 1, 2, 0, 3]


@pytest.mark.parametrize("kind", ["U", "S", object])
def test_string_arrays(kind: Any) -> None:
    labels = np.array(["bb", "a", "bb", "", "a", "abc"]).astype(kind)
    assert fastrl.group_ids(labels).tolist() == [0, 1, 0, 2, 1, 3]
    assert fastrl.group_ids(labels[::2]).tolist() == [0, 0, 1]
    assert fastrl.group_ids(labels.tolist()).tolist() == [0, 1, 0, 2, 1, 3]
    assert fastrl.group_ids(list(labels)).tolist() == [0, 1, 0, 2, 1, 3]


def test_other_arrays() -> None:
    days = np.array(["2026-01-02", "2026-01-01", "2026-01-02"], dtype="datetime64[D]")
    assert fastrl.group_ids(days).tolist() == [0, 1, 0]
    mixed = np.array([1, "1", None, 1.0, ("a", 2), None], dtype=object)
    assert fastrl.group_ids(mixed).tolist() == [0, 1, 2, 0, 3, 2]


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.half],
)
def test_tensors(dtype: torch.dtype) -> None:
    labels = torch.tensor([3, 0, 3, 1, 0, 2]).to(dtype)
    ids = fastrl.group_ids(labels)
    assert ids.tolist() == by_dict(labels.tolist())
    assert ids.device == labels.device
    assert fastrl.group_ids(labels[::2]).tolist() == by_dict(labels[::2].tolist())
    if dtype.is_floating_point:
        assert fastrl.group_ids(labels.requires_grad_()).tolist() == ids.tolist()


def test_float_tensor_labels_are_compared_exactly() -> None:
    labels = torch.tensor([1.25, 1.5, -0.0, 1.25, 0.0])
    assert fastrl.group_ids(labels).tolist() == [0, 1, 2, 0, 2]


@pytest.mark.parametrize("labels", [[], (), np.array([]), np.array([], object), torch.tensor([])])
def test_rule_2_empty(labels: Any) -> None:
    ids = fastrl.group_ids(labels)
    assert ids.shape == (0,)
    assert ids.dtype == torch.int64


def test_many_strings_in_any_order_and_at_any_address() -> None:
    """Past several doublings of the table, equal strings shared, copied and shuffled."""
    prompts = [str(uuid.UUID(int=random.Random(i).getrandbits(128))) for i in range(3000)]
    labels = [label for label in prompts for _ in range(3)]
    labels += [copied(label) for label in labels]
    assert fastrl.group_ids(labels).tolist() == by_dict(labels)
    random.Random(0).shuffle(labels)
    assert fastrl.group_ids(labels).tolist() == by_dict(labels)
    assert fastrl.group_ids(np.array(labels)).tolist() == by_dict(labels)
    assert fastrl.group_ids(np.array(labels, object)).tolist() == by_dict(labels)


@pytest.mark.parametrize("length", [*range(0, 35), 63, 64, 65, 200])
def test_strings_that_differ_in_one_character(length: int) -> None:
    base = "x" * length
    labels = [base, *(base[:i] + "y" + base[i + 1 :] for i in range(length)), copied(base)]
    assert fastrl.group_ids(labels).tolist() == by_dict(labels)


def test_sparse_integers_use_no_memory_by_value() -> None:
    labels = torch.arange(5000).repeat(2) * 10**14 - 10**17
    assert fastrl.group_ids(labels).tolist() == list(range(5000)) * 2


anything = st.one_of(
    st.text(max_size=5),
    st.integers(),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.tuples(st.integers(0, 2), st.text(max_size=2)),
)


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.lists(anything), st.lists(st.text(max_size=3)), st.lists(st.integers(-3, 3))))
def test_any_labels_against_a_dict(labels: list[Any]) -> None:
    assert fastrl.group_ids(labels).tolist() == by_dict(labels)
    array = np.empty(len(labels), dtype=object)
    array[:] = labels
    assert fastrl.group_ids(array).tolist() == by_dict(labels)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60))
def test_any_integers_against_a_dict(labels: list[int]) -> None:
    assert fastrl.group_ids(torch.tensor(labels, dtype=torch.int64)).tolist() == by_dict(labels)


def test_the_definition_is_the_dict() -> None:
    labels = ["b", 1, "b", None, 1.0]
    assert group_ids_reference(labels).tolist() == by_dict(labels)


def test_labels_are_left_alone() -> None:
    labels: list[Any] = ["a", "b", "a"]
    array, tensor = np.array([0.0, -0.0]), torch.tensor([0.0, -0.0])
    for x in (labels, array, tensor):
        fastrl.group_ids(x)
    assert labels == ["a", "b", "a"]
    assert np.signbit(array).tolist() == [False, True]
    assert torch.signbit(tensor).tolist() == [False, True]


class Unhashable:
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        ([1.0, float("nan")], ValueError, r"group_ids: labels\[1\] must equal itself, got nan; replace"),
        (np.array([1.0, np.nan]), ValueError, r"labels\[1\] must equal itself"),
        (np.array(["a", float("nan")], dtype=object), ValueError, r"labels\[1\] must equal itself"),
        (np.array(["NaT"], dtype="datetime64[D]"), ValueError, r"labels\[0\] must equal itself"),
        (torch.tensor([float("nan")]), ValueError, r"labels\[0\] must equal itself"),
        (["a", ["b"]], TypeError, r"group_ids: labels\[1\] must be hashable, got list; convert it"),
        ([1, 2, Unhashable()], TypeError, r"labels\[2\] must be hashable, got Unhashable"),
        ([torch.tensor(1)], TypeError, r"labels\[0\] must be a plain value, got a tensor; .*item"),
        (np.zeros((2, 2), int), ValueError, r"must be one-dimensional, \[N\], got \[2, 2\]; pass one"),
        (torch.zeros(2, 2), ValueError, r"must be one-dimensional, \[N\], got \[2, 2\]"),
        (torch.tensor(3), ValueError, r"must be one-dimensional, \[N\], got \[\]"),
        (torch.zeros(2, dtype=torch.complex64), ValueError, r"got torch.complex64; pass labels.tolist"),
        ("abc", TypeError, r"must be a sequence with one label per sample, got str; pass a list"),
        ({"a": 1}, TypeError, r"got dict; pass a list"),
        (iter("abc"), TypeError, r"got str_(ascii_)?iterator; pass a list"),
        (5, TypeError, r"got int; pass a list"),
    ],
)  # fmt: skip
def test_errors_name_op_argument_expected_got_and_remedy(
    labels: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        fastrl.group_ids(labels)
    assert isinstance(caught.value, FastrlError)
