"""A faster scan for Triton's interpreter, which combines element by element: a tile of 512 would take a second."""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime import interpreter


def speed_up_scans() -> None:
    """Combine at distances 1, 2, 4, ... over whole tiles: as a GPU does within a warp, and from one end likewise."""

    def generic_scan(self: Any, tensors: tuple[Any, ...]) -> list[Any]:
        arrays, dtypes = [t.handle.data for t in tensors], [t.dtype for t in tensors]
        length, distance = arrays[0].shape[self.axis], 1
        position = np.arange(length).reshape(
            [length if d == self.axis else 1 for d in range(arrays[0].ndim)]
        )
        while distance < length:
            before = [np.roll(x, distance, self.axis) for x in arrays]
            operands = [self.to_tensor(x, t) for x, t in zip(before + arrays, dtypes * 2)]
            combined = self.combine_fn.fn(*operands)
            combined = combined if isinstance(combined, tuple) else (combined,)
            arrays = [
                np.where(position < distance, x, c.handle.data) for x, c in zip(arrays, combined)
            ]
            distance *= 2
        return [self.to_tensor(x, t) for x, t in zip(arrays, dtypes)]

    interpreter.ScanOps.generic_scan = generic_scan
