# SPDX-License-Identifier: Apache-2.0
"""Memory that parameters are read into: in its final shape, aligned, given back in parts."""

from __future__ import annotations

import mmap

import numpy as np

ALIGNMENT = 64
"""Bytes: what XLA's CPU backend asks of a buffer that it is to use without a copy."""

MAPPED_BYTES = 1 << 20
"""Buffers from this size on are mappings of their own, whose pages can be given back."""


class Buffer:
    """Uninitialised one-dimensional memory that begins at a multiple of `ALIGNMENT`."""

    def __init__(self, size: int, dtype: np.dtype) -> None:
        self._map: mmap.mmap | None = None
        nbytes = size * dtype.itemsize
        if nbytes >= MAPPED_BYTES:
            self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                # 512 times fewer page faults; they cost more than the copy from the page cache.
                self._map.madvise(mmap.MADV_HUGEPAGE)
            self.array = np.frombuffer(self._map, dtype)
        else:
            raw = np.empty(nbytes + ALIGNMENT, np.uint8)
            start = -raw.ctypes.data % ALIGNMENT
            self.array = raw[start : start + nbytes].view(dtype)

    def give_back(self, begin: int, end: int) -> None:
        """Return the memory of elements `begin` to `end` to the system, as far as it is whole
        pages; their values are lost."""
        if self._map is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        item, page = self.array.itemsize, mmap.PAGESIZE
        first = -(-begin * item // page) * page
        last = end * item // page * page if end < self.array.size else end * item
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
