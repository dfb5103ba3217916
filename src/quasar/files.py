"""Opening files nobody vouches for: a pipe could block for ever, a device never end."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from quasar.errors import CheckpointError


def open_regular(path: Path) -> BinaryIO:
    """A regular file, or a link to one, to be read. CheckpointError for anything else, OSError."""
    # Without O_NONBLOCK opening a pipe waits for its writer; regular files do not know it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file")
    return open(descriptor, "rb")


def read_regular(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes. All failures are CheckpointError."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise CheckpointError(f"{path} is too large ({size} bytes)")
            return file.read(size)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
