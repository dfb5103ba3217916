"""Texts to token ids: in this process if every part of the tokenizer is known to be harmless.

A tokenizer.json may hold regular expressions that take exponential time, rules that double a text
forty times, and parts whose library panics. Such a tokenizer works in a confined process.
"""

from __future__ import annotations

from typing import Any

import tokenizers

from quasar.errors import CheckpointError
from quasar.text.confined import Confined, answer
from quasar.text.inspection import encodes_safely, loads_safely, memory_needed
from quasar.text.panics import contained

_CPU_SECONDS = 5.0
_TEXT_A_SECOND = 100_000
"""Characters; slow tokenizers encode ten times as many."""
_MEMORY_BYTES = 1 << 30
_MEMORY_A_BYTE = 32
"""Of tokenizer.json, as a tokenizer in memory."""


class Encoder:
    """Encodes with one tokenizer."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._process: Confined | None = None
        if not encodes_safely(tokenizer):
            self._process = _confined("the tokenizer", tokenizer.to_str())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """CheckpointError if the tokenizer fails, or takes far more time than any real one."""
        if self._process is None:
            return _encode(self._tokenizer, text, add_special_tokens)
        request = {"text": text, "add_special_tokens": add_special_tokens}
        reply = self._process.ask(request, _CPU_SECONDS + len(text) / _TEXT_A_SECOND)
        return [int(index) for index in reply["ids"]]


def parse(text: str, where: str) -> tokenizers.Tokenizer:
    """The tokenizer that the text of a tokenizer.json describes.

    One whose loading could take for ever or end the process is first tried in another process.
    """
    if (memory := memory_needed(text)) > _MEMORY_BYTES:
        raise CheckpointError(f"{where} is too large: {memory >> 20} MiB as a tokenizer")
    if not loads_safely(text):
        _confined(where, text).ask({"text": "", "add_special_tokens": False}, _CPU_SECONDS)
    with contained(f"{where} is malformed"):
        return _parse(text)


def _confined(what: str, text: str) -> Confined:
    memory = _MEMORY_BYTES + _MEMORY_A_BYTE * len(text)
    return Confined(what, __name__, memory, {"tokenizer": text})


def _parse(text: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def serve(memory_bytes: int) -> None:
    """The child: the tokenizer first, then texts."""
    tokenizer: Any = None

    def reply(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal tokenizer
        if "tokenizer" in request:
            tokenizer = _parse(request["tokenizer"])
            return {}
        return {"ids": _encode(tokenizer, request["text"], request["add_special_tokens"])}

    answer(reply, memory_bytes)


def _encode(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    try:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic
        raise CheckpointError(f"the model's tokenizer fails on this text: {error}") from None
