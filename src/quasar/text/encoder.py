"""Texts to token ids: in this process if every part of the tokenizer is known to be harmless.

A tokenizer.json may hold regular expressions that take exponential time, rules that double a text
forty times, and parts whose library panics. Such a tokenizer works in a confined process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from quasar.errors import CheckpointError
from quasar.text.confined import Confined, answer
from quasar.text.panics import contained
from quasar.text.patterns import KNOWN

_CPU_SECONDS = 5.0
_TEXT_A_SECOND = 100_000
"""Characters; slow tokenizers encode ten times as many."""
_MEMORY_BYTES = 1 << 30
_VALUE_BYTES, _KEY_BYTES = 260, 900
"""Of tokenizer.json in memory (measured); the largest real ones take half of the limit."""
_LONG_TEXT = 1 << 19
"""Characters without a quotation mark between them; an added token's take 75 bytes each."""
_MEMORY_A_BYTE = 32
"""Of tokenizer.json, as a tokenizer in memory."""
_SUSPECT = re.compile(r"Precompiled|\\u00[4-7]")
"""A map of characters whose length the library believes: it allocates up to 4 GiB, or ends the
process if it cannot. Also letters written as escapes, which could spell that name."""
_PARTS = 32
"""Steps of a normaliser or pre-tokeniser, in real files at most a dozen."""
_PLAIN = frozenset(
    {
        *("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "Strip"),
        *("ByteLevel", "Digits", "Metaspace", "Punctuation", "Whitespace", "WhitespaceSplit"),
    }
)
"""Steps that take linear time and lengthen a text little."""


class Encoder:
    """Encodes with one tokenizer."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._process: Confined | None = None
        if not is_harmless(tokenizer):
            self._process = _confined("the tokenizer", tokenizer.to_str())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """CheckpointError if the tokenizer fails, or takes far more time than any real one."""
        if self._process is None:
            return _encode(self._tokenizer, text, add_special_tokens)
        request = {"text": text, "add_special_tokens": add_special_tokens}
        reply = self._process.ask(request, _CPU_SECONDS + len(text) / _TEXT_A_SECOND)
        return [int(index) for index in reply["ids"]]


def parse(text: str, where: str) -> tokenizers.Tokenizer:
    """The tokenizer that the text of a tokenizer.json describes."""
    memory = _VALUE_BYTES * text.count(",") + _KEY_BYTES * text.count('":')
    starts = range(0, len(text) - _LONG_TEXT, _LONG_TEXT)
    if memory > _MEMORY_BYTES or any(text.find('"', i, i + _LONG_TEXT) < 0 for i in starts):
        raise CheckpointError(
            f"{where} holds too much: {memory >> 20} MiB as a tokenizer, or a too long text"
        )
    if _SUSPECT.search(text):
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


def is_harmless(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether every part is known to take linear time, to lengthen texts little and not to fail."""
    parts = [tokenizer.normalizer, tokenizer.pre_tokenizer]
    steps = [step for part in parts if part is not None for step in _steps(_state(part))]
    if len(steps) > _PARTS or not all(map(_is_tame, steps)):
        return False
    ends = tokenizer.post_processor
    return _model_tame(tokenizer.model) and (ends is None or _ends_tame(_state(ends)))


def _state(part: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(part.__getstate__())
    return found


def _steps(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if part["type"] != "Sequence":
        yield part
    for key in ("normalizers", "pretokenizers"):
        for inner in part.get(key, ()):
            yield from _steps(inner)


def _is_tame(step: Mapping[str, Any]) -> bool:
    match step:
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return 0 < len(new) <= len(old)
        case {"type": "Split", "pattern": {"String": text}}:
            return len(text) > 0
        case {"type": "Split", "pattern": {"Regex": pattern}}:
            return pattern in KNOWN
        case {"type": "Prepend", "prepend": text}:
            return len(text) == 1
    return step["type"] in _PLAIN


def _model_tame(model: Any) -> bool:
    """Plain BPE; the library panics on prefixes that are longer than the tokens they begin."""
    if type(model).__name__ != "BPE":
        return False
    return not any((model.dropout, model.continuing_subword_prefix, model.end_of_word_suffix))


def _ends_tame(part: Mapping[str, Any]) -> bool:
    """BOS and EOS around one text."""
    if part["type"] == "Sequence":
        return len(part["processors"]) <= 4 and all(map(_ends_tame, part["processors"]))
    if part["type"] == "TemplateProcessing":
        texts = ["Sequence" in piece for piece in part["single"]]
        return len(texts) <= 8 and texts.count(True) == 1
    return bool(part["type"] == "ByteLevel")
