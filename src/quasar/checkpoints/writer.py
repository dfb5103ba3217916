"""Writing a model folder: one tensor in memory at a time, all or nothing, to be gone on with.

Everything goes into a hidden folder beside the target, is synced, and becomes the target by one
rename. The hidden folder is locked while in use, so two runs cannot write the same target. A run
that may take hours saves how far it is: the shards, of which nothing beyond that point counts, and
whatever it needs to go on. A killed run's lock is gone with it; the next run of the same key takes
its folder over, any other clears it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from quasar.checkpoints.hf import INDEX, read_header
from quasar.checkpoints.mapping import MappedFile
from quasar.checkpoints.shards import SHARD_BYTES, Shard
from quasar.errors import CheckpointError, QuasarError, UsageError
from quasar.files import read_json

log = logging.getLogger("quasar")

_STATE = "state.json"


@dataclass(frozen=True, slots=True)
class SavePoint:
    """How far an interrupted run came, in its own words."""

    state: dict[str, Any]
    tensors: dict[str, Tensor]


class CheckpointWriter:
    """Context manager that makes the folder `out`; leaving it without `commit` leaves no trace.

    The exception: after `save` an interruption or a full disk leaves the hidden folder behind.
    Raises UsageError at once if `out` is a file, is not empty, cannot be created or cannot be
    replaced, and QuasarError if another process is writing it or writing fails later (a full disk).
    """

    def __init__(self, out: Path, shard_bytes: int = SHARD_BYTES, resumable: bool = False) -> None:
        """`resumable`: what an interrupted run left stays until `resume` is called."""
        # A rename would replace a symbolic link, not the folder that it points to.
        self.out = Path(os.path.realpath(out))
        self.folder = self.out.parent / f".{self.out.name}.partial"
        """Where files lie until `commit`; more may be written there."""
        self._shard_bytes, self._resumable = shard_bytes, resumable
        self._shards: list[Shard] = []
        self._aside: list[Shard] = []
        self._made = 0
        """Shards so far, dropped ones included: no name is used twice."""
        self._lock = -1
        self._points = 0
        self._key: str | None = None

    def __enter__(self) -> CheckpointWriter:
        try:
            check_target(self.out)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._resumable:
                self._clear()
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
        for shard in (*self._aside, *self._shards):
            with suppress(OSError):  # closing writes what is buffered: a full disk is full here too
                shard.file.close()
        if self._resumable and self._key is None:
            with suppress(OSError):  # before `resume`: what an interrupted run left stays
                self.folder.rmdir()
        elif (
            self._points and kind is not None and not issubclass(kind, CheckpointError | UsageError)
        ):
            log.warning("what is done is kept in %s: the same command goes on there", self.folder)
        elif self.folder.exists():
            shutil.rmtree(self.folder)
        os.close(self._lock)

    def resume(self, key: str) -> SavePoint | None:
        """What a run of the same `key` saved last before it was interrupted, all shards included.

        Whatever else is there is cleared. From here on `save` may be called.
        """
        point, state = None, self.folder / _STATE
        if state.exists():
            try:
                point = self._restore(read_json(state), key)
            except (CheckpointError, OSError, ValueError, KeyError, TypeError):
                log.warning("%s is damaged: starting anew", state)
        if point is None:
            with self.failures():
                self._clear()
        self._key = key
        return point

    def _restore(self, found: Mapping[str, Any], key: str) -> SavePoint | None:
        if found["key"] != key:
            log.warning(
                "an interrupted run had another model or other options than this one for %s: "
                "starting anew",
                self.out,
            )
            return None
        number = int(found["point"])
        file = MappedFile(self._tensors(number))
        tensors = {name: entry.read().clone() for name, entry in read_header(file).items()}
        point = SavePoint(dict(found["state"]), tensors)
        self._shards, self._aside = (
            [Shard(self._shard(int(index)), header) for index, header in found[part].items()]
            for part in ("shards", "aside")
        )
        self._points, self._made = number, int(found["made"])
        shards = (shard.path.name for shard in (*self._aside, *self._shards))
        kept = {_STATE, self._tensors(number).name, *shards}
        for path in self.folder.iterdir():
            if path.name not in kept:
                path.unlink()
        return point

    def save(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """From now on an interrupted run goes on here. Only after `resume`."""
        assert self._key is not None
        with self.failures():
            for shard in (*self._aside, *self._shards):
                shard.sync()
            number = self._points + 1
            scratch = Shard(self._tensors(number))
            try:
                for name, tensor in tensors.items():
                    scratch.append(name, tensor)
            finally:
                scratch.finish()
            _sync(scratch.path)
            self._replace_state(number, state)
            self._tensors(self._points).unlink(missing_ok=True)
        self._points = number

    def _replace_state(self, number: int, state: Mapping[str, Any]) -> None:
        content = {
            "key": self._key,
            "point": number,
            "state": state,
            "made": self._made,
            "shards": _headers(self._shards),
            "aside": _headers(self._aside),
        }
        new = self.folder / f"{_STATE}.new"
        new.write_text(json.dumps(content), encoding="utf-8")
        _sync(new)
        new.replace(self.folder / _STATE)
        _sync(self.folder)

    def restart(self, state: Mapping[str, Any]) -> None:
        """Drop all tensors; an interrupted run goes on from `state` without any."""
        dropped, self._shards, self._aside = [*self._aside, *self._shards], [], []
        self._drop(dropped, state)

    def set_aside(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Save, and begin anew beside what was added so far; `choose` or `restart` ends this."""
        self._aside, self._shards = self._shards, []
        self.save(state, tensors)

    def choose(self, aside: bool, state: Mapping[str, Any]) -> None:
        """Drop what was set aside, or (`aside`) what was added since; an interrupted run goes on
        from `state`. Nothing is aside where the choice was made before."""
        if not self._aside:
            return
        dropped = self._shards if aside else self._aside
        self._shards, self._aside = self._aside if aside else self._shards, []
        self._drop(dropped, state)

    def _drop(self, dropped: Sequence[Shard], state: Mapping[str, Any]) -> None:
        self.save(state, {})
        with self.failures():
            for shard in dropped:
                shard.file.close()
                shard.path.unlink()

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor; its bytes are on their way to disk when this returns."""
        if any(name in shard.layout.header for shard in self._shards):
            raise ValueError(f"tensor {name!r} was added before")
        with self.failures():
            if not self._shards or self._shards[-1].layout.is_full(name, tensor, self._shard_bytes):
                self._shards.append(Shard(self._shard(self._made)))
                self._made += 1
            self._shards[-1].append(name, tensor)

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
            for shard in self._shards:
                shard.finish()
                _sync(shard.path)
            (self.folder / _STATE).unlink(missing_ok=True)
            self._tensors(self._points).unlink(missing_ok=True)
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
            name = "model.safetensors"
            if count > 1:
                name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            shard.path.rename(self.folder / name)
            places.update(dict.fromkeys(shard.layout.header, name))
        if count > 1:
            size = sum(shard.layout.nbytes for shard in self._shards)
            self.add_json(INDEX, {"metadata": {"total_size": size}, "weight_map": places})

    def _clear(self) -> None:
        for leftover in self.folder.iterdir():
            leftover.unlink()

    def _shard(self, index: int) -> Path:
        return self.folder / f"shard-{index}"

    def _tensors(self, point: int) -> Path:
        return self.folder / f"point-{point}"

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Errors of the system become one clear error; for what is written to `folder` directly."""
        try:
            yield
        except OSError as error:
            raise QuasarError(f"cannot write {self.out}: {error.strerror}") from None


def _headers(shards: Sequence[Shard]) -> dict[str, Any]:
    """By the shard's number; JSON keeps their order."""
    return {shard.path.name.rpartition("-")[2]: shard.layout.header for shard in shards}


def check_target(out: Path) -> None:
    """Refuse before any work what the rename at its end cannot replace."""
    if out.is_symlink():
        raise UsageError(f"{out} is a symbolic link to itself")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} already exists and is not an empty folder")
    if out.is_mount():
        raise UsageError(f"{out} is a mount point; give a new folder inside it")
    if out == Path.cwd():
        raise UsageError(f"{out} is the current folder; give a new folder inside it")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
