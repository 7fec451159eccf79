"""Bytes that kernels of the checked build load from and store to global memory."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from torch import Tensor


class Traffic(NamedTuple):
    """Sums over all warps of all launches; ``distinct`` counts a byte once however often it is touched.

    Lanes of a warp that load the same address at the same time load it once.
    """

    loaded: int
    stored: int
    distinct_loaded: int
    distinct_stored: int
    accesses: int
    wide_accesses: int  # of 16 bytes

    @property
    def moved(self) -> int:
        return self.loaded + self.stored


class Meter:
    """Counts from its making on, over all of global memory and over each of some named tensors."""

    def __init__(self, kernels: ctypes.CDLL, **tensors: Tensor) -> None:
        self._kernels = kernels
        self._names = list(tensors)
        kernels.cuda_on_host_reset_traffic()
        for tensor in tensors.values():
            size = ctypes.c_size_t(tensor.numel() * tensor.element_size())
            kernels.cuda_on_host_watch(ctypes.c_void_p(tensor.data_ptr()), size)

    def total(self) -> Traffic:
        return self._read(-1)

    def of(self, name: str) -> Traffic:
        return self._read(self._names.index(name))

    def _read(self, buffer: int) -> Traffic:
        counts = (ctypes.c_uint64 * len(Traffic._fields))()
        self._kernels.cuda_on_host_read_traffic(buffer, counts)
        return Traffic(*counts)
