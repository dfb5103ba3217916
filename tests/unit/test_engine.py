"""The engine on a scripted verifier: where a request ends, what is counted, who gets which row."""

from __future__ import annotations

import pytest
import torch

from quasar.cache import KVCache
from quasar.engine.engine import Engine
from quasar.engine.scheduler import Limits
from quasar.errors import QuasarError, UsageError
from quasar.kernels.base import AttentionSpec, Buffer
from quasar.kernels.reference import ReferenceBackend
from quasar.models.config import ModelConfig
from quasar.types import SamplingParams
from quasar.verification.verifier import Verification

VOCABULARY = 200
CONFIG = ModelConfig("llama", 8, 8, 1, 1, 1, 4, VOCABULARY, 64, 1e-5, 1e4, tied_embeddings=True)
SPEC = AttentionSpec(1, 1, 4, 0.5, torch.ones(64, 2), torch.zeros(64, 2))


class Scripted:
    """After the token at position p comes `script[p]`, whatever the token was."""

    config = CONFIG

    def __init__(self, script):
        self.script = script
        self.backend = ReferenceBackend()
        self.passes = []

    def new_cache(self, tokens):
        return KVCache(self.backend, SPEC, 1, tokens)

    def verify(self, batch, cache, rows=None):
        self.passes.append(batch.tokens.tolist())
        positions = batch.positions.tolist()
        wanted = range(len(positions)) if rows is None else rows.tolist()
        logits = torch.zeros(max(1, len(wanted)), VOCABULARY)
        for row, index in enumerate(wanted):
            logits[row, self.script[positions[index]]] = 5.0
        return Verification(Buffer.of(logits), [])


class Letters:
    """A tokenizer whose token i is the character chr(i)."""

    eos_ids = frozenset({0})
    special_ids = frozenset()
    strips_space = False

    def __init__(self):
        self.pieces = [chr(i).encode() if i < 128 else b"" for i in range(VOCABULARY)]

    def piece(self, token, skip_special_tokens=True):
        return self.pieces[token]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i) for i in ids)


def text_script(text, prompt):
    """A script whose answer to a prompt of this many tokens is `text`, then end of text."""
    return [1] * (prompt - 1) + [ord(c) for c in text] + [0] * 100


PROMPT = [ord(c) for c in "abcabc"]


def generate(script, drafter="ngram", **params):
    verifier = Scripted(script)
    engine = Engine(verifier, Letters(), drafter)
    request = engine.submit(PROMPT, SamplingParams(**params))
    texts = [progress.text for progress in engine.stream(request)]
    assert "".join(texts) == request.completion.text
    assert engine.cache.free_slots == engine.cache.capacity
    return request.completion, verifier


@pytest.mark.parametrize("drafter", ["none", "ngram"])
class TestEnds:
    """Each inside an accepted draft too: the n-gram drafter gets "abcabc..." right."""

    text = "abcabcabcabcabc"

    def test_end_of_text(self, drafter):
        completion, _ = generate(text_script("abcabcab", 6), drafter)
        assert completion.text == "abcabcab"
        assert completion.finish_reason == "stop"
        assert completion.tokens[-1] == 0 and completion.stats.completion_tokens == 9

    def test_end_of_text_ignored(self, drafter):
        script = text_script("abc", 6)
        completion, _ = generate(script, drafter, ignore_eos=True, max_tokens=7)
        assert completion.tokens == [97, 98, 99, 0, 0, 0, 0]
        assert completion.finish_reason == "length"

    @pytest.mark.parametrize("limit", [1, 2, 3, 5, 8])
    def test_max_tokens(self, drafter, limit):
        completion, verifier = generate(text_script(self.text, 6), drafter, max_tokens=limit)
        assert completion.text == self.text[:limit]
        assert completion.finish_reason == "length"
        assert max(map(len, verifier.passes[1:]), default=0) <= max(limit - 1, 1)

    @pytest.mark.parametrize("stop", ["bca", "c", "cabca", "abcabc"])
    def test_stop_strings(self, drafter, stop):
        completion, _ = generate(
            text_script(self.text, 6), drafter, stop=(stop, "zzz"), max_tokens=15
        )
        assert completion.text == self.text[: self.text.index(stop)]
        assert completion.finish_reason == "stop"
        assert len(completion.tokens) == self.text.index(stop) + len(stop)

    def test_context_limit(self, drafter):
        completion, _ = generate([97 + i % 3 for i in range(64)], drafter, max_tokens=500)
        assert completion.stats.completion_tokens == 64 - 6
        assert completion.finish_reason == "length"

    def test_counters(self, drafter):
        completion, verifier = generate(text_script(self.text, 6), drafter, max_tokens=13)
        stats = completion.stats
        assert stats.prompt_tokens == 6 and stats.completion_tokens == 13
        assert stats.verify_passes == len(verifier.passes) - 1
        if drafter == "none":
            assert stats.verify_passes == 12 and stats.draft_tokens == 0
        else:
            assert stats.verify_passes == 2 and stats.accepted_tokens == stats.draft_tokens == 10
            assert stats.mean_acceptance_length == 6.0


def test_a_held_back_stop_prefix_is_given_out_at_the_end():
    completion, _ = generate(text_script("abcabcab", 6), stop=("abz",))
    assert completion.text == "abcabcab"


def test_several_requests_share_passes_and_keep_apart():
    verifier = Scripted(text_script("abcabcabcabc", 6))
    engine = Engine(verifier, Letters(), "ngram", cache_tokens=160, limits=Limits(rows=8))
    limits = [3, 9, 5, 12]
    requests = [engine.submit(PROMPT, SamplingParams(max_tokens=limit)) for limit in limits]
    while any(request.finish_reason is None for request in requests):
        engine.step()
        engine.cache.check_integrity()
    assert [request.completion.text for request in requests] == [
        "abcabcabcabc"[:limit] for limit in limits
    ]
    assert engine.cache.free_slots == engine.cache.capacity


def test_cancelling_frees_the_cache_and_leaves_others_alone():
    verifier = Scripted(text_script("abcabcabcabc", 6))
    engine = Engine(verifier, Letters(), "none")
    first = engine.submit(PROMPT, SamplingParams(max_tokens=12))
    second = engine.submit(PROMPT, SamplingParams(max_tokens=12))
    engine.step()
    engine.step()
    engine.cancel(first.request_id)
    engine.cancel(first.request_id)
    assert first.finish_reason == "cancelled" and first.completion.text == "ab"
    while second.finish_reason is None:
        engine.step()
    assert second.completion.text == "abcabcabcabc"
    assert engine.cache.free_slots == engine.cache.capacity


def test_closing_a_stream_cancels():
    engine = Engine(Scripted(text_script("abcabc", 6)), Letters(), "none")
    request = engine.submit(PROMPT, SamplingParams())
    stream = engine.stream(request)
    next(stream)
    stream.close()
    assert request.completion.finish_reason == "cancelled"
    assert engine.step() == []


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "empty"),
        ([1] * 64, {}, "64 tokens, the model's context holds 64"),
        ([1, VOCABULARY], {}, "token ids outside"),
        ([1, -1], {}, "token ids outside"),
    ],
)
def test_requests_that_can_never_be_served_are_refused(prompt, params, message):
    engine = Engine(Scripted([0] * 64), Letters())
    with pytest.raises(UsageError, match=message):
        engine.submit(prompt, SamplingParams(**params))


def test_a_request_larger_than_the_cache_is_refused():
    engine = Engine(Scripted([0] * 64), Letters(), cache_tokens=32)
    with pytest.raises(UsageError, match="cache slots"):
        engine.submit([1] * 20, SamplingParams(max_tokens=40))
    with pytest.raises(UsageError, match="stop strings need a tokenizer"):
        Engine(Scripted([0] * 64), None).submit([1], SamplingParams(stop=("x",)))


def test_a_failing_pass_ends_its_requests_and_no_others():
    verifier = Scripted(text_script("abcabcabcabc", 6))
    engine = Engine(verifier, Letters(), "none")
    broken = engine.submit(PROMPT, SamplingParams())
    verify = verifier.verify
    verifier.verify = lambda *args: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert broken.finish_reason == "cancelled"
    verifier.verify = verify
    assert engine.complete([PROMPT], SamplingParams(max_tokens=3))[0].text == "abc"
    assert engine.cache.free_slots == engine.cache.capacity


def test_a_refused_prompt_takes_its_companions_along():
    engine = Engine(Scripted(text_script("abc", 6)), Letters(), "none")
    with pytest.raises(UsageError, match="empty"):
        engine.complete([PROMPT, []], SamplingParams())
    assert not engine.scheduler.waiting and not engine.scheduler.running
    with pytest.raises(UsageError, match="token ids"):
        engine.complete([[1.5]], SamplingParams())
    with pytest.raises(UsageError, match="cache_tokens"):
        Engine(Scripted([0] * 64), None, cache_tokens=0)


def test_streams_may_be_read_in_any_order():
    engine = Engine(Scripted(text_script("abcabcabcabc", 6)), Letters(), "ngram")
    requests = [engine.submit(PROMPT, SamplingParams(max_tokens=n)) for n in (5, 12, 8)]
    streams = [engine.stream(request) for request in requests]
    texts = ["", next(streams[1]).text, ""]
    for index in (2, 0, 1):
        texts[index] += "".join(progress.text for progress in streams[index])
    assert texts == ["abcab", "abcabcabcabc", "abcabcab"]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error(temperature, value):
    verifier = Scripted([1] * 64)
    verify = verifier.verify

    def broken(batch, cache, rows=None):
        result = verify(batch, cache, rows)
        result.logits.tensor.fill_(value)
        return result

    verifier.verify = broken
    engine = Engine(verifier, Letters())
    with pytest.raises(QuasarError, match="logits are not finite"):
        engine.complete([PROMPT], SamplingParams(temperature=temperature, top_p=0.9))


def test_nobody_starves_when_rows_are_scarce():
    verifier = Scripted([97 + i % 3 for i in range(64)])
    engine = Engine(verifier, Letters(), "ngram", cache_tokens=1000, limits=Limits(rows=12))
    requests = [engine.submit(PROMPT, SamplingParams(max_tokens=50)) for _ in range(6)]
    for _ in range(24):
        engine.step()
    progress = [request.completion.stats.completion_tokens for request in requests]
    assert min(progress) > 1 and max(progress) - min(progress) <= 14
