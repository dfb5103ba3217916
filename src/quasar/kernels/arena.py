"""Memory for packed weights and caches: 2 MiB-aligned, on huge pages.

A pass reads every weight once, in order. With 4 KiB pages each 4 KiB costs a page walk and stops
the hardware prefetcher; with huge pages neither happens.
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
CACHE_LINE = 64


def huge_bytes(nbytes: int) -> Tensor:
    """A zeroed uint8 tensor [nbytes] at a 2 MiB boundary. Pages are taken when first written."""
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=-address % HUGE_PAGE)


class Arena:
    """Slices of large chunks, handed out in order and never taken back one by one.

    A chunk is unmapped when the last tensor that lies in it is gone.
    """

    def __init__(self, chunk_bytes: int = 64 << 20) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, nbytes: int) -> Tensor:
        """A uint8 tensor [nbytes] that starts at a cache line."""
        if self._used + nbytes > self._chunk.numel():
            self._chunk = huge_bytes(max(nbytes, self._chunk_bytes))
            self._used = 0
        begin = self._used
        self._used += -(-nbytes // CACHE_LINE) * CACHE_LINE
        return self._chunk[begin : begin + nbytes]
