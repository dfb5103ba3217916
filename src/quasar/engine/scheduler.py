"""Who takes part in the next pass: decoding sequences in turn, and prompts in chunks."""

from __future__ import annotations

from collections import deque

from quasar.cache import KVCache
from quasar.engine.sequence import Sequence


class Scheduler:
    """A queue of waiting requests and the set of running ones.

    A request is admitted when the pool can hold all that it may ever need, so a running one never
    runs out of blocks.
    """

    def __init__(self, cache: KVCache, max_rows: int) -> None:
        self.cache = cache
        self.max_rows = max_rows
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def _admit(self) -> None:
        while self.waiting and self.waiting[0].slots_needed <= self.cache.free_slots:
            sequence = self.waiting.popleft()
            sequence.cache = self.cache.open(sequence.slots_needed)
            sequence.start_clock()
            self.running.append(sequence)

    def select(self) -> list[tuple[Sequence, int]]:
        """Sequences of the next pass, each with the number of pending tokens that it takes.

        Decoding sequences that find no room are the first of the next pass. A quarter of the rows
        is kept for prompts while there are any.
        """
        self._admit()
        prompts = [sequence for sequence in self.running if sequence.prefilling]
        decoding = [sequence for sequence in self.running if not sequence.prefilling]
        left = self.max_rows
        kept = left // 4 if prompts else 0
        chosen: list[tuple[Sequence, int]] = []
        for sequence in decoding:
            rows = 1 + sequence.drafter.draft_tokens
            if rows <= left - kept or (rows <= left and not chosen):
                chosen.append((sequence, 1))
                left -= rows
        for sequence in prompts:
            count = min(sequence.pending, left)
            if count > 0:
                chosen.append((sequence, count))
                left -= count
        served = {id(sequence) for sequence, _ in chosen}
        decoding.sort(key=lambda sequence: id(sequence) in served)
        self.running = decoding + prompts
        return chosen

    def remove(self, sequence: Sequence) -> None:
        """Give the sequence's blocks back."""
        if sequence.cache is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.cache.close(sequence.cache)
