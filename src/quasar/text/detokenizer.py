"""Tokens to text as they come, never a broken character."""

from __future__ import annotations

import codecs
from typing import Protocol


class Pieces(Protocol):
    """What the detokeniser needs of a tokenizer."""

    strips_space: bool

    def piece(self, token: int, skip_special_tokens: bool = True) -> bytes: ...


class Detokenizer:
    """Incremental `Tokenizer.decode` of one sequence: the pushes and the flush add up to it.

    State is at most three bytes of an unfinished character, so a push costs the token's length.
    """

    def __init__(self, tokenizer: Pieces) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.strips_space

    def push(self, token_id: int) -> str:
        """Text that is certain now; a character split over tokens appears with its last one."""
        return self._emit(self._decoder.decode(self._tokenizer.piece(token_id)))

    def flush(self) -> str:
        """The rest: U+FFFD if the sequence ended inside a character."""
        return self._emit(self._decoder.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text
