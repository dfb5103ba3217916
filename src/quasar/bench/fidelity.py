"""How faithful a verifier is to another: both read the same tokens, their forecasts are compared.

With p of the reference, q of the candidate and x the token that really follows, over N positions:
perplexity = exp(-mean log q(x)), KL = mean sum p (log p - log q), and top-1 is the share of
positions where both prefer the same token. A near tie is a position where the reference's two best
logits lie within 0.25: there a disagreement says little. Logarithms and sums are in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quasar.cache import KVCache, SequenceCache
from quasar.errors import QuasarError
from quasar.kernels.base import RaggedBatch
from quasar.verification.verifier import Verifier

CHUNK = 64
"""Rows of a pass: their logits in fp64 stay under 100 MB for the largest vocabularies."""

NEAR_TIE = 0.25


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens that both verifiers see; those from index `start` (at least 1) on are predicted."""

    tokens: list[int]
    start: int


@dataclass(slots=True)
class Fidelity:
    """Running sums over all predicted tokens."""

    tokens: int = 0
    log_loss: float = 0.0
    reference_log_loss: float = 0.0
    divergence: float = 0.0
    agreed: int = 0
    clear: int = 0
    """Positions that are no near tie."""
    clear_agreed: int = 0

    def add(self, reference: Tensor, candidate: Tensor, following: Tensor) -> None:
        """Logits [n, vocabulary] of both, and the tokens [n] that follow."""
        log_p = torch.log_softmax(reference.double(), dim=-1)
        log_q = torch.log_softmax(candidate.double(), dim=-1)
        index = following[:, None]
        best = reference.topk(2, dim=-1).values
        clear = best[:, 0] - best[:, 1] > NEAR_TIE
        agreed = reference.argmax(dim=-1) == candidate.argmax(dim=-1)
        self.tokens += following.shape[0]
        self.log_loss -= float(log_q.gather(1, index).sum())
        self.reference_log_loss -= float(log_p.gather(1, index).sum())
        self.divergence += float((log_p.exp() * (log_p - log_q)).sum())
        self.agreed += int(agreed.sum())
        self.clear += int(clear.sum())
        self.clear_agreed += int((agreed & clear).sum())

    def figures(self) -> dict[str, float | None]:
        """The JSON fields of `quasar evaluate`; None where nothing was a clear preference."""
        return {
            "tokens": self.tokens,
            "perplexity": _exp(self.log_loss / self.tokens),
            "reference_perplexity": _exp(self.reference_log_loss / self.tokens),
            "kl": self.divergence / self.tokens,
            "top1": self.agreed / self.tokens,
            "top1_without_near_ties": self.clear_agreed / self.clear if self.clear else None,
        }


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


@dataclass(frozen=True, slots=True)
class Reader:
    """A verifier that reads one passage after another, chunk by chunk."""

    verifier: Verifier
    cache: KVCache
    sequence: SequenceCache

    @classmethod
    def of(cls, verifier: Verifier, tokens: int) -> Reader:
        cache = verifier.new_cache(tokens)
        return cls(verifier, cache, cache.open(tokens))

    def read(self, tokens: Sequence[int], start: int, rows: Tensor) -> Tensor:
        """Logits after `rows` of these tokens, which follow the first `start` of the passage."""
        self.sequence.length = start
        batch = RaggedBatch.chunk(list(tokens), start, self.sequence)
        logits = self.verifier.verify(batch, self.cache, rows).logits
        self.cache.keep(self.sequence, range(len(tokens)))
        return logits.tensor[: rows.shape[0]]


def compare(
    reference: Verifier,
    candidates: Sequence[Verifier],
    passages: Sequence[Passage],
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> list[Fidelity]:
    """Read every passage with all verifiers; one result a candidate."""
    longest = max(len(passage.tokens) for passage in passages)
    readers = [Reader.of(verifier, longest) for verifier in (reference, *candidates)]
    results = [Fidelity() for _ in candidates]
    for done, passage in enumerate(passages, 1):
        for start in range(0, len(passage.tokens) - 1, CHUNK):
            _compare_chunk(readers, passage, start, results)
        watch(done, len(passages))
    return results


def _compare_chunk(
    readers: Sequence[Reader], passage: Passage, start: int, results: Sequence[Fidelity]
) -> None:
    end = min(start + CHUNK, len(passage.tokens) - 1)
    first = max(passage.start - 1, start)
    # A chunk that lies wholly in the prompt is only cached: one row of logits is the least.
    rows = torch.arange(min(first, end - 1), end) - start
    logits = [reader.read(passage.tokens[start:end], start, rows) for reader in readers]
    if first >= end:
        return
    following = torch.tensor(passage.tokens)[rows + start + 1]
    for result, own in zip(results, logits[1:], strict=True):
        result.add(logits[0], own, following)


def windows(tokens: Sequence[int], prefix: Sequence[int], size: int) -> list[Passage]:
    """Cut a text into passages of `size` tokens, each after `prefix` (the beginning-of-text token).

    Without a prefix a passage's first token is seen, not predicted. The last may be shorter.
    """
    step = size - len(prefix)
    if step < 1 or size < 2:
        raise QuasarError(f"windows of {size} tokens leave nothing to predict")
    pieces = [[*prefix, *tokens[i : i + step]] for i in range(0, len(tokens), step)]
    start = max(len(prefix), 1)
    return [Passage(piece, start) for piece in pieces if len(piece) > start]
