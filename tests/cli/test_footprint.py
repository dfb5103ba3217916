"""`quasar info` says before the start what `quasar generate` then takes at its peak."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import tiny
from byte_tokenizer import write_tokenizer

TOLERANCE = 0.1
"""Relative. SmolLM2-135M and Qwen2.5-Coder-0.5B were within 0.05, in either precision."""
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 30_000,
    "max_position_embeddings": 4096,
}
PROMPT, TOKENS = "words " * 200, 20


def quasar(*arguments):
    command = [sys.executable, "-m", "quasar", *map(str, arguments), "--json", "--threads", "2"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("precision", "write"), [("bf16", tiny.write_folder), ("w8a8", tiny.write_quantized)]
)
def test_the_peak_is_known_before(precision, write, tmp_path):
    write(tmp_path, "llama", **SHAPE)
    write_tokenizer(tmp_path)
    options = ("--raw", "--max-tokens", TOKENS, "--verifier", precision)
    answer = quasar("generate", tmp_path, "-p", PROMPT, *options)
    assert answer["prompt_tokens"] == len(PROMPT)
    info = quasar("info", tmp_path, "--context", len(PROMPT) + TOKENS)
    needs = info["verifiers"][precision]
    assert info["memory_context"] == len(PROMPT) + TOKENS
    assert needs["peak_bytes"] == pytest.approx(answer["peak_rss_bytes"], rel=TOLERANCE)
    own = needs["peak_bytes"] - needs["program_bytes"]
    assert own > 0.3 * needs["peak_bytes"], "the model is too small to test its memory"
