"""A drafter proposes what might come next. One instance serves one request and shares nothing.

The base class counts and times; a drafter only begins, proposes and observes.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from quasar.types import Draft


class Drafter(ABC):
    """Subclass in a file of its own; the class' `NAME` is what users type."""

    NAME: str

    def __init__(self, draft_tokens: int) -> None:
        self.draft_tokens = draft_tokens
        self.seconds = 0.0
        """Time spent drafting and observing."""

    def propose(self, limit: int) -> Draft:
        """A draft of at most min(limit, draft_tokens) nodes after the last observed token.

        The engine checks it (`Draft.check`): a malformed one ends its own request alone.
        """
        budget = min(limit, self.draft_tokens)
        if budget <= 0:
            return Draft()
        start = time.perf_counter()
        draft = self._propose(budget)
        self.seconds += time.perf_counter() - start
        return draft

    def observe(self, tokens: Sequence[int]) -> None:
        """Tokens that now follow: the prompt at first, then what each step emitted."""
        start = time.perf_counter()
        self._observe(tokens)
        self.seconds += time.perf_counter() - start

    @abstractmethod
    def _propose(self, budget: int) -> Draft: ...

    @abstractmethod
    def _observe(self, tokens: Sequence[int]) -> None: ...
