"""Plain decoding: the drafter that proposes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from quasar.drafting.base import Drafter
from quasar.types import Draft


class NoDrafter(Drafter):
    NAME = "none"

    def __init__(self, draft_tokens: int) -> None:
        super().__init__(0)

    def _propose(self, budget: int) -> Draft:
        return Draft()

    def _observe(self, tokens: Sequence[int]) -> None:
        pass
