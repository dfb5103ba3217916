"""Writing a model folder: one tensor in memory at a time, and all or nothing.

Everything goes into a hidden folder beside the target, is synced, and becomes the target by one
rename. The hidden folder is locked while in use: what a killed run left behind is cleared by the
next one, and two runs cannot write the same target.

A safetensors header comes before the data but is known only after it. Each shard therefore starts
with a room for its header, filled in at the end and padded with spaces, which the format allows; a
shard ends when its size or that room is used up.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from quasar.checkpoints.hf import DTYPES, INDEX
from quasar.errors import QuasarError, UsageError

_HEADER_ROOM = 1 << 18
"""Bytes a shard, its length field included: about 2,000 tensors."""
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckpointWriter:
    """Context manager that makes the folder `out`; leaving it without `commit` leaves no trace.

    Raises UsageError at once if `out` is a file, is not empty, cannot be created or cannot be
    replaced, and QuasarError if another process is writing it or writing fails later (a full disk).
    """

    def __init__(self, out: Path, shard_bytes: int = 4 << 30) -> None:
        # A rename would replace a symbolic link, not the folder that it points to.
        self.out = Path(os.path.realpath(out))
        self.folder = self.out.parent / f".{self.out.name}.partial"
        """Where files lie until `commit`; more may be written there."""
        self._shard_bytes = shard_bytes
        self._shards: list[_Shard] = []
        self._lock = -1

    def __enter__(self) -> CheckpointWriter:
        try:
            self._check_target()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for leftover in self.folder.iterdir():
                leftover.unlink()
        except BlockingIOError:
            os.close(self._lock)
            raise QuasarError(f"another process is writing {self.out}") from None
        except OSError as error:
            raise UsageError(f"cannot write {self.out}: {error.strerror}") from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for shard in self._shards:
            with suppress(OSError):  # closing writes what is buffered: a full disk is full here too
                shard.file.close()
        if self.folder.exists():
            shutil.rmtree(self.folder)
        os.close(self._lock)

    def _check_target(self) -> None:
        """Refuse before any work what the rename at its end cannot replace."""
        if self.out.is_symlink():
            raise UsageError(f"{self.out} is a symbolic link to itself")
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise UsageError(f"{self.out} already exists and is not an empty folder")
        if self.out.is_mount():
            raise UsageError(f"{self.out} is a mount point; give a new folder inside it")
        if self.out == Path.cwd():
            raise UsageError(f"{self.out} is the current folder; give a new folder inside it")

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor; its bytes are on their way to disk when this returns."""
        if any(name in shard.header for shard in self._shards):
            raise ValueError(f"tensor {name!r} was added before")
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        with self.failures():
            if not self._shards or self._shards[-1].is_full(name, tensor, self._shard_bytes):
                path = self.folder / f"shard-{len(self._shards)}"
                self._shards.append(_Shard(path.open("wb")))
            self._shards[-1].append(name, tensor, data.data)

    def add_json(self, filename: str, value: Any) -> None:
        """QuasarError for a value with NaN or infinities, which JSON does not have."""
        try:
            text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        except ValueError as error:
            raise QuasarError(f"cannot write {filename} to {self.out}: {error}") from None
        with self.failures():
            (self.folder / filename).write_text(text, encoding="utf-8")

    def add_file(self, source: Path, filename: str | None = None) -> None:
        """Copy a file, by default under its own name."""
        with self.failures():
            shutil.copyfile(source, self.folder / (filename or source.name))

    def commit(self) -> None:
        """Sync everything and make it visible as `out`."""
        with self.failures():
            self._name_shards()
            for path in self.folder.iterdir():
                _sync(path)
            _sync(self.folder)
            self.folder.rename(self.out)
            _sync(self.out.parent)

    def _name_shards(self) -> None:
        count = len(self._shards)
        places: dict[str, str] = {}
        for number, shard in enumerate(self._shards):
            shard.finish()
            name = "model.safetensors"
            if count > 1:
                name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self.folder / f"shard-{number}").rename(self.folder / name)
            places.update(dict.fromkeys(shard.header, name))
        if count > 1:
            size = sum(shard.nbytes for shard in self._shards)
            self.add_json(INDEX, {"metadata": {"total_size": size}, "weight_map": places})

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Errors of the system become one clear error; for what is written to `folder` directly."""
        try:
            yield
        except OSError as error:
            raise QuasarError(f"cannot write {self.out}: {error.strerror}") from None


class _Shard:
    """One safetensors file in the making."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.header: dict[str, Any] = {}
        self.nbytes = 0
        self._room = _HEADER_ROOM - 8 - len('{"__metadata__":{"format":"pt"}}')
        file.write(b" " * _HEADER_ROOM)

    def is_full(self, name: str, tensor: Tensor, limit: int) -> bool:
        """Out of space, out of header, or at an address where readers cannot map the tensor."""
        entry_bytes = len(json.dumps(name)) + 200
        unaligned = self.nbytes % tensor.dtype.itemsize != 0
        full = self.nbytes + tensor.nbytes > limit or entry_bytes > self._room
        return self.nbytes > 0 and (full or unaligned)

    def append(self, name: str, tensor: Tensor, data: memoryview) -> None:
        entry = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.nbytes, self.nbytes + len(data)],
        }
        self._room -= len(json.dumps({name: entry}).encode())
        self.file.write(data)
        self.header[name] = entry
        self.nbytes += len(data)

    def finish(self) -> None:
        header = {"__metadata__": {"format": "pt"}, **self.header}
        text = json.dumps(header, separators=(",", ":")).encode()
        self.file.seek(0)
        self.file.write((_HEADER_ROOM - 8).to_bytes(8, "little"))
        self.file.write(text.ljust(_HEADER_ROOM - 8))
        self.file.close()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
