"""Rule 3: speculative output equals plain decoding of the same verifier, token for token.

Over drafters (also wrong, random-tree and oracle ones), verifiers, temperatures, batch sizes and
chunk sizes, on tiny random models of every family and every backend that runs here.
"""

from __future__ import annotations

import random

import pytest
import torch

import tiny
from quasar.checkpoints import open_checkpoint
from quasar.drafting.base import Drafter
from quasar.engine import engine as engine_module
from quasar.engine.engine import Engine
from quasar.kernels.base import RaggedBatch
from quasar.types import Draft, SamplingParams
from quasar.verification.verifier import load_verifier

PROMPTS = [
    [1, 2, 3, 4, 5, 1, 2, 3],
    [7],
    [9, 9, 9, 9, 9, 9],
    list(range(60)),
    [5, 17, 5, 18, 5, 19, 5],
]
SAMPLING = {
    "greedy": SamplingParams(max_tokens=24),
    "hot": SamplingParams(max_tokens=24, temperature=1.0, seed=11),
    "filtered": SamplingParams(
        max_tokens=24, temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=5
    ),
}


class RandomTree(Drafter):
    """Random tokens in random trees, now and then with the token of a given truth in it."""

    NAME = "random-tree"
    truth: tuple[int, ...] = ()

    def __init__(self, draft_tokens: int) -> None:
        super().__init__(draft_tokens)
        self._seen: list[int] = []
        self._random = random.Random(draft_tokens)

    def _observe(self, tokens) -> None:
        self._seen += tokens

    def _propose(self, budget: int) -> Draft:
        tokens, parents, used = [], [], set()
        for node in range(budget):
            parent = self._random.randrange(-1, node)
            depth, above = 0, parent
            while above >= 0:
                depth, above = depth + 1, parents[above]
            at = len(self._seen) + depth
            known = at < len(self.truth) and self._random.random() < 0.7
            token = self.truth[at] if known else self._random.randrange(97)
            if (parent, token) not in used:
                used.add((parent, token))
                tokens.append(token)
                parents.append(parent)
            else:
                break
        return Draft(tuple(tokens), tuple(parents))


class Oracle(RandomTree):
    """The truth as a chain."""

    NAME = "oracle"

    def _propose(self, budget: int) -> Draft:
        start = len(self._seen)
        return Draft.chain(self.truth[start : start + budget])


class Wrong(RandomTree):
    """Never the truth."""

    NAME = "wrong"

    def _propose(self, budget: int) -> Draft:
        start = len(self._seen)
        chain = self.truth[start : start + budget]
        return Draft.chain(tuple((token + 1) % 97 for token in chain))


ADVERSARIES = {drafter.NAME: drafter for drafter in (RandomTree, Oracle, Wrong)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        (family, precision): writer(root / f"{family}-{precision}", family, seed=3)
        for family in tiny.CONFIGS
        for precision, writer in (("bf16", tiny.write_folder), ("w8a8", tiny.write_quantized))
    }


def plain(verifier, prompt, params):
    return Engine(verifier, None, "none").complete([prompt], params)[0].tokens


@pytest.mark.parametrize("sampling", sorted(SAMPLING))
@pytest.mark.parametrize("precision", ["bf16", "w8a8"])
@pytest.mark.parametrize("family", sorted(tiny.CONFIGS))
def test_speculation_changes_no_token(folders, backend, family, precision, sampling, monkeypatch):
    verifier = load_verifier(
        open_checkpoint(folders[family, precision]), precision, precision, backend
    )
    params = SAMPLING[sampling]
    truth = [plain(verifier, prompt, params) for prompt in PROMPTS]
    assert len({token for tokens in truth for token in tokens}) > 6, "the text is too dull a test"
    for rows in (8, 64):
        engine = Engine(verifier, None, "ngram", 5, max_rows=rows)
        found = engine.complete(PROMPTS, params)
        assert [completion.tokens for completion in found] == truth
        engine.cache.check_integrity()
        assert engine.cache.free_slots == engine.cache.capacity
    for name, adversary in ADVERSARIES.items():
        for prompt, tokens in list(zip(PROMPTS, truth, strict=True))[::2]:
            drafter = type(name, (adversary,), {"truth": (*prompt, *tokens)})
            monkeypatch.setattr(engine_module, "make_drafter", lambda n, k, d=drafter: d(k))
            completion = Engine(verifier, None, name, 7).complete([prompt], params)[0]
            assert completion.tokens == tokens, name
            if name == "oracle":
                assert completion.stats.draft_acceptance_rate == 1.0
            if name == "wrong":
                assert completion.stats.accepted_tokens == 0


@pytest.mark.parametrize("precision", ["bf16", "w8a8"])
def test_logits_are_row_invariant(folders, backend, precision):
    """The same positions give equal bits whether computed one by one or in one chunk."""
    checkpoint = open_checkpoint(folders["qwen2", precision])
    verifier = load_verifier(checkpoint, precision, precision, backend)
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
        batch = RaggedBatch.chunk(tokens[start : start + rows], start, sequence.table)
        found.append(verifier.verify(batch, cache).logits.tensor[:rows].clone())
        cache.keep(sequence, range(rows))
    return torch.cat(found)
