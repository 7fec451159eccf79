"""``fastrl.group_ids``: dense integer ids for any hashable labels."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastrl import _library
from fastrl.errors import ArgumentError, ArgumentTypeError
from fastrl.ops.group_ids.reference import group_ids_reference

if _library.compiled_error is None:
    from fastrl import _C


def group_ids(labels: Tensor | np.ndarray[Any, Any] | Sequence[Hashable]) -> Tensor:
    """Number the distinct labels 0, 1, 2, ... in the order in which they first appear.

    Two labels are the same when Python's ``==`` and ``hash`` say so, as keys of a dict: ``"007"`` and ``"7"`` differ, 1
    and 1.0 and True do not, and 0.0 equals -0.0. Nothing is parsed as a number; ids never depend on the size of a label.

    Args:
        labels: N labels: a list or tuple of hashable values (uuid strings, ints, tuples, ...), a numpy array of objects,
            strings, bytes, integers, floats or bools, or an integer, bool or floating tensor.

    Returns:
        int64 ``[N]``, on the device of the labels if they are a tensor, otherwise on CPU.

    Raises:
        ValueError: labels are not one-dimensional, or one is NaN (it equals nothing, so it has no group).
        TypeError: labels are no sequence, or one is not hashable; the message names its index.

    Deterministic; the work is on CPU whatever the device of the labels, so a GPU tensor is waited for.

    Source: pandas ``factorize`` without its conversions; verl 0.9.1 ``as_torch_index`` uses numeric labels as they are.

    >>> fastrl.group_ids(["b", "a", "b", "7", "007"])
    tensor([0, 1, 0, 2, 3])
    """
    if isinstance(labels, Tensor):
        return _ids_of_array(_tensor_to_numpy(labels)).to(labels.device)
    if isinstance(labels, np.ndarray):
        return _ids_of_array(labels)
    if not isinstance(labels, (list, tuple)):
        is_text = isinstance(labels, (str, bytes, Mapping))
        if is_text or not (hasattr(labels, "__len__") and hasattr(labels, "__getitem__")):
            raise ArgumentTypeError(
                f"group_ids: labels must be a sequence with one label per sample, got {type(labels).__name__}; "
                "pass a list"
            )
        labels = list(labels)
    return _compiled_or_reference(labels, labels)


def _tensor_to_numpy(labels: Tensor) -> np.ndarray[Any, Any]:
    if labels.dtype.is_complex:
        raise ArgumentError(
            f"group_ids: labels must be integer, bool or floating, got {labels.dtype}; pass labels.tolist()"
        )
    labels = labels.detach().cpu()
    # numpy lacks the narrow floats; float64 holds each of their values
    return (labels.double() if labels.dtype.is_floating_point else labels).numpy()


def _ids_of_array(labels: np.ndarray[Any, Any]) -> Tensor:
    if labels.ndim != 1:
        raise ArgumentError(
            f"group_ids: labels must be one-dimensional, [N], got {list(labels.shape)}; "
            "pass one label per sample"
        )
    keys = labels
    if labels.dtype.kind in "biu":
        keys = labels.astype(
            np.int64, copy=False
        )  # uint64 wraps around, which keeps distinct values distinct
    elif labels.dtype.kind == "f" and labels.dtype.itemsize <= 8:
        values = labels.astype(np.float64) + 0.0  # -0.0 becomes 0.0: equal numbers, equal bits
        nan = np.flatnonzero(np.isnan(values))
        if nan.size == 0:
            keys = values.view(np.int64)
    return _compiled_or_reference(np.ascontiguousarray(keys), labels)


def _compiled_or_reference(keys: Any, labels: Any) -> Tensor:
    """The compiled routine knows strings and integers; it returns None for whatever else a dict can hold."""
    if _library.compiled_error is None:
        ids = _C.group_ids(keys)
        if ids is not None:
            return torch.from_numpy(ids)
    # object arrays hold the labels themselves; other arrays become numpy scalars, which hash like Python's numbers
    return group_ids_reference(list(labels))
