"""`quasar generate`: options, output, refusals."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tiny
from byte_tokenizer import VOCABULARY, write_tokenizer

FIELDS = {
    "model",
    "verifier",
    "drafter",
    "isa",
    "threads",
    "prompt_tokens",
    "completion_tokens",
    "text",
    "token_ids",
    "finish_reason",
    "seed",
    "prefill_seconds",
    "decode_seconds",
    "decode_tokens_per_second",
    "verify_passes",
    "mean_acceptance_length",
    "mean_acceptance_length_drafted",
    "draft_tokens",
    "accepted_tokens",
    "draft_acceptance_rate",
    "peak_rss_bytes",
}
PROMPT = ("-p", "ab ab ab ab ab")
BF16 = ("--verifier", "bf16", "--threads", "1")


def test_json_is_one_object_with_every_field(quasar, model):
    result = quasar("generate", model, *PROMPT, *BF16, "--max-tokens", 20, "--seed", 7, "--json")
    assert result.code == 0 and result.out.count("\n") == 1
    found = result.json
    assert found.keys() >= FIELDS
    assert found["verifier"] == "bf16" and found["drafter"] == "ngram" and found["seed"] == 7
    assert found["prompt_tokens"] == len("<user>ab ab ab ab ab\n<assistant>")
    assert len(found["token_ids"]) == found["completion_tokens"] <= 20
    decoded = found["completion_tokens"] - 1
    assert found["mean_acceptance_length"] == decoded / found["verify_passes"]
    assert found["peak_rss_bytes"] > 50e6


def test_text_streams_to_stdout_and_statistics_to_stderr(quasar, model):
    arguments = ("generate", model, *PROMPT, *BF16, "--max-tokens", 20)
    text = quasar(*arguments, "--json").json["text"]
    result = quasar(*arguments)
    assert result.code == 0
    assert result.out == (text if text.endswith("\n") else text + "\n")
    assert "acceptance length" in result.err and "peak memory" in result.err


def test_drafter_changes_no_token(quasar, model):
    arguments = ("generate", model, *PROMPT, *BF16, "--max-tokens", 30, "--temperature", 0.7)
    plain = quasar(*arguments, "--json", "--drafter", "none").json
    drafted = quasar(*arguments, "--json", "--drafter", "ngram", "--draft-tokens", 3).json
    assert plain["token_ids"] == drafted["token_ids"]
    assert plain["draft_tokens"] == 0


def test_raw_prompt_has_no_template(quasar, model):
    found = quasar("generate", model, *PROMPT, *BF16, "--max-tokens", 1, "--raw", "--json").json
    assert found["prompt_tokens"] == len(PROMPT[1])
    assert found["mean_acceptance_length"] == found["decode_tokens_per_second"] == 0.0


def test_without_a_template_the_prompt_is_raw_and_said_so(quasar, untemplated):
    result = quasar("generate", untemplated, *PROMPT, *BF16, "--max-tokens", 1, "--json")
    assert result.json["prompt_tokens"] == len(PROMPT[1])
    assert "has no chat template" in result.err


def test_stop_string_ends_the_text_before_it(quasar, model):
    arguments = ("generate", model, *PROMPT, *BF16, "--max-tokens", 40, "--json")
    whole = quasar(*arguments).json["text"]
    stop = whole[10:13]
    found = quasar(*arguments, "--stop", stop, "--stop", "never there").json
    assert found["text"] == whole[: whole.index(stop)]
    assert found["finish_reason"] == "stop"


def test_prompt_from_standard_input(model):
    command = [sys.executable, "-m", "quasar", "generate", str(model), "-p", "-", *BF16]
    arguments = ["--max-tokens", "3", "--json"]
    from_stdin = subprocess.run([*command, *arguments], input=b"ab \xc3\xa9", capture_output=True)
    assert from_stdin.returncode == 0, from_stdin.stderr
    assert b'"prompt_tokens": %d,' % len(b"<user>ab \xc3\xa9\n<assistant>") in from_stdin.stdout
    broken = subprocess.run([*command, *arguments], input=b"ab \xff", capture_output=True)
    assert (broken.returncode, broken.stdout) == (2, b"")
    assert broken.stderr == b"quasar: error: standard input is not UTF-8 (byte 3)\n"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--max-tokens", "-1"), "--max-tokens"),
        (("--max-tokens", "0"), "--max-tokens"),
        (("--max-tokens", "1.5"), "--max-tokens"),
        (("--temperature", "nan"), "--temperature"),
        (("--temperature", "-0.1"), "--temperature: '-0.1' is not a number from 0 to 100"),
        (("--temperature", "inf"), "--temperature"),
        (("--top-k", "-1"), "--top-k"),
        (("--top-p", "0"), "--top-p: '0' is not a number above 0 to 1"),
        (("--top-p", "1.01"), "--top-p"),
        (("--min-p", "2"), "--min-p"),
        (("--seed", "-1"), "--seed"),
        (("--seed", str(2**64)), "--seed"),
        (("--stop", ""), "--stop"),
        (("--stop", "\udcff"), "--stop: it is not UTF-8"),
        (("--threads", "0"), "--threads"),
        (("--threads", "100000"), "--threads"),
        (("--draft-tokens", "1000"), "--draft-tokens"),
        (("--draft-tokens", "0"), "--draft-tokens"),
        (("--drafter", "crystal-ball"), "crystal-ball"),
        (("--verifier", "w1a1"), "w1a1"),
        (("--head", "w1a1"), "w1a1"),
        (("-p", ""), "prompt is empty"),
        (("-p", " \n"), "prompt is empty"),
        (("-p", "\udcff"), "not UTF-8"),
        (("-p", "x" * 600), "context"),
    ],
    ids=lambda value: str(value)[:40].encode("ascii", "replace").decode(),
)
def test_absurd_options_are_refused_by_name(options, named, quasar, model):
    result = quasar("generate", model, *PROMPT, *BF16, *options)
    assert (result.code, result.out) == (2, "")
    assert named in result.error


def test_a_quantized_folder_has_no_bf16_verifier(quasar, quantized):
    assert quasar("generate", quantized, *PROMPT, "--max-tokens", 2).code == 0
    result = quasar("generate", quantized, *PROMPT, *BF16)
    assert (result.code, result.out) == (2, "")
    assert "bf16" in result.error


def test_a_missing_model_is_named(quasar, tmp_path):
    result = quasar("generate", tmp_path / "absent.gguf", *PROMPT)
    assert (result.code, result.out) == (1, "")
    assert "absent.gguf" in result.error


def test_a_template_that_renders_nothing_is_refused_before_the_weights_load(
    quasar, tmp_path, monkeypatch
):
    folder = tiny.write_folder(tmp_path / "mute", "llama", vocab_size=VOCABULARY)
    write_tokenizer(folder, template="{# nothing #}")
    monkeypatch.setattr("quasar.loading.load_verifier", None)
    result = quasar("generate", folder, *PROMPT, *BF16)
    assert (result.code, result.out) == (2, "") and "renders nothing" in result.error
