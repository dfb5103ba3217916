"""The whole way on the real embedded model: GGUF in, quantised once, known text out.

The texts were made by the avx512 tier. BF16 sums differ between tiers in their last bits, so other
backends are held to the first words only.
"""

from __future__ import annotations

import json

import pytest

from quasar import loading
from quasar.engine.engine import Engine
from quasar.errors import CheckpointError
from quasar.types import SamplingParams

MODEL = "smollm2-135m"
QUESTION = "Write a Python function that checks whether a number is prime."
START = "```python\ndef is_prime(n):\n"
GOLDEN = {
    "bf16": START
    + "    if isinstance(n, int) and n > 2:\n        return False\n"
    + "    if isinstance(n, bool) and n % 2 == 0:\n        return False\n   ",
    "w8a8": START
    + "    if n < 2:\n        return False\n"
    + "    for i in range(2, int(n**0.5) + 1):\n        if n % i == 0",
}


@pytest.fixture(scope="module")
def model():
    try:
        return loading.Model.open(MODEL)
    except CheckpointError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def prompt(model):
    return model.tokenizer.chat([{"role": "user", "content": QUESTION}])


@pytest.fixture(scope="module")
def backend():
    return loading.make_backend(None)


@pytest.fixture(scope="module")
def quantized(model, tmp_path_factory):
    """A quantised copy of this test's own, so that no cached one can hide a change."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return loading.quantized_copy(model.checkpoint, "w8a8")


def generate(verifier, tokenizer, prompt, drafter, **params):
    engine = Engine(verifier, tokenizer, drafter, cache_tokens=256)
    return engine.complete([prompt], SamplingParams(max_tokens=48, **params))[0]


@pytest.mark.parametrize("precision", ["bf16", "w8a8"])
def test_known_text_with_and_without_drafts(model, prompt, backend, quantized, precision):
    checkpoint = model.checkpoint if precision == "bf16" else quantized
    verifier = loading.load_verifier(checkpoint, precision, precision, backend)
    plain = generate(verifier, model.tokenizer, prompt, "none")
    assert plain.text.startswith(START)
    if backend.isa == "avx512":
        assert plain.text == GOLDEN[precision]
    drafted = generate(verifier, model.tokenizer, prompt, "ngram")
    assert drafted.tokens == plain.tokens
    assert drafted.stats.verify_passes < plain.stats.verify_passes
    sampled = {"temperature": 0.8, "top_p": 0.95, "seed": 5}
    hot = [
        generate(verifier, model.tokenizer, prompt, drafter, **sampled).tokens
        for drafter in ("none", "ngram")
    ]
    assert hot[0] == hot[1] != plain.tokens


def test_smoothing_pays_on_held_out_text(quantized):
    summary = json.loads((quantized.path / "quantization_report.json").read_text())["summary"]
    assert summary["smooth"] == "search"
    assert summary["kl"] < 0.4 * summary["kl_rtn"]
    assert summary["top1"] > summary["top1_rtn"]
    assert summary["perplexity"] < 1.02 * summary["perplexity_bf16"]
