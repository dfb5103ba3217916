"""Tokenizers from folders and from GGUF metadata."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_files
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from quasar.checkpoints import open_checkpoint
from quasar.errors import CheckpointError, UsageError
from quasar.text.ggml import Vocabulary, build_tokenizer
from quasar.text.tokenizer import Tokenizer, load_tokenizer

MESSAGES = [{"role": "user", "content": "the cat"}]
PROMPT = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"


def from_folder(folder: Path, **config: Any) -> Tokenizer:
    """The tiny folder's tokenizer with other entries in tokenizer_config.json."""
    tiny_files.write_folder(folder)
    path = folder / "tokenizer_config.json"
    tiny_files.write_json(path, {**json.loads(path.read_text()), **config})
    return load_tokenizer(open_checkpoint(folder))


@pytest.fixture(params=["folder", "gguf"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    """The same byte-level tokenizer from both sources."""
    if request.param == "folder":
        return load_tokenizer(open_checkpoint(tiny_files.write_folder(tmp_path)))
    return load_tokenizer(open_checkpoint(tiny_files.write_gguf(tmp_path / "x.gguf")))


def test_encode_and_decode(tokenizer: Tokenizer) -> None:
    text = "the cat, naïve \U0001f642 <|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == tiny_files.byte_level_tokenizer().encode(text).ids
    assert ids[-1] == 2
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("", add_special_tokens=True) == []


def test_chat_renders_and_encodes(tokenizer: Tokenizer) -> None:
    assert tokenizer.render(MESSAGES) == PROMPT
    ids = tokenizer.chat(MESSAGES)
    assert ids == tokenizer.encode(PROMPT, add_special_tokens=False)
    assert ids[0] == 1
    assert (
        tokenizer.chat(MESSAGES, add_generation_prompt=False)
        == ids[: len(ids) - ids[::-1].index(1) - 1]
    )


def test_end_tokens_are_the_union(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids == {0, 2}


def test_vocab_size_leaves_padding_out(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == tiny_files.byte_level_tokenizer().get_vocab_size()


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="surrogates"):
        tokenizer.encode("a\ud800", add_special_tokens=False)


def test_saved_folder_loads_in_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    other = AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = "the cat  sat\n\n on 123 mats; naïve \U0001f642<|im_end|>"
    assert other(text)["input_ids"] == tokenizer.encode(text, add_special_tokens=True)
    chat = other.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert chat == PROMPT
    assert other.eos_token_id == 2
    assert set(GenerationConfig.from_pretrained(tmp_path / "saved").eos_token_id) == {0, 2}


def test_saved_folder_keeps_the_sampling_defaults(tmp_path: Path) -> None:
    folder = tiny_files.write_folder(tmp_path / "model")
    tiny_files.write_json(folder / "generation_config.json", {"eos_token_id": 0, "top_k": 20})
    load_tokenizer(open_checkpoint(folder)).save(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert saved == {"eos_token_id": [0, 2], "top_k": 20}


def test_saved_folder_loads_again(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = tiny_files.write_folder(tmp_path / "again")
    tokenizer.save(folder)
    again = load_tokenizer(open_checkpoint(folder))
    assert again.chat(MESSAGES) == tokenizer.chat(MESSAGES)
    assert again.eos_ids == tokenizer.eos_ids
    assert again.pieces == tokenizer.pieces


def test_template_file_wins_over_the_config(tmp_path: Path) -> None:
    folder = tiny_files.write_folder(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert load_tokenizer(open_checkpoint(folder)).render(MESSAGES) == "the cat!"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}]
    assert from_folder(tmp_path / "a", chat_template=named).render(MESSAGES) == "yes"
    with pytest.raises(CheckpointError, match="chat_template"):
        from_folder(tmp_path / "b", chat_template=named[:1])


def test_special_tokens_reach_the_template_as_text_or_object(tmp_path: Path) -> None:
    tokenizer = from_folder(
        tmp_path,
        bos_token={"content": "<|endoftext|>"},
        chat_template="{{ bos_token }}x{{ eos_token }}",
    )
    assert tokenizer.render([]) == "<|endoftext|>x<|im_end|>"
    assert tokenizer.chat([]) == [0, *tokenizer.encode("x", False), 2]


def test_without_a_template_chat_is_refused(tmp_path: Path) -> None:
    tokenizer = from_folder(tmp_path, chat_template=None)
    assert not tokenizer.has_chat_template
    with pytest.raises(UsageError, match="no chat template"):
        tokenizer.chat(MESSAGES)


def test_tokens_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    folder = tiny_files.write_folder(tmp_path)
    tokenizer = tiny_files.byte_level_tokenizer()
    tokenizer.add_tokens([f"<extra{i}>" for i in range(100)])
    tokenizer.save(str(folder / "tokenizer.json"))
    loaded = load_tokenizer(open_checkpoint(folder))
    with pytest.raises(UsageError, match="'<extra99>'"):
        loaded.encode("a <extra99>", add_special_tokens=False)


def test_decoders_that_are_not_understood_are_refused(tmp_path: Path) -> None:
    folder = tiny_files.write_folder(tmp_path)
    layout = json.loads((folder / "tokenizer.json").read_text())
    layout["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    tiny_files.write_json(folder / "tokenizer.json", layout)
    with pytest.raises(CheckpointError, match="'WordPiece'"):
        load_tokenizer(open_checkpoint(folder))


def test_a_regular_expression_that_panics_is_one_error(tmp_path: Path) -> None:
    """Backtracking ends at the library's limit, with a panic that is no Exception in Python."""
    folder = tiny_files.write_folder(tmp_path)
    layout = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated"}
    layout["pre_tokenizer"] = split | {"invert": False}
    tiny_files.write_json(folder / "tokenizer.json", layout)
    tokenizer = load_tokenizer(open_checkpoint(folder))
    with pytest.raises(CheckpointError, match=r"the tokenizer failed: .*retry-limit"):
        tokenizer.encode("x" * 60, add_special_tokens=False)


def metadata(**change: Any) -> dict[str, Any]:
    """`tokenizer.ggml.*` of a byte-level vocabulary."""
    layout = json.loads(tiny_files.byte_level_tokenizer().to_str())
    vocabulary = layout["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "merges": [" ".join(merge) for merge in layout["model"]["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 2,
        **change,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def encode(text: str, **change: Any) -> list[int]:
    return list(build_tokenizer(Vocabulary(metadata(**change), "x.gguf")).encode(text).ids)


def pieces(text: str, pre: str) -> list[str]:
    """How a pre-tokeniser cuts a text."""
    tokenizer = build_tokenizer(Vocabulary(metadata(pre=pre), "x.gguf"))
    return [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["I", "'ll", " pay", " 1234", ".", "50", "  ", " now", "\n"]),
        (
            "smollm",
            ["I", "'ll", " pay", " ", "1", "2", "3", "4", ".", "5", "0", "  ", " now", "\n"],
        ),
        ("qwen2", ["I", "'ll", " pay", " ", "1", "2", "3", "4", ".", "5", "0", "  ", " now", "\n"]),
        ("llama-bpe", ["I", "'ll", " pay", " ", "123", "4", ".", "50", "  ", " now", "\n"]),
        (
            "tekken",
            ["I", "'ll", " pay", " ", "1", "2", "3", "4", ".", "5", "0", "  ", " now", "\n"],
        ),
        ("default", ["I", "'", "ll", " pay", " ", "123", "4", ".", "50", "  ", " now", "\n"]),
    ],
)
def test_pre_tokenisers(pre: str, expected: list[str]) -> None:
    assert pieces("I'll pay 1234.50   now\n", pre) == expected


def test_begin_and_end_tokens_follow_the_metadata() -> None:
    plain = encode("cat")
    assert encode("cat", add_bos_token=True) == [0, *plain]
    assert encode("cat", add_bos_token=True, add_eos_token=True) == [0, *plain, 2]
    assert encode("cat", pre="llama-bpe")[0] == 0
    assert encode("cat", pre="llama-bpe", add_bos_token=False)[0] != 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "t5"}, "'t5'.*gpt2, llama"),
        ({"model": None}, "model is missing"),
        ({"pre": "no-such"}, "'no-such' is not supported; supported: .*qwen2"),
        ({"tokens": []}, "empty"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "twice"),
        ({"tokens": [1, 2], "token_type": [1, 1]}, "strings"),
        ({"token_type": [1]}, "token_type"),
        ({"merges": ["ab"]}, "'ab'"),
        ({"merges": ["q\u2603 z"]}, "malformed vocabulary"),
        ({"eos_token_id": 10**6}, "eos_token_id 1000000"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"add_bos_token": 1}, "add_bos_token"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id"),
    ],
)
def test_malformed_vocabularies_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        vocabulary = Vocabulary(metadata(**change), "x.gguf")
        vocabulary.end_ids()
        build_tokenizer(vocabulary)


def sentencepiece(**change: Any) -> dict[str, Any]:
    """`tokenizer.ggml.*` of a SentencePiece vocabulary; higher scores merge first."""
    words = {"\u2581the": -1.0, "th": -2.0, "\u2581t": -9.0, "he": -3.0, "\u2581th": -4.0}
    letters = {letter: -20.0 - index for index, letter in enumerate("\u2581thea")}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words, *letters]
    values = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters)),
        "scores": [0.0] * 259 + [*words.values(), *letters.values()],
        **change,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def test_sentencepiece_merges_by_score() -> None:
    vocabulary = Vocabulary(sentencepiece(), "x.gguf")
    tokenizer = build_tokenizer(vocabulary)
    assert tokenizer.encode("the tea").tokens == ["<s>", "\u2581the", "\u2581t", "e", "a"]
    assert tokenizer.encode("é", add_special_tokens=False).tokens == ["\u2581", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("</s>a").tokens == ["<s>", "</s>", "\u2581", "a"]
    assert tokenizer.decode(tokenizer.encode("the é").ids) == "the é"
    assert vocabulary.end_ids() == {2}


def test_sentencepiece_space_prefix_can_be_off() -> None:
    tokenizer = build_tokenizer(Vocabulary(sentencepiece(add_space_prefix=False), "x.gguf"))
    assert tokenizer.encode("the").tokens == ["<s>", "th", "e"]


def test_equal_scores_are_refused() -> None:
    values = sentencepiece()
    values["tokenizer.ggml.scores"][260] = -1.0
    with pytest.raises(CheckpointError, match="equal scores"):
        build_tokenizer(Vocabulary(values, "x.gguf"))


def reference_sentencepiece(text: str, scores: dict[str, float]) -> list[str]:
    """The definition: of all neighbours that make a piece, merge the best, leftmost first."""
    symbols = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        pairs = [
            (-scores[a + b], index)
            for index, (a, b) in enumerate(pairwise(symbols))
            if a + b in scores
        ]
        if not pairs:
            return symbols
        index = min(pairs)[1]
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]


@given(
    text=st.text("ab ", min_size=1, max_size=24),
    words=st.lists(st.text("ab\u2581", min_size=2, max_size=4), unique=True, max_size=12),
)
def test_sentencepiece_equals_its_definition(text: str, words: list[str]) -> None:
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", *words]
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(tokens))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (len(tokens) - 3),
    }
    scores = {token: -float(index) for index, token in enumerate(tokens) if index > 2}
    tokenizer = build_tokenizer(Vocabulary(values, "x.gguf"))
    found = tokenizer.encode(text, add_special_tokens=False).tokens
    assert found == reference_sentencepiece(text, scores)


def test_a_qwen2_vocabulary_equals_the_original_rules() -> None:
    """The regular expression of Qwen2's tokenizer.json, without its NFC normalisation."""
    original = tokenizers.Tokenizer(models.BPE())
    original.pre_tokenizer = pre_tokenizers.Split(
        tokenizers.Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
            r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        "isolated",
    )
    text = "It'S  don't\t\tx=1234;\r\n\r\n  naïve 日本語 \u00a0½²  (a_b)  \n"
    cuts = original.pre_tokenizer.pre_tokenize_str(text)
    assert pieces(text, "qwen2") == [text[start:end] for _, (start, end) in cuts]


def test_gguf_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.ones((10, 4), np.float32))
    tiny_files.finish_gguf(writer)
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.model"):
        load_tokenizer(open_checkpoint(tmp_path / "x.gguf"))
