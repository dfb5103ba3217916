"""n-gram drafts (prompt lookup): what followed the last time the newest n tokens stood here.

For n = 3, 2, 1 a dictionary maps each n-gram to the index after its latest occurrence, so a token
costs O(1) to observe and O(1) to look up, however long the context. The n-gram that ends at the
newest token is entered only when its continuation is known: a match is always an earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence

from quasar.drafting.base import Drafter
from quasar.types import Draft

SIZES = (3, 2, 1)


class NgramDrafter(Drafter):
    NAME = "ngram"

    def __init__(self, draft_tokens: int) -> None:
        super().__init__(draft_tokens)
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def _observe(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self._tokens)
            for size in SIZES:
                if size <= end:
                    self._after[tuple(self._tokens[end - size :])] = end
            self._tokens.append(token)

    def _propose(self, budget: int) -> Draft:
        end = len(self._tokens)
        for size in SIZES:
            start = self._after.get(tuple(self._tokens[end - size :])) if size <= end else None
            if start is not None:
                return Draft.chain(self._continuation(start, budget))
        return Draft()

    def _continuation(self, start: int, count: int) -> tuple[int, ...]:
        """`count` tokens from `start` on; a copy that reaches the end goes on with itself."""
        period = len(self._tokens) - start
        return tuple(self._tokens[start + i % period] for i in range(count))
