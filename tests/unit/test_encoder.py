"""Tokenizers that nobody knows: the same ids, within limits, and no word on standard error."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_files

from quasar.checkpoints import open_checkpoint
from quasar.errors import CheckpointError
from quasar.text.encoder import Encoder, parse
from quasar.text.inspection import encodes_safely, loads_safely
from quasar.text.patterns import BY_NAME, KNOWN
from quasar.text.tokenizer import load_tokenizer

TEXTS = ["", "the cat sat", " the  cat\n\n", "<|im_start|>the\u00e9\U0001f600", "a" * 3000, "\0"]


def layout(**parts: Any) -> str:
    found = json.loads(tiny_files.byte_level_tokenizer().to_str())
    return json.dumps(found | parts)


def split(pattern: str) -> dict[str, Any]:
    regex = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "type": "Sequence",
        "pretokenizers": [regex | {"invert": False}, byte_level | {"use_regex": False}],
    }


def encoder(**parts: Any) -> Encoder:
    return Encoder(parse(layout(**parts), "tokenizer.json"))


@pytest.mark.parametrize("pattern", sorted(KNOWN))
def test_known_expressions_take_linear_time(pattern: str) -> None:
    """On what makes expressions backtrack: long runs, whose end matches or does not."""
    known = encoder(pre_tokenizer=split(pattern))
    assert known._process is None
    for run in ("a", "A", " ", "\n", "1", "!", "\u4e00", " \n", "'s", "aA", "\u02b0", "\u0301"):
        for end in ("", "!", "a", "\n", "\u4e00"):
            started = time.process_time()
            known.encode(run * 5000 + end, False)
            assert time.process_time() - started < 0.5, (run, end)


def test_every_expression_of_gguf_files_is_known() -> None:
    assert {pattern for patterns in BY_NAME.values() for pattern in patterns} <= KNOWN


def test_a_confined_tokenizer_gives_the_same_ids() -> None:
    known = r"\p{N}{1,3}"
    free, confined = (
        encoder(pre_tokenizer=split(known)),
        encoder(pre_tokenizer=split(f"(?:{known})")),
    )
    assert free._process is None and confined._process is not None
    for text in TEXTS:
        for special in (False, True):
            assert confined.encode(text, special) == free.encode(text, special)


DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


@pytest.mark.parametrize(
    ("parts", "failure"),
    [
        ({"pre_tokenizer": split(r"(a+)+$")}, "retry-limit"),
        ({"pre_tokenizer": split(r"(a|aa)+$")}, "retry-limit"),
        ({"pre_tokenizer": split(r"(?=(a+a+a+b))")}, "stopped"),
        ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLED] * 40}}, "stopped"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 300_000}}, None),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size"),
    ],
    ids=["exponential", "ambiguous", "polynomial", "doubling", "prefix", "panic"],
)
def test_hostile_tokenizers(
    parts: dict[str, Any],
    failure: str | None,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quasar.text.encoder._CPU_SECONDS", 1.0)
    hostile = encoder(**parts)
    assert hostile._process is not None
    text = "a" * 2500 + "!"
    if failure is None:
        assert hostile.encode(text, False)
    else:
        with pytest.raises(CheckpointError, match=f"the tokenizer .*{failure}"):
            hostile.encode(text, False)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAKYgbbcC/waEUPAU"}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAAAAA=="}},
        {
            "model": {
                **{"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
                "continuing_subword_prefix": "######",
            }
        },
    ],
    ids=["charsmap", "4 GiB", "prefix"],
)
def test_panics_while_loading_are_one_error(
    tmp_path: Path, parts: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_files.write_folder(tmp_path)
    text = layout(**parts)
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json (is malformed|failed|was stopped): "
    ) as error:
        load_tokenizer(open_checkpoint(folder))
    assert "\n" not in str(error.value)
    with pytest.raises(CheckpointError):
        parse(text.replace("Precompiled", "Pre\\u0063ompiled"), "tokenizer.json")
    assert capfd.readouterr().err == ""


LONG_TOKEN = {
    **{"id": 300, "content": "a" * 40 + "!", "special": False, "normalized": True},
    **dict.fromkeys(("single_word", "lstrip", "rstrip"), False),
}
UNTAGGED = {key: value for key, value in DOUBLED.items() if key != "type"}
BACKTRACKING = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}


@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "Sequence", "normalizers": [DOUBLED] * 40},
        {"normalizers": [UNTAGGED] * 40},
        {"type": "Sequence", "normalizers": [{**UNTAGGED, "type": "Split"}] * 40},
        BACKTRACKING,
        {"type": "Prepend", "prepend": "x" * 9999},
        {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 17},
        {"type": "Sequence", "normalizers": [{"type": "]", "strip_left": True}] * 17},
    ],
    ids=["doubling", "untagged", "wrong tag", "backtracking", "prefix", "many", "bracket"],
)
def test_added_tokens_are_normalised_while_loading(
    normalizer: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """So loading is tried elsewhere first, whatever the parts call themselves."""
    monkeypatch.setattr("quasar.text.encoder._CPU_SECONDS", 1.0)
    text = layout(normalizer=normalizer, added_tokens=[LONG_TOKEN])
    assert not loads_safely(text)
    started = time.process_time()
    try:
        parse(text, "tokenizer.json")
    except CheckpointError as error:
        assert str(error).startswith("tokenizer.json")
    assert time.process_time() - started < 2.0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": split(r"\p{N}\"[{}]pattern\": {")},
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Prepend", "prepend": "\u2581"},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
                ],
            },
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                    *({"type": "ByteFallback"}, {"type": "Fuse"}),
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ],
            },
        },
        {"model": {"type": "BPE", "vocab": {"pattern": 0, "normalizers": 1, "prepend": 2}}},
    ],
    ids=["byte level", "nfc", "split", "sentencepiece", "words"],
)
@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("indent", [None, 2])
def test_tokenizers_of_real_models_load_at_once(
    parts: dict[str, Any], ascii_only: bool, indent: int | None
) -> None:
    value = json.loads(layout(**parts))
    assert loads_safely(json.dumps(value, ensure_ascii=ascii_only, indent=indent))


def test_looking_takes_linear_time() -> None:
    blanks = " " * 2_000_000
    for text in (
        f'"normalizers":[{blanks}' * 3,
        f'"normalizers":[{{}}{blanks},{blanks}{{}}{blanks}x',
        '"pattern"' * 300_000 + blanks,
        '{"type":"Split","pattern":{"Regex":"' + "\\\\" * 1_000_000,
    ):
        started = time.process_time()
        loads_safely(text)
        assert time.process_time() - started < 2.0


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 99}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " "}, "content": "_"}},
        {"pre_tokenizer": {"type": "BertPreTokenizer"}},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
                "pair": [],
                "special_tokens": {},
            }
        },
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}},
    ],
    ids=["many steps", "longer", "expression", "unusual", "repeated text", "model"],
)
def test_what_is_not_known_to_be_harmless(parts: dict[str, Any]) -> None:
    assert encodes_safely(parse(layout(), ""))
    assert not encodes_safely(parse(layout(**parts), ""))


def test_tokenizers_that_unfold(tmp_path: Path) -> None:
    """Refused by their size before the library allocates a hundred times as much."""
    merges = '["a","b"],' * 2_200_000
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is too large"):
        parse('{"model":{"merges":[' + merges + "]}}", "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is too large"):
        parse('{"added_tokens":[{"content":"' + "x" * 20_000_000 + '"}]}', "tokenizer.json")


def test_loading_without_a_standard_error() -> None:
    script = (
        "import os, sys, tokenizers; from quasar.text.encoder import parse\n"
        "text = sys.stdin.read(); os.close(2); parse(text, 'x'); print('parsed')"
    )
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, input=layout(), capture_output=True, text=True)
    assert found.stdout == "parsed\n"
