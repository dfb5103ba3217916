"""safetensors files in the making: tensors are appended as they come, and the sizes known before.

A header comes before the data but is known only after it. Each file therefore starts with a room
for its header, filled in at the end and padded with spaces, which the format allows; a shard ends
when its size or that room is used up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quasar.checkpoints.hf import DTYPES

SHARD_BYTES = 4 << 30
_HEADER_ROOM = 1 << 18
"""Bytes a shard, its length field included: about 2,000 tensors."""
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Header = dict[str, Any]
"""Tensors by name, as safetensors describes them."""


class Layout:
    """Which tensors a shard holds and where: no data."""

    def __init__(self, header: Mapping[str, Any] | None = None) -> None:
        self.header: Header = {}
        self.nbytes = 0
        self._room = _HEADER_ROOM - 8 - len('{"__metadata__":{"format":"pt"}}')
        for name, entry in (header or {}).items():
            self._add(name, entry)

    @property
    def file_bytes(self) -> int:
        return _HEADER_ROOM + self.nbytes

    def is_full(self, name: str, tensor: Tensor, limit: int) -> bool:
        """Out of space, out of header, or at an address where readers cannot map the tensor."""
        entry_bytes = len(json.dumps(name)) + 200
        unaligned = self.nbytes % tensor.dtype.itemsize != 0
        full = self.nbytes + tensor.nbytes > limit or entry_bytes > self._room
        return self.nbytes > 0 and (full or unaligned)

    def append(self, name: str, tensor: Tensor) -> None:
        entry = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.nbytes, self.nbytes + tensor.nbytes],
        }
        self._add(name, entry)

    def _add(self, name: str, entry: Mapping[str, Any]) -> None:
        self._room -= len(json.dumps({name: entry}).encode())
        self.header[name] = dict(entry)
        self.nbytes = int(entry["data_offsets"][1])


def plan(tensors: Iterable[tuple[str, Tensor]], limit: int = SHARD_BYTES) -> list[int]:
    """The size in bytes of each shard file; tensors without data (device `meta`) will do."""
    shards: list[Layout] = []
    for name, tensor in tensors:
        if not shards or shards[-1].is_full(name, tensor, limit):
            shards.append(Layout())
        shards[-1].append(name, tensor)
    return [shard.file_bytes for shard in shards]


class Shard:
    """One safetensors file in the making."""

    def __init__(self, path: Path, header: Mapping[str, Any] | None = None) -> None:
        """A new file, or with `header` one of which at least this much is there: the rest goes."""
        self.path, self.layout = path, Layout(header)
        self.file = path.open("wb" if header is None else "r+b")
        if header is None:
            self.file.write(b" " * _HEADER_ROOM)
            return
        end = self.layout.file_bytes
        if self.file.seek(0, os.SEEK_END) < end:
            self.file.close()
            raise ValueError(f"{path} is shorter than what it holds")
        self.file.truncate(end)
        self.file.seek(end)

    def append(self, name: str, tensor: Tensor) -> None:
        """Its bytes are on their way to disk when this returns."""
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        self.file.write(data.data)
        self.layout.append(name, tensor)

    def sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def finish(self) -> None:
        """Write the header; the file is complete then."""
        header = {"__metadata__": {"format": "pt"}, **self.layout.header}
        text = json.dumps(header, separators=(",", ":")).encode()
        self.file.seek(0)
        self.file.write((_HEADER_ROOM - 8).to_bytes(8, "little"))
        self.file.write(text.ljust(_HEADER_ROOM - 8))
        self.file.close()
