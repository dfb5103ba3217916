"""Drafters that know the answer or do all they can to spoil it, and an engine that keeps evidence.

For the tests here and for `benchmarks/lossless.py`.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field

from quasar.drafting.base import Drafter
from quasar.drafting.ngram import NgramDrafter
from quasar.drafting.none import NoDrafter
from quasar.engine.engine import Engine
from quasar.types import Draft, SamplingParams


class Adversary(Drafter):
    """Knows the tokens that plain decoding emits; subclasses say what to make of them."""

    def __init__(self, draft_tokens: int, prompt, truth, vocabulary: int, seed: int) -> None:
        super().__init__(draft_tokens)
        self.truth = (*prompt, *truth)
        self.seen = 0
        self.vocabulary = vocabulary
        self.random = random.Random(seed)

    def _observe(self, tokens) -> None:
        self.seen += len(tokens)

    def coming(self, count: int) -> tuple[int, ...]:
        """What plain decoding emits next, as far as it is known."""
        return self.truth[self.seen : self.seen + count]

    def token(self) -> int:
        return self.random.randrange(self.vocabulary)

    def tree(self, nodes: int, path, forbidden=None) -> Draft:
        """A random tree of `nodes` nodes with `path` in it: anywhere, or as its last nodes."""
        children: dict[tuple[int, int], int] = {}

        def child(parent: int, token: int) -> int:
            return children.setdefault((parent, token), len(children))

        def noise() -> None:
            parent, token = self.random.randrange(-1, len(children)), self.token()
            if parent >= 0 or token != forbidden:
                child(parent, token)

        steps = [False] * (nodes - len(path)) + [True] * len(path)
        if self.random.random() < 0.5:
            self.random.shuffle(steps)
        end, left = -1, list(path)
        for true_step in steps:
            if true_step:
                end = child(end, left.pop(0))
            else:
                noise()
        while len(children) < nodes:
            noise()
        return Draft(tuple(token for _, token in children), tuple(parent for parent, _ in children))


class RandomChain(Adversary):
    NAME = "random-chain"

    def _propose(self, budget: int) -> Draft:
        return Draft.chain(tuple(self.token() for _ in range(self.random.randint(0, budget))))


class RandomTree(Adversary):
    """Any shape; now and then the start of the truth is in it."""

    NAME = "random-tree"

    def _propose(self, budget: int) -> Draft:
        nodes = self.random.randint(0, budget)
        return self.tree(nodes, self.coming(self.random.randint(0, min(nodes, 2))))


class OracleTree(Adversary):
    """The whole truth, somewhere in a tree."""

    NAME = "oracle-tree"

    def _propose(self, budget: int) -> Draft:
        return self.tree(budget, self.coming(self.random.randint(1, budget)))


class Oracle(Adversary):
    """The truth as a chain."""

    NAME = "oracle"

    def _propose(self, budget: int) -> Draft:
        return Draft.chain(self.coming(budget))


class Wrong(Adversary):
    """A tree in which no first step is the truth."""

    NAME = "wrong"

    def _propose(self, budget: int) -> Draft:
        (true_token,) = self.coming(1)
        return self.tree(budget, (), forbidden=true_token)


ADVERSARIES = {kind.NAME: kind for kind in (RandomChain, RandomTree, OracleTree, Oracle, Wrong)}
DRAFTERS = ("none", "ngram", *ADVERSARIES)


@dataclass(frozen=True)
class Answer:
    """Tokens, and of each the digest of the row of logits that decided it."""

    tokens: tuple[int, ...]
    bits: tuple[bytes, ...]

    def starts_with(self, other: Answer) -> bool:
        count = len(other.tokens)
        return self.tokens[:count] == other.tokens and self.bits[:count] == other.bits


class RecordingEngine(Engine):
    """Keeps a digest of each row of logits that decided a token."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.bits: dict[int, list[bytes]] = {}

    def _judge(self, part, logits, greedy):
        verdict = super()._judge(part, logits, greedy)
        kept = self.bits.setdefault(part.sequence.request_id, [])
        for row in (0, *(node + 1 for node in verdict.path)):
            data = logits.tensor[part.logits + row].numpy().tobytes()
            kept.append(hashlib.blake2b(data, digest_size=16).digest())
        return verdict

    def answer(self, sequence) -> Answer:
        tokens = tuple(sequence.completion.tokens)
        kept = self.bits.get(sequence.request_id, [])
        return Answer(tokens, tuple(kept[: len(tokens)]))


@dataclass(frozen=True)
class Request:
    """What is asked, who drafts, after which step it joins and is cancelled."""

    prompt: tuple[int, ...]
    params: SamplingParams
    drafter: str = "none"
    draft_tokens: int = 5
    joins: int = 0
    leaves: int | None = None
    seed: int = 0


@dataclass
class Service:
    """Serves requests side by side and compares each with its solo, plain, unchunked run."""

    verifier: object
    known: dict[tuple, Answer] = field(default_factory=dict)

    def truth(self, prompt, params) -> Answer:
        if (prompt, params) not in self.known:
            engine = RecordingEngine(
                self.verifier, None, "none", cache_tokens=len(prompt) + params.max_tokens
            )
            sequence = engine.submit(list(prompt), params)
            list(engine.stream(sequence))
            self.known[prompt, params] = engine.answer(sequence)
        return self.known[prompt, params]

    def drafter(self, request: Request) -> Drafter:
        plain = {"none": NoDrafter, "ngram": NgramDrafter}
        if request.drafter in plain:
            return plain[request.drafter](request.draft_tokens)
        truth = self.truth(request.prompt, request.params).tokens
        vocabulary = self.verifier.config.vocab_size
        kind = ADVERSARIES[request.drafter]
        return kind(request.draft_tokens, request.prompt, truth, vocabulary, request.seed)

    def serve(self, engine: RecordingEngine, requests) -> list:
        """The sequences of the requests, all ended."""
        sequences = [None] * len(requests)
        step = 0
        while any(s is None or s.finish_reason is None for s in sequences):
            for index, request in enumerate(requests):
                if sequences[index] is None and request.joins <= step:
                    drafter = self.drafter(request)
                    sequences[index] = engine.submit(list(request.prompt), request.params, drafter)
                if request.leaves == step and sequences[index] is not None:
                    engine.cancel(sequences[index].request_id)
            engine.step()
            step += 1
        return sequences

    def mismatches(self, limits, cache_tokens: int, requests) -> list[Request]:
        """Requests whose tokens or bits differ from their solo run, or that end too early."""
        engine = RecordingEngine(
            self.verifier, None, "none", cache_tokens=cache_tokens, limits=limits
        )
        wrong = []
        for request, sequence in zip(requests, self.serve(engine, requests), strict=True):
            truth, answer = self.truth(request.prompt, request.params), engine.answer(sequence)
            whole = sequence.finish_reason == "cancelled" or len(answer.tokens) == len(truth.tokens)
            if sequence.completion.error is not None:
                raise sequence.completion.error
            accepted = sequence.completion.stats.accepted_tokens
            honest = request.drafter != "wrong" or accepted == 0
            if not (whole and honest and truth.starts_with(answer)):
                wrong.append(request)
        assert engine.cache.free_slots == engine.cache.capacity and not engine.scheduler.requests
        engine.cache.check_integrity()
        return wrong
