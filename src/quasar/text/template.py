"""Chat templates: Jinja programs that come with the model file, so nothing they do is trusted.

They run in Jinja's immutable sandbox inside a child process that has bounded memory, may not write
files, and is killed by its own CPU-time timer: neither a long loop nor a huge string operation can
hold up the parent, whatever else the machine is doing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from quasar.errors import CheckpointError, QuasarError

CPU_SECONDS = 1.0
"""Real templates take about a millisecond."""
_WALL_SECONDS = 30.0
"""Backstop for a child that is stuck without using its processor."""
_MEMORY_BYTES = 1 << 29
_OUTPUT_CHARACTERS = 1 << 20
"""Room for what a template adds; twice the messages is allowed on top."""
_CHILD = "from quasar.text.template import serve; serve()"


class ChatTemplate:
    """One template, rendered by a child process that starts on first use and is kept."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def render(self, context: Mapping[str, Any]) -> str:
        """The prompt text. CheckpointError if the template fails, refuses or takes too long."""
        request = json.dumps({"template": self.source, "context": context}).encode() + b"\n"
        with self._lock:
            reply = self._ask(request)
        if "error" in reply:
            raise CheckpointError(f"chat template failed: {reply['error']}")
        return str(reply["text"])

    def _ask(self, request: bytes) -> dict[str, Any]:
        child = self._child or self._start()
        watchdog = threading.Timer(_WALL_SECONDS, child.kill)
        watchdog.start()
        try:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(request)
            child.stdin.flush()
            answer = child.stdout.readline()
        except OSError:
            answer = b""
        finally:
            watchdog.cancel()
        if not answer.endswith(b"\n"):
            self._child = None
            _stop(child)
            raise CheckpointError(
                f"chat template was stopped: it took more than {CPU_SECONDS:g} s of processor time "
                f"or {_MEMORY_BYTES >> 20} MiB of memory"
            )
        reply: dict[str, Any] = json.loads(answer)
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        paths = [path for path in sys.path if os.path.isabs(path)]
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd="/",
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        except OSError as error:
            raise QuasarError(f"cannot start the chat template process: {error}") from None
        weakref.finalize(self, _stop, self._child)
        return self._child


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            stream.close()


def serve() -> None:
    """The child: one JSON request a line on stdin, one JSON reply a line on stdout."""
    import resource
    import signal

    environment = _environment()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        # The default action of SIGPROF ends the process: no Python code has to run for it.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        reply = _reply(environment, json.loads(line), len(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def _reply(environment: Any, request: dict[str, Any], size: int) -> dict[str, str]:
    limit = _OUTPUT_CHARACTERS + 2 * size
    pieces: list[str] = []
    length = 0
    try:
        template = environment.from_string(request["template"])
        for piece in template.generate(request["context"]):
            pieces.append(piece)
            length += len(piece)
            if length > limit:
                return {"error": f"its output is longer than {limit} characters"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    return {"text": "".join(pieces)}


def _environment() -> Any:
    """The names and rules that model authors write their templates against (as transformers')."""
    from datetime import datetime

    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's tokens for training; here it is transparent."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    def tojson(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **layout)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment
