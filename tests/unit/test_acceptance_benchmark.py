"""benchmarks/acceptance.py: steps along a text, and judging drafts that leave it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import tiny
from quasar.bench.fidelity import Passage, Reader
from quasar.checkpoints import open_checkpoint
from quasar.drafting import make_drafter
from quasar.drafting.base import Drafter
from quasar.engine.engine import Engine
from quasar.errors import QuasarError, UsageError
from quasar.kernels.base import Buffer, RaggedBatch
from quasar.kernels.reference import ReferenceBackend
from quasar.types import Draft, SamplingParams
from quasar.verification.verifier import load_verifier

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import acceptance
from acceptance import Step, comparison, drafted, judged_lengths, reference_steps


class Scripted(Drafter):
    """Proposes the drafts it is given, cut to the budget, and remembers what it observed."""

    NAME = "scripted"

    def __init__(self, drafts):
        super().__init__(8)
        self.drafts, self.seen = list(drafts), []

    def _propose(self, budget):
        return Draft.chain(self.drafts.pop(0)[:budget])

    def _observe(self, tokens):
        self.seen.append(list(tokens))


def test_steps_follow_the_text_as_far_as_their_drafts_do():
    passage = Passage([1, 2, 10, 11, 12, 13, 14], 2)
    drafter = Scripted([(11, 12, 99), (), (14, 15)])
    steps, lengths = reference_steps(passage, drafter)
    # Two accepted and 13; then 14 without a draft: the answer ends.
    assert steps == [Step(3, Draft.chain((11, 12, 99))), Step(6, Draft())]
    assert lengths == [3, 1]
    assert drafter.seen == [[1, 2, 10], [11, 12, 13], [14]]


def test_a_draft_never_outruns_the_answer():
    steps, lengths = reference_steps(Passage([1, 10, 11, 12], 1), Scripted([(11, 12, 13)]))
    assert (steps, lengths) == ([Step(2, Draft.chain((11,)))], [2])


def test_an_answer_of_one_token_has_no_steps():
    assert reference_steps(Passage([1, 10], 1), Scripted([])) == ([], [])


def test_trees_are_refused():
    class Fork(Scripted):
        def _propose(self, budget):
            return Draft((5, 6), (-1, -1))

    with pytest.raises(UsageError, match="chains"):
        reference_steps(Passage([1, 2, 3, 4, 5], 1), Fork([]))


def test_comparison_counts_totals_and_equal_steps():
    found = comparison([[3, 1], [2]], [[3, 2], [3]])
    assert (found["steps"], found["mean_length"]) == (3, 2.0)
    assert found["ratio"][0] == pytest.approx(6 / 8)
    assert found["ratio"][1] == pytest.approx(2 / 3) and found["ratio"][2] == pytest.approx(4 / 5)
    assert found["equal"] == pytest.approx(1 / 3)


def test_nothing_drafted_is_refused():
    steps = [[Step(2, Draft()), Step(3, Draft.chain((4,)))], [Step(2, Draft())]]
    assert drafted([[1, 2], [1]], steps) == [[2], []]
    with pytest.raises(QuasarError, match="nothing to judge"):
        comparison(drafted([[1]], steps[1:]), drafted([[1]], steps[1:]))


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory):
    torch.set_num_threads(1)
    folder, backend = tmp_path_factory.mktemp("models"), ReferenceBackend()
    dense = open_checkpoint(tiny.write_folder(folder / "dense", "llama"))
    int8 = open_checkpoint(tiny.write_quantized(folder / "int8", "llama"))
    return load_verifier(dense, "bf16", "bf16", backend), load_verifier(
        int8, "w8a8", "w8a8", backend
    )


PROMPT = [3, 14, 15, 9, 3, 14, 15, 9, 3, 14]


@pytest.fixture(scope="module")
def answer(verifiers):
    """The BF16 verifier's greedy answer, and its passes by the engine's own count."""
    engine = Engine(verifiers[0], None, "ngram", 5, 64)
    found = engine.complete([PROMPT], SamplingParams(max_tokens=24, ignore_eos=True))[0]
    return Passage([*PROMPT, *found.tokens], len(PROMPT)), found.stats


def choice(verifier, tokens):
    """The verifier's argmax after tokens, all read in one pass."""
    cache = verifier.new_cache(len(tokens))
    batch = RaggedBatch.chunk(tokens, 0, cache.open(len(tokens)))
    logits = verifier.verify(batch, cache).logits.tensor[len(tokens) - 1 : len(tokens)]
    return verifier.backend.argmax(1, Buffer.of(logits.clone()))[0]


def slow_length(verifier, tokens, draft):
    """One pass a token, from nothing each time."""
    for accepted, token in enumerate(draft):
        if choice(verifier, [*tokens, *draft[:accepted]]) != token:
            return accepted + 1
    return len(draft) + 1


def test_the_steps_are_those_of_the_engine(answer, verifiers):
    passage, stats = answer
    steps, lengths = reference_steps(passage, make_drafter("ngram", 5))
    assert len(steps) == stats.verify_passes
    assert sum(bool(step.draft) for step in steps) == stats.drafted_passes
    assert sum(lengths) - len(steps) == stats.accepted_tokens
    assert judged_lengths(Reader.of(verifiers[0], 64), passage, steps) == lengths


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_drafts_are_judged_after_the_reference_text(verifiers, chunk, monkeypatch):
    """Drafts of 0, 1 and 2 of the verifier's own tokens, which leave this text, and a wrong one."""
    monkeypatch.setattr(acceptance, "CHUNK", chunk)
    tokens, verifier = [(7 * i * i + 3) % 97 for i in range(30)], verifiers[1]
    steps = []
    for start in range(9, 30, 4):
        own = tokens[:start]
        for _ in range(start % 3):
            own = [*own, choice(verifier, own)]
        steps += [Step(start, Draft.chain((*own[start:], 96))), Step(start + 1, Draft())]
    expected = [slow_length(verifier, tokens[: s.start], s.draft.tokens) for s in steps]
    assert set(expected) == {1, 2, 3}
    assert any(
        length > 1 and step.draft.tokens[0] != tokens[step.start]
        for step, length in zip(steps, expected, strict=True)
    )
    assert judged_lengths(Reader.of(verifier, 64), Passage(tokens, 8), steps) == expected
