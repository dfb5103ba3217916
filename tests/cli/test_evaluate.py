"""`quasar evaluate`, over texts and over answers."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file

import tiny
from byte_tokenizer import VOCABULARY, write_tokenizer

FIELDS = {
    "name",
    "tokens",
    "perplexity",
    "reference_perplexity",
    "kl",
    "top1",
    "top1_without_near_ties",
}


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("The quick brown fox jumps over the lazy dog. " * 3)
    return file


def test_text(quasar, model, quantized, text):
    reference, candidate = f"{model}+bf16", f"{quantized}+w8a8"
    arguments = ("--text", text, "--max-tokens", 50, "--json")
    result = quasar("evaluate", reference, candidate, reference, *arguments)
    assert result.code == 0 and result.out.count("\n") == 1
    content = result.json
    assert content["reference"] == reference
    other, same = content["candidates"]
    assert other.keys() == FIELDS and (other["name"], same["name"]) == (candidate, reference)
    assert other["tokens"] == 49 + 49 + 34
    assert same["kl"] == 0.0 and same["top1"] == 1.0
    assert same["perplexity"] == same["reference_perplexity"] == other["reference_perplexity"]
    assert 0 < other["kl"] < 1 and 0.5 < other["top1"] <= other["top1_without_near_ties"]


def test_limit_takes_the_first_windows(quasar, model, text):
    name = f"{model}+bf16"
    arguments = ("--text", text, "--max-tokens", 50, "--limit", 1, "--json")
    assert quasar("evaluate", name, name, *arguments).json["candidates"][0]["tokens"] == 49


def test_answers_of_the_reference(quasar, model, quantized, questions):
    arguments = ("--prompts", questions, "--limit", 3, "--max-tokens", 20, "--json")
    result = quasar("evaluate", f"{model}+bf16", f"{quantized}+w8a8", f"{model}+bf16", *arguments)
    other, same = result.json["candidates"]
    assert 3 <= other["tokens"] == same["tokens"] <= 60
    # The reference's own greedy answers: it prefers each of their tokens.
    assert same["top1"] == 1.0
    assert other["reference_perplexity"] < other["perplexity"] * 1.5


def test_head_is_the_candidates(quasar, model, text):
    name = f"{model}+bf16"
    result = quasar(
        "evaluate", name, name, "--text", text, "--limit", 1, "--head", "w8a8", "--json"
    )
    assert result.json["candidates"][0]["kl"] > 0


def test_table(quasar, model, text):
    name = f"{model}+bf16"
    result = quasar("evaluate", name, name, "--text", text)
    assert result.code == 0 and "top-1" in result.out and "100.00%" in result.out


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("m+bf16", "m+bf16"), 2, "--text --prompts"),
        (("m+bf16", "--text", "t"), 2, "CANDIDATE"),
        (("m+bf16", "m", "--text", "t"), 2, "MODEL+VERIFIER"),
        (("m+bf16", "m+", "--text", "t"), 2, "MODEL+VERIFIER"),
        (("m+bf16", "m+w9", "--text", "t"), 2, "w9"),
        (("m+bf16", "m+bf16", "--text", "t", "--head", "w9"), 2, "--head w9"),
        (("m+bf16", "m+bf16", "--text", "t", "--limit", "0"), 2, "--limit"),
        (("m+bf16", "m+bf16", "--text", "t", "--max-tokens", "-1"), 2, "--max-tokens"),
        (("m+bf16", "m+bf16", "--text", "t", "--prompts", "p"), 2, "not allowed"),
    ],
    ids=lambda value: str(value),
)
def test_bad_usage(arguments, code, named, quasar):
    result = quasar("evaluate", *arguments)
    assert (result.code, result.out) == (code, "")
    assert named in result.error


@pytest.mark.parametrize("name", ["", "absent.txt"])
def test_texts_that_cannot_be_read_are_named(name, quasar, model, tmp_path):
    text = tmp_path / name
    result = quasar("evaluate", f"{model}+bf16", f"{model}+bf16", "--text", text)
    assert result.code == 1 and f"--text {text}: " in result.error


@pytest.mark.parametrize(
    ("content", "options", "code", "named"),
    [
        (b"\xff", (), 1, "not UTF-8"),
        (b"", (), 1, "too short"),
        (b"a", (), 1, "too short"),
        (None, (), 1, "text.txt"),
        (b"some text", ("--max-tokens", "1"), 1, "windows of 1"),
        (b"some text", ("--max-tokens", "513"), 2, "context holds 512"),
    ],
    ids=str,
)
def test_bad_texts(content, options, code, named, quasar, model, tmp_path):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    name = f"{model}+bf16"
    result = quasar("evaluate", name, name, "--text", file, *options)
    assert (result.code, result.out) == (code, "") and named in result.err


def test_a_quantized_folder_refuses_bf16(quasar, quantized, text):
    result = quasar("evaluate", f"{quantized}+w8a8", f"{quantized}+bf16", "--text", text)
    assert (result.code, result.out) == (2, "") and "bf16" in result.error


def test_vocabularies_must_agree(quasar, model, tmp_path, text):
    other = tiny.write_folder(tmp_path / "other", "llama", vocab_size=300)
    write_tokenizer(other)
    result = quasar("evaluate", f"{model}+bf16", f"{other}+bf16", "--text", text)
    assert (result.code, result.out) == (2, "") and "different vocabularies" in result.err


@pytest.fixture
def unloadable(monkeypatch):
    """No verifier can be made: what is refused now was refused before one is."""
    monkeypatch.setattr("quasar.loading.Model.load", None)


@pytest.mark.parametrize("source", ["--text", "--prompts"])
def test_sources_are_read_before_a_verifier_is_made(source, quasar, model, tmp_path, unloadable):
    file = tmp_path / "source"
    file.write_bytes(b"\xff")
    result = quasar("evaluate", f"{model}+bf16", f"{model}+w8a8", source, file)
    assert (result.code, result.out) == (1, "") and "not UTF-8" in result.error


@pytest.mark.parametrize("source", ["--text", "--prompts"])
def test_a_candidate_with_a_smaller_context_is_refused(
    source, quasar, model, tmp_path, text, questions, unloadable
):
    small = tiny.write_folder(
        tmp_path / "small", "llama", vocab_size=VOCABULARY, max_position_embeddings=32
    )
    write_tokenizer(small)
    file = {"--text": text, "--prompts": questions}[source]
    result = quasar("evaluate", f"{model}+bf16", f"{small}+bf16", source, file, "--max-tokens", 40)
    assert (result.code, result.out) == (2, "") and "context holds 32" in result.error


def test_logits_that_are_not_finite_are_an_error_naming_the_candidate(
    quasar, model, text, tmp_path
):
    broken = tiny.write_folder(tmp_path / "broken", "llama", vocab_size=VOCABULARY)
    write_tokenizer(broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"].fill_(3e38)
    save_file(tensors, broken / "model.safetensors")
    arguments = ("--text", text, "--limit", 1, "--json")
    result = quasar("evaluate", f"{model}+bf16", f"{broken}+bf16", *arguments)
    assert (result.code, result.out) == (1, "")
    assert result.error == f"quasar: error: {broken}+bf16: its logits are not finite"
    result = quasar("evaluate", f"{broken}+bf16", f"{model}+bf16", *arguments)
    assert result.error == f"quasar: error: {broken}+bf16: its logits are not finite"
