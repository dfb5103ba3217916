"""A file mapped into memory, every access checked against its size."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from quasar.errors import CheckpointError
from quasar.files import open_regular

# Python 3.13 names it; without it a copy-on-write map of a model larger than RAM is refused.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_CHUNK = 64 << 20


class MappedFile:
    """A whole file as bytes, mapped copy-on-write: the file itself can never be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size == 0:
                    raise CheckpointError(f"{path} is empty")
                self._map = mmap.mmap(
                    file.fileno(),
                    self.size,
                    flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                )
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from None
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def read(self, offset: int, length: int) -> bytes:
        """A copy of `length` bytes."""
        self._check(offset, length)
        return self._map[offset : offset + length]

    def view(self, offset: int, length: int) -> Tensor:
        """[length] uint8, a view of the map."""
        self._check(offset, length)
        return self._bytes[offset : offset + length]

    def chunks(self) -> Iterator[memoryview]:
        """The file from start to end, without keeping it in memory."""
        with memoryview(self._map) as whole:
            for start in range(0, self.size, _CHUNK):
                yield whole[start : start + _CHUNK]
                self.release()

    def release(self) -> None:
        """Give the pages back; they are read from the file again when touched."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def _check(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise CheckpointError(
                f"{self.path} is truncated or malformed: bytes {offset}..{offset + length} "
                f"lie outside its {self.size} bytes"
            )
