"""The bytes that each token stands for, so that decoding is joining bytes and nothing else."""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

from quasar.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UNUSED_IDS = 1 << 16
_SPACE = "\u2581"


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(other)}


def token_pieces(tokenizer: tokenizers.Tokenizer) -> tuple[list[bytes], bool]:
    """The bytes of every token by id, and whether decoded text loses one leading space.

    Raises CheckpointError if the tokenizer's decoder is neither byte-level nor SentencePiece-like.
    """
    decoder = tokenizer.decoder
    if decoder is None:
        raise CheckpointError("tokenizer.json: it has no decoder")
    steps = _steps(json.loads(decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    largest = max(vocabulary.values(), default=0)
    if largest > 2 * len(vocabulary) + _UNUSED_IDS:
        raise CheckpointError(
            f"tokenizer.json: token id {largest} is too large for {len(vocabulary)} tokens"
        )
    pieces = [b""] * (largest + 1)
    if kinds == ["ByteLevel"]:
        alphabet = byte_alphabet()
        for token, index in vocabulary.items():
            try:
                pieces[index] = bytes(map(alphabet.__getitem__, token))
            except KeyError:
                pieces[index] = token.encode()
    elif _is_sentencepiece(steps):
        fallback = "ByteFallback" in kinds
        for token, index in vocabulary.items():
            match = _BYTE_TOKEN.fullmatch(token) if fallback else None
            text = token.replace(_SPACE, " ").encode()
            pieces[index] = bytes.fromhex(match[1]) if match else text
    else:
        raise CheckpointError(f"tokenizer.json: decoder {'+'.join(kinds)!r} is not supported")
    for index, added in tokenizer.get_added_tokens_decoder().items():
        pieces[index] = added.content.encode()
    return pieces, any(_strips(step) for step in steps)


def _steps(decoder: Any) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]


def _is_sentencepiece(steps: list[dict[str, Any]]) -> bool:
    space = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return all(
        step["type"] in ("ByteFallback", "Fuse")
        or (step["type"] == "Metaspace" and step["replacement"] == _SPACE)
        or step == space
        or _strips(step)
        for step in steps
    )


def _strips(step: dict[str, Any]) -> bool:
    """A step that removes one space from the start of the whole text."""
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    layout = (step.get("content"), step.get("start"), step.get("stop"))
    return step["type"] == "Strip" and layout == (" ", 1, 0)
