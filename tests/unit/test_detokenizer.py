"""Incremental decoding: adds up to decoding all at once, and never shows a broken character."""

from __future__ import annotations

import pytest
import tiny_files
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from quasar.text.detokenizer import Detokenizer
from quasar.text.tokenizer import Tokenizer

NO_END: dict[str, list[int]] = {"eos_token_id": []}


def byte_level() -> Tokenizer:
    return Tokenizer(tiny_files.byte_level_tokenizer(), {}, NO_END, 320)


def sentencepiece() -> Tokenizer:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(tokenizer, {}, NO_END, 320)


TOKENIZERS = {"byte level": byte_level(), "sentencepiece": sentencepiece()}
each = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


@each
@given(ids=st.lists(st.integers(-1, 330), max_size=40))
def test_pushes_add_up_to_decode(tokenizer: Tokenizer, ids: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer)
    pushes = [detokenizer.push(token) for token in ids]
    assert "".join(pushes) + detokenizer.flush() == tokenizer.decode(ids)


@each
@given(text=st.text(max_size=20))
def test_text_survives_and_is_never_broken(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    shown = ""
    for token in ids:
        shown += detokenizer.push(token)
        assert text.startswith(shown)
    assert detokenizer.flush() == ""
    assert shown == text


@each
@given(text=st.text(max_size=20))
def test_decode_equals_the_library(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == tokenizer._tokenizer.decode(ids)


def test_a_character_appears_with_its_last_byte() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("\U0001f642", add_special_tokens=False)
    assert len(ids) == 4
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token) for token in ids] == ["", "", "", "\U0001f642"]


def test_an_unfinished_character_is_flushed_as_a_replacement() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("\U0001f642", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token) for token in ids[:3]] == ["", "", ""]
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_are_not_shown() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a<|im_end|>b", add_special_tokens=False)
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"
