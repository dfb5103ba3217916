"""Calls of the Rust tokenizer library with what a file says: its panics end nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from quasar.errors import CheckpointError, QuasarError

_lock = threading.Lock()


@contextmanager
def contained(failure: str) -> Iterator[None]:
    """Whatever the library raises becomes a CheckpointError that begins with `failure`.

    A panic also writes to the process' standard error. Nobody can be told of it there, so all that
    is written meanwhile, by other threads as well, is lost: for loading, not for every request.
    """
    try:
        with _silence():
            yield
    except (QuasarError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the library raises Exception, its panics BaseException
        raise CheckpointError(f"{failure}: {error}") from None


@contextmanager
def _silence() -> Iterator[None]:
    with _lock:
        try:
            kept = os.dup(2)
        except OSError:  # closed: there is nothing to silence
            yield
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.close(nowhere)
