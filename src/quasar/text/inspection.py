"""What of a tokenizer.json may be handed to the tokenizer library in this process.

The library trusts its input: regular expressions backtrack, rules lengthen texts without bound, at
load already (added tokens are normalised), and a wrong length ends the process. It also takes parts
without a `type`, or with a wrong one, so what counts here are the keys that do the harm.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from quasar.text.patterns import KNOWN

_VALUE_BYTES, _KEY_BYTES, _LONG_TEXT_BYTES = 260, 900, 75
"""In memory, a value, a key and a character of an added token (measured)."""
_WINDOW = 1 << 19

_SPACE = '" "|"\u2581"|"\\\\u2581"'
_REPLACE = (r'\{ "type" : "Replace" , "pattern" : \{ "String" : @ \} , "content" : @ \}').replace(
    "@", f"(?:{_SPACE})"
)
_SPLIT = (
    r'\{ "type" : "Split" , "pattern" : \{ "(?:String|Regex)" : "(?:[^"\\]++|\\.)*+" \}'
    r' , "behavior" : "\w++" , "invert" : (?:true|false) \}'
)
_STEPS = r'"normalizers" : \[ (?:(?:\{[^{}\[\]]*+\}|@) ,? ){0,16}+\]'.replace("@", _REPLACE)


def _loose(pattern: str) -> re.Pattern[str]:
    """White space allowed where the pattern has a space; possessive, so that no text is slow."""
    quoted = pattern.replace('" "', "@")
    return re.compile(quoted.replace(" ", r"\s*+").replace("@", '" "'), re.DOTALL)


_CHECKS = (
    (_loose(r'"pattern" : [^\s\d]'), _loose(f"{_REPLACE}|{_SPLIT}"), 32),
    (_loose(r'"prepend" : [^\s\d]'), _loose(f'"prepend" : (?:{_SPACE})'), 2),
    (_loose(r'"normalizers" : [^\s\d]'), _loose(_STEPS), 2),
)
"""A key with a value that is no token id; what it must be part of; how often it may be there."""
_BELIEVED = ('"Precompiled"', '"precompiled_charsmap"')
"""A map of characters whose length the library believes: it allocates 4 GiB, or ends the process if
it cannot."""
_ESCAPED_LETTER = re.compile(r"\\u00[4-7]")
"""Could spell any key; no writer of JSON escapes letters."""

_PARTS = 32
"""Steps of a normaliser and pre-tokeniser, in real files at most a dozen."""
_PLAIN = frozenset(
    {
        *("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "Strip"),
        *("ByteLevel", "Digits", "Metaspace", "Punctuation", "Whitespace", "WhitespaceSplit"),
    }
)
"""Steps that take linear time and lengthen a text little."""


def memory_needed(text: str) -> int:
    """Bytes that the library may take for a tokenizer.json at most; for real ones half as much."""
    starts = range(0, len(text) - _WINDOW, _WINDOW)
    long_text = any(text.find('"', start, start + _WINDOW) < 0 for start in starts)
    lists = _VALUE_BYTES * text.count(",") + _KEY_BYTES * text.count('":')
    return lists + (_LONG_TEXT_BYTES * len(text) if long_text else 0)


def loads_safely(text: str) -> bool:
    """Whether loading takes linear time and no part of it is known to end the process."""
    if any(name in text for name in _BELIEVED) or _ESCAPED_LETTER.search(text):
        return False
    for key, allowed, most in _CHECKS:
        found = sum(1 for _ in key.finditer(text))
        if found > most or found != sum(1 for _ in allowed.finditer(text)):
            return False
    return True


def encodes_safely(tokenizer: tokenizers.Tokenizer) -> bool:
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
