"""Work on what a model file brings, in a child process that cannot take more than its limits.

The child has bounded memory, opens no files, sees none of the environment's secrets, says nothing
on standard error and is killed by its own CPU-time timer: no loop, huge string or crash there can
hold up or end the parent, whatever else the machine is doing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from quasar.errors import CheckpointError, QuasarError

_WALL_SECONDS = 30
"""Backstop, times the CPU seconds allowed: a child may be stuck without using its processor."""
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "SYSTEMROOT")


class Confined:
    """A child that starts on first use and is kept; one that was stopped is replaced."""

    def __init__(self, what: str, module: str, memory_bytes: int, setup: Mapping[str, Any]) -> None:
        """`module` has `serve(memory_bytes)`, which calls `answer`. `setup` is the first request
        to each child. `what` names it in errors.
        """
        self._what, self._memory = what, memory_bytes
        self._command = f"from {module} import serve; serve({memory_bytes})"
        self._setup = setup
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def ask(self, request: Mapping[str, Any], cpu_seconds: float) -> dict[str, Any]:
        """The child's reply. CheckpointError if it fails, or takes too much memory or time."""
        with self._lock:
            fresh = self._child is None
            child = self._child or self._start()
            self._child = None  # unless all goes well, interrupts included
            try:
                reply = self._exchange(child, self._setup, cpu_seconds) if fresh else {}
                if "error" not in reply:
                    reply = self._exchange(child, request, cpu_seconds)
                    self._child = child
            finally:
                if self._child is None:
                    _stop(child)
        if "error" in reply:
            raise CheckpointError(f"{self._what} failed: {reply['error']}")
        return reply

    def _exchange(
        self, child: subprocess.Popen[bytes], request: Mapping[str, Any], cpu_seconds: float
    ) -> dict[str, Any]:
        """One request, one reply."""
        assert child.stdin is not None and child.stdout is not None
        watchdog = threading.Timer(_WALL_SECONDS * cpu_seconds, child.kill)
        watchdog.start()
        try:
            child.stdin.write(json.dumps([cpu_seconds, request]).encode() + b"\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except OSError:
            answer = b""
        finally:
            watchdog.cancel()
        if not answer.endswith(b"\n"):
            raise CheckpointError(
                f"{self._what} was stopped: it took more than {cpu_seconds:g} s of processor time "
                f"or {self._memory >> 20} MiB of memory"
            )
        found: dict[str, Any] = json.loads(answer)
        return found

    def _start(self) -> subprocess.Popen[bytes]:
        kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        paths = os.pathsep.join(path for path in sys.path if os.path.isabs(path))
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", self._command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={**kept, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"},
            )
        except OSError as error:
            raise QuasarError(f"cannot start the process for {self._what}: {error}") from None
        weakref.finalize(self, _stop, child)
        return child


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with suppress(OSError):  # closing sends what could not be sent before
                stream.close()


def answer(reply: Callable[[dict[str, Any]], dict[str, Any]], memory_bytes: int) -> None:
    """The child: a JSON request a line on stdin, a JSON reply a line on stdout, until the end."""
    import resource
    import signal

    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 3),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        cpu_seconds, request = json.loads(line)
        # The default action of SIGPROF ends the process: no Python code has to run for it.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            found = reply(request)
        except BaseException as error:  # a panic of the Rust library is no Exception
            found = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
