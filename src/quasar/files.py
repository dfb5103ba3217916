"""Reading files nobody vouches for: a pipe could block for ever, a device never end, a link point
to a secret, and a short text unfold into many objects."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from quasar.errors import CheckpointError

SPARE_BYTES = 128 << 20
"""What is made of a file takes at most twice its size and this, whatever the file says."""
_VALUE_BYTES = 80
"""Of a JSON value as a Python object, its place in a container included."""
_MAX_JSON = 16 << 20
"""The index of a model of 90,000 tensors has 9 MB."""


def open_regular(path: Path) -> BinaryIO:
    """A regular file, or a link to one, to be read. CheckpointError for anything else, OSError."""
    # Without O_NONBLOCK opening a pipe waits for its writer; regular files do not know it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file")
    return open(descriptor, "rb")


def read_regular(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes, which lies in its folder.

    A cloned repository can hold links to any file of this machine, and the text of a model ends up
    in prompts and in copies of the model. All failures are CheckpointError.
    """
    _check_link(path)
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise CheckpointError(f"{path} is too large ({size} bytes)")
            return file.read(size)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None


def _check_link(path: Path) -> None:
    """A link may lead to a file of the same folder, or to the hub cache, which is made of links."""
    if not path.is_symlink():
        return
    target = Path(os.path.realpath(path))
    inside = target.is_relative_to(os.path.realpath(path.parent))
    cached = target.parent.name == "blobs" and target.parts[-3].startswith("models--")
    if target.is_file() and not inside and not cached:
        raise CheckpointError(f"{path} is a link out of the model's folder, to {target}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size."""
    return parse_object(read_regular(path, _MAX_JSON), str(path))


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object without a key given twice and with nothing that UTF-8 cannot write."""
    values = sum(map(data.count, (b",", b"[", b"{")))
    if values * _VALUE_BYTES > 2 * len(data) + SPARE_BYTES:
        raise CheckpointError(f"{where} holds too many values ({values})")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{where} holds half of a surrogate pair") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return result
