"""Chat templates: Jinja programs that come with the model file, so nothing they do is trusted.

They run in Jinja's immutable sandbox inside a confined process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from quasar.errors import CheckpointError
from quasar.text.confined import Confined, answer

CPU_SECONDS = 1.0
"""Real templates take about a millisecond."""
_MEMORY_BYTES = 1 << 29
_OUTPUT_CHARACTERS = 1 << 20
"""Room for what a template adds; twice the messages is allowed on top."""


class ChatTemplate:
    """One template, rendered by a child process."""

    def __init__(self, source: str) -> None:
        self._process = Confined("the chat template", __name__, _MEMORY_BYTES, {"template": source})

    def render(self, context: Mapping[str, Any]) -> str:
        """The prompt text. CheckpointError if the template fails, refuses or takes too long."""
        text = str(self._process.ask({"context": context}, CPU_SECONDS)["text"])
        try:
            text.encode()
        except UnicodeEncodeError:
            raise CheckpointError("the chat template renders lone surrogates") from None
        return text


def serve(memory_bytes: int) -> None:
    """The child: the template first, then contexts."""
    environment = _environment()
    template: Any = None

    def reply(request: dict[str, Any]) -> dict[str, str]:
        nonlocal template
        if "template" in request:
            template = environment.from_string(request["template"])
            return {}
        return {"text": _render(template, request["context"])}

    answer(reply, memory_bytes)


def _render(template: Any, context: dict[str, Any]) -> str:
    limit = _OUTPUT_CHARACTERS + 2 * len(json.dumps(context))
    pieces: list[str] = []
    length = 0
    for piece in template.generate(context):
        pieces.append(piece)
        length += len(piece)
        if length > limit:
            raise ValueError(f"its output is longer than {limit} characters")
    return "".join(pieces)


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
    _warm_up(environment)
    return environment


def _warm_up(environment: Any) -> None:
    """Whatever is imported or read on first use, while files can still be opened."""
    import html  # noqa: F401
    import pprint  # noqa: F401
    import textwrap  # noqa: F401

    import jinja2.debug

    environment.from_string("{{ strftime_now('%c %Z') }}").render()
    with suppress(jinja2.TemplateError):
        environment.from_string("{{ raise_exception('') }}").render()
