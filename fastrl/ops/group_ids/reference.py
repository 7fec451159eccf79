"""The definition of group ids: a dict from label to number, filled by first appearance."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from fastrl.errors import ArgumentError, ArgumentTypeError


def group_ids_reference(labels: Sequence[Hashable]) -> Tensor:
    """Dense ids of any hashable labels, int64 ``[N]``; raises for labels that no dict can tell apart."""
    seen: dict[Hashable, int] = {}
    ids = []
    for index, label in enumerate(labels):
        if isinstance(label, Tensor):  # hashable, but by identity: equal values would not meet
            raise ArgumentTypeError(
                f"group_ids: labels[{index}] must be a plain value, got a tensor; "
                "pass one tensor of all labels, or label.item()"
            )
        try:
            known = seen.get(label)
        except TypeError as error:
            raise ArgumentTypeError(
                f"group_ids: labels[{index}] must be hashable, got {type(label).__name__}; "
                "convert it, for example to a tuple or a string"
            ) from error
        if known is None:
            if label != label:
                raise ArgumentError(
                    f"group_ids: labels[{index}] must equal itself, got {label!r}; "
                    "replace missing labels, for example by a unique string each"
                )
            known = seen[label] = len(seen)
        ids.append(known)
    return torch.tensor(ids, dtype=torch.int64)
