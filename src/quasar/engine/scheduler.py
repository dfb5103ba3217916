"""Who takes part in the next pass: decoding sequences in turn, and prompts in chunks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from quasar.cache import KVCache
from quasar.engine.sequence import Sequence
from quasar.errors import UsageError


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one pass may do. Refuses values that make no sense."""

    rows: int = 512
    """Of a pass. A decoding sequence takes one, and one for each drafted token."""
    prompt_rows: int = 512
    """Of prompts in a pass, while nothing decodes."""
    shared_prompt_rows: int = 64
    """Of prompts in a pass that decodes too: what a prompt may add to the wait for a token.

    Products reach their full rate at about 32 rows, so smaller chunks only cost attention more
    reads of the cache.
    """
    sequences: int = 64
    """That run at a time; the others wait in order."""

    def __post_init__(self) -> None:
        for name in ("rows", "prompt_rows", "shared_prompt_rows", "sequences"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UsageError(f"{name}={value!r} is out of range: at least 1")

    def check_drafts(self, draft_tokens: int) -> None:
        """Raises UsageError unless a decoding sequence and a row of a prompt fit into a pass."""
        if self.rows < draft_tokens + 2:
            raise UsageError(
                f"rows={self.rows} is too few: drafts of {draft_tokens} tokens need at least "
                f"{draft_tokens + 2}"
            )


class Scheduler:
    """A queue of waiting requests and the set of running ones.

    A request is admitted when the pool can hold all that it may ever need, so a running one never
    runs out of blocks. Requests are admitted in the order of their arrival: a large one is not
    overtaken for ever by small ones.
    """

    def __init__(self, cache: KVCache, limits: Limits) -> None:
        self.cache = cache
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.requests: dict[int, Sequence] = {}
        """All of them by id, until they end."""

    def add(self, sequence: Sequence) -> None:
        self.requests[sequence.request_id] = sequence
        self.waiting.append(sequence)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.limits.sequences:
            if self.waiting[0].slots_needed > self.cache.free_slots:
                return
            sequence = self.waiting.popleft()
            sequence.cache = self.cache.open(sequence.slots_needed)
            sequence.start_clock()
            self.running.append(sequence)

    def select(self) -> list[tuple[Sequence, int]]:
        """Sequences of the next pass, each with the number of pending tokens that it takes."""
        self._admit()
        prompts = [sequence for sequence in self.running if sequence.prefilling]
        decoding = [sequence for sequence in self.running if not sequence.prefilling]
        chosen, left = self._decoders(decoding, bool(prompts))
        most = self.limits.shared_prompt_rows if chosen else self.limits.prompt_rows
        served = {id(sequence) for sequence, _ in chosen}
        decoding.sort(key=lambda sequence: id(sequence) in served)
        self.running = decoding + prompts
        return chosen + _chunks(prompts, min(left, most))

    def _decoders(
        self, decoding: list[Sequence], prompts: bool
    ) -> tuple[list[tuple[Sequence, int]], int]:
        """Who decodes, and the rows left. Who finds no room is among the first of the next pass.

        While prompts wait, a quarter of the rows (at most as many as prompts may take, at least
        one) is theirs, but for what the first sequence needs.
        """
        left, limits = self.limits.rows, self.limits
        kept = max(1, min(limits.shared_prompt_rows, left // 4)) if prompts else 0
        chosen: list[tuple[Sequence, int]] = []
        for sequence in decoding:
            rows = 1 + sequence.draft_limit
            if rows <= left - (kept if chosen else min(kept, 1)):
                chosen.append((sequence, 1))
                left -= rows
        return chosen, left

    def remove(self, sequence: Sequence) -> None:
        """Forget a request and give its blocks back."""
        del self.requests[sequence.request_id]
        if sequence.cache is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.cache.close(sequence.cache)


def _chunks(prompts: list[Sequence], rows: int) -> list[tuple[Sequence, int]]:
    """The next tokens of prompts, `rows` in all: the oldest is sure of half, the shortest go first.

    So a short prompt is never stuck behind a long one, and a long one is never overtaken for ever.
    """
    if not prompts:
        return []
    oldest, others = prompts[0], sorted(prompts[1:], key=lambda sequence: sequence.pending)
    free = rows - min(oldest.pending, -(-rows // 2))
    chosen = []
    for sequence in others:
        chosen.append((sequence, min(sequence.pending, free)))
        free -= chosen[-1][1]
    taken = sum(count for _, count in chosen)
    chosen.append((oldest, min(oldest.pending, rows - taken)))
    return [(sequence, count) for sequence, count in chosen if count > 0]
