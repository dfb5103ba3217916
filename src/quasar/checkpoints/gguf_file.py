"""The GGUF container: typed metadata and a table of tensors, read from a file nobody vouches for.

Layout (little-endian): magic "GGUF", version u32, tensor count u64, metadata count u64; metadata
entries (key string, type u32, value); tensor entries (name string, dimensions u32, sizes u64 each,
fastest first, type u32, offset u64); data, padded to `general.alignment`, that the offsets count
from. A string is a u64 length and UTF-8 bytes; an array is an element type u32, a u64 length and
its elements. Every length is compared with the bytes that are left before anything is allocated.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from quasar.checkpoints.mapping import MappedFile
from quasar.errors import CheckpointError
from quasar.files import SPARE_BYTES

_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_FLOAT, _STRING, _ARRAY = 6, 8, 9
_MAX_ELEMENTS = 1 << 40
_NUMBER, _TEXT, _TENSOR = 40, 64, 400
"""Bytes of a list's number, of an empty text and of a tensor's entry as Python objects."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the table. `shape` is torch's order: rows first."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    """From the start of the file."""
    nbytes: int


class GgufFile:
    """A GGUF file of version 2 or 3: `metadata` and `tensors` by name."""

    def __init__(self, path: Path) -> None:
        self.map = MappedFile(path)
        self._position = 0
        self._room = 2 * self.map.size + SPARE_BYTES
        """Bytes that may yet be made of the metadata."""
        try:
            self.metadata, self.tensors = self._parse()
        except UnicodeDecodeError as error:
            raise self._malformed(f"a name or text is not UTF-8 ({error.reason})") from None

    def _parse(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        magic, version, tensor_count, entry_count = self._take("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise self._malformed(f"version {version} is not supported (2 and 3 are)")
        self._expect(entry_count, 13, _TENSOR, "metadata entries")
        self._expect(tensor_count, 32, _TENSOR, "tensors")
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self._string()
            if key in metadata:
                raise self._malformed(f"metadata key {key!r} appears twice")
            metadata[key] = self._value(key)
        infos = [self._info() for _ in range(tensor_count)]
        return metadata, self._place(infos, metadata.get("general.alignment", 32))

    def _value(self, key: str) -> Any:
        kind = self._take("I")[0]
        if kind == _STRING:
            return self._string()
        if kind == _FLOAT:
            # The shortest decimal of this fp32 is what its author wrote: 1e-05, not 9.99999974e-06.
            return float(str(np.float32(self._take("f")[0])))
        if kind != _ARRAY:
            return self._take(self._format(kind, key))[0]
        kind, count = self._take("IQ")
        if kind == _STRING:
            self._expect(count, 8, _TEXT, f"strings of {key!r}")
            return self._strings(count)
        code = self._format(kind, key)
        self._expect(count, struct.calcsize(code), _NUMBER, f"elements of {key!r}")
        values = np.frombuffer(self._bytes(count * struct.calcsize(code)), np.dtype("<" + code))
        return values.tolist()

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._take("I")[0]
        if not 1 <= dimensions <= 4:
            raise self._malformed(f"tensor {name!r} has {dimensions} dimensions")
        shape = self._take(f"{dimensions}Q")[::-1]
        kind, offset = self._take("IQ")
        return name, shape, kind, offset

    def _place(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: Any
    ) -> dict[str, TensorInfo]:
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment % 8:
            raise self._malformed(f"general.alignment is {alignment!r}")
        start = -(-self._position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        end = 0
        for name, shape, kind, offset in sorted(infos, key=lambda info: info[3]):
            if name in tensors:
                raise self._malformed(f"tensor {name!r} appears twice")
            if offset < end or offset % alignment:
                raise self._malformed(f"tensor {name!r} overlaps another or is not aligned")
            tensors[name] = info = self._sized(name, shape, kind, start + offset)
            end = offset + info.nbytes
        return {name: tensors[name] for name, *_ in infos}

    def _sized(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        if kind not in GGML_QUANT_SIZES:
            raise self._malformed(f"tensor {name!r} has unknown type {kind}")
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        elements = math.prod(shape)
        if not 0 < elements <= _MAX_ELEMENTS or shape[-1] % block:
            raise self._malformed(f"tensor {name!r} has the impossible shape {list(shape)}")
        nbytes = elements // block * size
        if offset + nbytes > self.map.size:
            raise CheckpointError(
                f"{self.map.path} is truncated: tensor {name!r} ends at byte {offset + nbytes} "
                f"of {self.map.size}"
            )
        return TensorInfo(shape, GGMLQuantizationType(kind), offset, nbytes)

    def _format(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise self._malformed(f"metadata key {key!r} has unknown type {kind}")
        return _SCALARS[kind]

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """Vocabularies are most of the reading time."""
        read, position, result = self.map.read, self._position, []
        for _ in range(count):
            length = int.from_bytes(read(position, 8), "little")
            data = read(position + 8, length)
            if not data.isascii():  # one rare character makes each of the text take four bytes
                self._spend(4 * length)
            result.append(data.decode())
            position += 8 + length
        self._position = position
        return result

    def _take(self, code: str) -> tuple[Any, ...]:
        return struct.unpack("<" + code, self._bytes(struct.calcsize("<" + code)))

    def _bytes(self, length: int) -> bytes:
        data = self.map.read(self._position, length)
        self._position += length
        return data

    def _expect(self, count: int, size: int, made: int, what: str) -> None:
        """`count` things of `size` bytes in the file and `made` in memory, at least."""
        left = self.map.size - self._position
        if count * size > left:
            raise self._malformed(f"{count} {what} cannot fit in the {left} bytes left")
        self._spend(count * made)

    def _spend(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise self._malformed("its metadata would take more memory than twice the file")

    def _malformed(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.map.path} is truncated or malformed: {why}")
