"""Requests of all kinds come, go and fail in any order: no block is lost, nobody is disturbed."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quasar.drafting.base import Drafter
from quasar.drafting.ngram import NgramDrafter
from quasar.drafting.none import NoDrafter
from quasar.engine.engine import Engine
from quasar.engine.scheduler import Limits
from quasar.types import Draft, SamplingParams
from scripted import Scripted

SCRIPT = [1 + p % 7 for p in range(64)]
LIMITS = Limits(rows=14, prompt_rows=9, shared_prompt_rows=5, sequences=4)


class Tree(Drafter):
    """Random trees with tokens that are often right."""

    NAME = "tree"
    fails = False

    def _propose(self, budget: int) -> Draft:
        generator = random.Random(budget)
        if self.fails and generator.random() < 0.5:
            raise RuntimeError("no draft")
        nodes: dict[tuple[int, int], None] = {}
        for _ in range(budget):
            nodes.setdefault((generator.randrange(-1, len(nodes)), generator.randint(1, 7)))
        return Draft(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes))

    def _observe(self, tokens) -> None:
        pass


class Failing(Tree):
    NAME = "failing"
    fails = True


class Service(RuleBasedStateMachine):
    """Three blocks of 32 slots for up to four sequences."""

    def __init__(self):
        super().__init__()
        self.verifier = Scripted(SCRIPT)
        self.verify = self.verifier.verify
        self.engine = Engine(self.verifier, None, "none", cache_tokens=96, limits=LIMITS)
        self.requests = []

    @rule(
        prompt=st.integers(1, 30),
        tokens=st.integers(1, 40),
        kind=st.sampled_from((NoDrafter, NgramDrafter, Tree, Failing)),
        nodes=st.integers(1, 12),
        temperature=st.sampled_from((0.0, 1e-3)),
    )
    def submit(self, prompt, tokens, kind, nodes, temperature):
        params = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True)
        self.requests.append(self.engine.submit([1] * prompt, params, kind(nodes)))

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.engine.step()

    @rule(choice=st.integers(0, 10**6))
    def cancel(self, choice):
        known = {request.request_id: request for request in self.requests}
        wanted = choice % (len(known) + 2)  # ids begin at 1: 0 and the last are unknown
        alive = wanted in known and known[wanted].finish_reason is None
        assert self.engine.cancel(wanted) == alive

    @rule()
    def a_pass_fails(self):
        self.verifier.verify = lambda *args: 1 / 0
        self.engine.step()
        self.verifier.verify = self.verify

    @invariant()
    def every_block_has_one_owner(self):
        cache, running = self.engine.cache, self.engine.scheduler.running
        owned = [block for request in running for block in request.cache.table.tolist()]
        assert sorted(owned + cache._free) == list(range(cache.blocks))
        assert len(running) <= LIMITS.sequences
        assert all(len(rows) <= LIMITS.rows for rows in self.verifier.passes)
        self.verifier.passes.clear()

    @invariant()
    def requests_are_in_one_place(self):
        scheduler = self.engine.scheduler
        alive = [request for request in self.requests if request.finish_reason is None]
        placed = [*scheduler.running, *scheduler.waiting]
        assert {request.request_id for request in placed} == set(scheduler.requests)
        assert set(scheduler.requests) == {request.request_id for request in alive}
        assert [r.request_id for r in scheduler.waiting] == sorted(
            r.request_id for r in scheduler.waiting
        )

    @invariant()
    def answers_follow_the_script(self):
        for request in self.requests:
            start, tokens = request.completion.stats.prompt_tokens, request.completion.tokens
            assert tokens == SCRIPT[start - 1 : start - 1 + len(tokens)]
            assert request.finish_reason != "length" or len(tokens) == request.limit

    def teardown(self):
        """All that is left ends in a bounded number of passes: nobody starves."""
        most = 80 * (1 + len(self.requests))
        while self.engine.scheduler.requests:
            self.engine.step()
            most -= 1
            assert most > 0
        assert self.engine.cache.free_slots == self.engine.cache.capacity


TestService = Service.TestCase
TestService.settings = settings(max_examples=40, stateful_step_count=50)
