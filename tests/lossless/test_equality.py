"""Rule 3: whatever is drafted, chunked and computed beside a request, tokens and bits are the same.

Every answer is compared with a solo, plain, unchunked run of the same verifier: its tokens, and
the rows of logits that decided them, bit by bit. Tiny random models, every backend that runs here.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from adversaries import DRAFTERS, RecordingEngine, Request, Service
from quasar.checkpoints import open_checkpoint
from quasar.engine.scheduler import Limits
from quasar.kernels import TIERS
from quasar.kernels.base import RaggedBatch
from quasar.types import MAX_DRAFT_NODES, Draft, SamplingParams
from quasar.verification.verifier import load_verifier

CHUNKS = (1, 2, 7, 32, 64, 512)
PROMPTS = (
    (1, 2, 3, 4, 5, 1, 2, 3),
    (7,),
    (9, 9, 9, 9, 9, 9),
    tuple(range(60)),
    (5, 17, 5, 18, 5, 19, 5),
    tuple(i * i % 97 for i in range(90)),
)
PRECISIONS = ("bf16", "w8a8", "w4a8")
TEMPERATURES = (0.0, 0.8)
TOKENS = 24


def sampling(temperature: float, seed: int) -> SamplingParams:
    """Every other seed with filters."""
    filters = {"top_k": 20, "top_p": 0.9, "min_p": 0.02} if seed % 2 else {}
    return SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=seed, **filters)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")

    writers = (tiny.write_folder, tiny.write_quantized, tiny.write_four_bit)
    return {
        (family, precision): open_checkpoint(write(root / f"{family}-{precision}", family, seed=3))
        for family in tiny.CONFIGS
        for precision, write in zip(PRECISIONS, writers, strict=True)
    }


@pytest.fixture(scope="module")
def service_of(checkpoints):
    """The service of a backend, family and precision; models are loaded and solo runs made once."""
    made = {}

    def find(backend, family, precision):
        key = (backend.isa, family, precision)
        if key not in made:
            checkpoint = checkpoints[family, precision]
            made[key] = Service(load_verifier(checkpoint, precision, precision, backend))
        return made[key]

    return find


def matrix_case(drafter: str, chunk: int, temperature: float, count: int, nodes: int):
    """Limits and `count` requests that join and leave at steps drawn from the case itself."""
    draw = random.Random(f"{drafter} {chunk} {temperature} {count}")
    limits = Limits(rows=512, prompt_rows=chunk, shared_prompt_rows=min(chunk, 64))
    requests = [
        Request(
            PROMPTS[draw.randrange(len(PROMPTS))],
            sampling(temperature, draw.randrange(4)),
            drafter,
            draw.randint(1, nodes),
            joins=draw.randrange(1 + 3 * index),
            leaves=draw.choice((None, None, None, draw.randrange(30))),
            seed=index,
        )
        for index in range(count)
    ]
    return limits, requests


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_matrix(service_of, backend, precision, temperature):
    """Drafters x chunk sizes, with 1 to 8 sequences; lower tiers and W4A8 share the cases out."""
    setting = 2 * PRECISIONS.index(precision) + TEMPERATURES.index(temperature)
    step = 8 if precision == "w4a8" else 1 if backend.isa == TIERS[-1] else 4
    cases = list(enumerate(product(DRAFTERS, CHUNKS)))[setting % step :: step]
    most, nodes = (2, 9) if backend.isa == "reference" else (8, MAX_DRAFT_NODES)
    for index, (drafter, chunk) in cases:
        service = service_of(backend, sorted(tiny.CONFIGS)[index % len(tiny.CONFIGS)], precision)
        count = 1 + (index + 3 * setting) % most
        limits, requests = matrix_case(drafter, chunk, temperature, count, nodes)
        assert not service.mismatches(limits, 8 * 128, requests), (drafter, chunk, count)


def test_the_text_is_no_dull_test(service_of, backend):
    params = [sampling(t, 0) for t in TEMPERATURES]
    services = [service_of(backend, family, "w8a8") for family in tiny.CONFIGS]
    answers = [service.truth(PROMPTS[0], p) for service in services for p in params]
    assert len({token for answer in answers for token in answer.tokens}) > 20


@st.composite
def cases(draw, most: int, nodes: int):
    """Any limits, a pool that may make requests wait, mixed drafters and temperatures."""
    requests = [
        Request(
            PROMPTS[draw(st.integers(0, len(PROMPTS) - 1))],
            sampling(draw(st.sampled_from(TEMPERATURES)), draw(st.integers(0, 3))),
            draw(st.sampled_from(DRAFTERS)),
            draw(st.integers(1, nodes)),
            draw(st.integers(0, 12)),
            draw(st.one_of(st.none(), st.integers(0, 40))),
            draw(st.integers(0, 99)),
        )
        for _ in range(draw(st.integers(1, most)))
    ]
    limits = Limits(
        rows=draw(st.integers(nodes + 2, 200)),
        prompt_rows=draw(st.integers(1, 512)),
        shared_prompt_rows=draw(st.integers(1, 64)),
        sequences=draw(st.integers(1, 8)),
    )
    return limits, draw(st.integers(max(map(len, PROMPTS)) + TOKENS, 1000)), requests


@pytest.mark.parametrize("precision", PRECISIONS)
def test_any_company(service_of, backend, precision):
    service = service_of(backend, "llama", precision)
    most, nodes, examples = (3, 8, 4) if backend.isa == "reference" else (8, MAX_DRAFT_NODES, 25)

    @settings(max_examples=examples)
    @given(cases(most, nodes))
    def check(case):
        assert not service.mismatches(*case)

    check()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_largest_trees(service_of, backend, precision):
    """All 64 bits of a node's ancestors: drafts are cut to what may still be emitted, so ask for
    more than that."""
    service = service_of(backend, "qwen2", precision)
    drafters = ("oracle-tree", "random-tree", "oracle")[: 1 if backend.isa == "reference" else 3]
    requests = [
        Request(PROMPTS[0], replace(sampling(t, 1), max_tokens=70), drafter, MAX_DRAFT_NODES)
        for drafter in drafters
        for t in TEMPERATURES[: len(drafters)]
    ]
    largest = 0

    def watched(draft, budget, vocabulary):
        nonlocal largest
        largest = max(largest, len(draft))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Draft, "check", watched)
        assert not service.mismatches(Limits(), 8 * 128, requests)
    assert largest == MAX_DRAFT_NODES


def test_oracles_are_right_and_liars_wrong(service_of, backend):
    """The adversaries are what they say: else the tests above would prove little."""
    service = service_of(backend, "qwen2", "bf16")
    rates = {}
    for name in ("oracle", "oracle-tree", "wrong"):
        engine = RecordingEngine(service.verifier, None, "none", cache_tokens=128)
        request = Request(PROMPTS[0], sampling(0.0, 0), name, 6)
        (sequence,) = service.serve(engine, [request])
        rates[name] = sequence.completion.stats.draft_acceptance_rate
    assert rates["oracle"] == 1.0 and 0.2 < rates["oracle-tree"] < 1.0 and rates["wrong"] == 0.0


def test_a_small_pool_is_served_to_its_last_slot(service_of, backend):
    """The pool has whole blocks: positions must reach as far as its slots do."""
    service = service_of(backend, "llama", "bf16")
    engine = RecordingEngine(service.verifier, None, "none", cache_tokens=1)
    params = SamplingParams(max_tokens=engine.cache.capacity)
    (sequence,) = service.serve(engine, [Request((7,), params, "none")])
    assert sequence.completion.error is None and sequence.finish_reason == "length"
    assert engine.answer(sequence) == service.truth((7,), params)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_logits_are_row_invariant(checkpoints, backend, precision):
    """The same positions give equal bits whether computed one by one or in one chunk."""
    verifier = load_verifier(checkpoints["qwen2", precision], precision, precision, backend)
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = chunked_logits(verifier, tokens, [1] * 40)
    for chunks in ([40], [13, 27], [1, 2, 3, 4, 30], [39, 1]):
        assert torch.equal(chunked_logits(verifier, tokens, chunks), expected)


def chunked_logits(verifier, tokens, chunks):
    """Logits of every position, the tokens taken in chunks of these sizes."""
    cache = verifier.new_cache(len(tokens))
    sequence = cache.open(len(tokens))
    found = []
    for rows in chunks:
        start = sequence.length
        batch = RaggedBatch.chunk(tokens[start : start + rows], start, sequence)
        found.append(verifier.verify(batch, cache).logits.tensor[:rows].clone())
        cache.keep(sequence, range(rows))
    return torch.cat(found)
