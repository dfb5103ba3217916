"""The engine on a scripted verifier: where a request ends, what is counted, who gets which row."""

from __future__ import annotations

import pytest

from quasar.drafting.base import Drafter
from quasar.engine.engine import Engine
from quasar.engine.scheduler import Limits
from quasar.errors import QuasarError, UsageError
from quasar.types import Draft, SamplingParams
from scripted import VOCABULARY, Letters, Scripted, text_script

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


def run(engine, *requests):
    while any(request.finish_reason is None for request in requests):
        engine.step()


def test_cancelling_in_every_state():
    verifier = Scripted(text_script("abcabcabcabc", 6))
    limits = Limits(sequences=2, rows=12, prompt_rows=2, shared_prompt_rows=2)
    engine = Engine(verifier, Letters(), "none", cache_tokens=160, limits=limits)
    params = SamplingParams(max_tokens=12)
    decoding, other = engine.submit(PROMPT, params), engine.submit(PROMPT, params)
    while decoding.prefilling:
        engine.step()
    queued, prompt = engine.submit(PROMPT, params), engine.submit([1] * 30, params)
    assert engine.cancel(queued.request_id) and queued.completion.finish_reason == "cancelled"
    engine.step()
    assert engine.cancel(decoding.request_id) and decoding.completion.text == "ab"
    assert not engine.cancel(decoding.request_id)
    engine.step()
    assert prompt.prefilling and 0 < prompt.cached < 30
    assert engine.cancel(prompt.request_id) and prompt.completion.tokens == []
    run(engine, other)
    assert other.completion.text == "abcabcabcabc"
    assert not engine.cancel(other.request_id) and not engine.cancel(999)
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
    engine = Engine(verifier, Letters(), "none", limits=Limits(sequences=1))
    broken = engine.submit(PROMPT, SamplingParams())
    waiting = engine.submit(PROMPT, SamplingParams(max_tokens=3))
    stream = engine.stream(waiting)
    verify, verifier.verify = verifier.verify, lambda *args: 1 / 0
    (progress,) = engine.step()
    assert progress.finish_reason == broken.finish_reason == "error"
    assert isinstance(broken.completion.error, ZeroDivisionError)
    verifier.verify = verify
    assert "".join(progress.text for progress in stream) == "abc"
    with pytest.raises(ZeroDivisionError):
        list(engine.stream(broken))
    assert engine.cache.free_slots == engine.cache.capacity


class Broken(Drafter):
    """Fails as told, after a first step that is right."""

    NAME = "broken"

    def __init__(self, draft, on_observe=None):
        super().__init__(3)
        self.draft, self.on_observe, self.steps = draft, on_observe, 0

    def _propose(self, budget):
        return self.draft if isinstance(self.draft, Draft) else 1 / 0

    def _observe(self, tokens):
        self.steps += 1
        if self.steps == self.on_observe:
            raise OSError("the store is gone")


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (Broken(None), "division by zero"),
        (Broken(Draft.chain((1, 2, 3, 4))), "4 tokens and 4 parents, 3 wanted"),
        (Broken(Draft((1, 2), (-1,))), "2 tokens and 1 parents"),
        (Broken(Draft((1, 2), (1, -1))), "before its parent"),
        (Broken(Draft((1, 1), (-1, -1))), "siblings"),
        (Broken(Draft((VOCABULARY,), (-1,))), "outside 0..199"),
        (Broken(Draft((-1,), (-1,))), "outside 0..199"),
        (Broken(Draft(), on_observe=3), "the store is gone"),
    ],
)
def test_a_failing_drafter_ends_its_own_request_alone(drafter, message):
    engine = Engine(Scripted(text_script("abcabc", 6)), Letters(), cache_tokens=160)
    broken = engine.submit(PROMPT, SamplingParams(), drafter)
    other = engine.submit(PROMPT, SamplingParams())
    with pytest.raises(Exception, match=message):
        list(engine.stream(broken))
    assert broken.completion.finish_reason == "error" and broken.completion.text[0] == "a"
    run(engine, other)
    assert other.completion.text == "abcabc"
    assert engine.cache.free_slots == engine.cache.capacity


def test_an_interrupt_ends_the_pass_and_passes_on():
    verifier = Scripted(text_script("abc", 6))
    engine = Engine(verifier, Letters())
    request = engine.submit(PROMPT, SamplingParams())

    def interrupt(*args):
        raise KeyboardInterrupt

    verifier.verify = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert request.completion.finish_reason == "cancelled"
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
    assert engine.cache.free_slots == engine.cache.capacity


def test_nobody_starves_when_rows_are_scarce():
    verifier = Scripted([97 + i % 3 for i in range(64)])
    engine = Engine(verifier, Letters(), "ngram", cache_tokens=1000, limits=Limits(rows=12))
    requests = [engine.submit(PROMPT, SamplingParams(max_tokens=50)) for _ in range(6)]
    for _ in range(24):
        engine.step()
    progress = [request.completion.stats.completion_tokens for request in requests]
    assert min(progress) > 1 and max(progress) - min(progress) <= 14


def test_a_long_prompt_does_not_hold_up_those_who_decode():
    """Every pass decodes, and none has more rows of prompts than agreed."""
    verifier = Scripted([97 + i % 3 for i in range(64)])
    limits = Limits(shared_prompt_rows=4)
    engine = Engine(verifier, Letters(), "none", cache_tokens=160, limits=limits)
    decoding = engine.submit(PROMPT, SamplingParams(max_tokens=40))
    engine.step()
    long = engine.submit([1] * 50, SamplingParams(max_tokens=2))
    while long.prefilling:
        engine.step()
    assert {len(rows) for rows in verifier.passes[1:]} <= {5, 1 + 50 % 4}
    assert decoding.completion.stats.completion_tokens == 1 + -(-50 // 4)


def test_prompts_share_a_pass():
    """The oldest is sure of half the rows, short ones come first, and nothing is left unused."""
    verifier = Scripted([97 + i % 3 for i in range(64)])
    limits = Limits(prompt_rows=16)
    engine = Engine(verifier, Letters(), "none", cache_tokens=320, limits=limits)
    params = SamplingParams(max_tokens=5)
    oldest, long, short = (engine.submit([1] * n, params) for n in (40, 30, 3))
    engine.step()
    assert (oldest.cached, long.cached, short.cached) == (8, 5, 3)
    assert not short.prefilling and oldest.prefilling
    assert sum(map(len, verifier.passes)) == 16


def test_requests_are_admitted_in_order_as_blocks_free_up():
    verifier = Scripted([97 + i % 3 for i in range(64)])
    engine = Engine(verifier, Letters(), "none", cache_tokens=96)
    first, large, small = (
        engine.submit([1] * 5, SamplingParams(max_tokens=n)) for n in (40, 58, 10)
    )
    engine.step()
    assert engine.cache.free_slots >= small.slots_needed
    assert list(engine.scheduler.waiting) == [large, small], "a large request is not overtaken"
    run(engine, first)
    engine.step()
    assert engine.scheduler.running == [large, small]
    run(engine, large, small)
    assert engine.cache.free_slots == engine.cache.capacity


@pytest.mark.parametrize("name", ["rows", "prompt_rows", "shared_prompt_rows", "sequences"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_absurd_limits_are_refused_by_name(name, value):
    with pytest.raises(UsageError, match=f"{name}="):
        Limits(**{name: value})


def test_drafts_that_no_pass_can_hold_are_refused():
    with pytest.raises(UsageError, match="rows=6 is too few: drafts of 5 tokens need at least 7"):
        Engine(Scripted([0] * 64), None, "ngram", 5, limits=Limits(rows=6))
    engine = Engine(Scripted([0] * 64), None, "none", limits=Limits(rows=4))
    with pytest.raises(UsageError, match="rows=4"):
        engine.submit(PROMPT, SamplingParams(), Broken(Draft()))
    assert not engine.scheduler.requests
