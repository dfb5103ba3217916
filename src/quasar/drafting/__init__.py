"""Drafters, found by file name: a file with one `Drafter` subclass is a drafter."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from quasar.drafting.base import Drafter
from quasar.errors import UsageError
from quasar.types import MAX_DRAFT_NODES

DEFAULT_DRAFT_TOKENS = 5


@cache
def drafters() -> dict[str, type[Drafter]]:
    """All drafter classes by name."""
    found: dict[str, type[Drafter]] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name == "base":
            continue
        contents = vars(importlib.import_module(f"{__name__}.{module.name}")).values()
        for item in contents:
            if isinstance(item, type) and issubclass(item, Drafter) and item is not Drafter:
                found[item.NAME] = item
    return found


def make_drafter(name: str, draft_tokens: int = DEFAULT_DRAFT_TOKENS) -> Drafter:
    """A fresh drafter for one request. Raises UsageError for a bad name or an absurd length."""
    if name not in drafters():
        raise UsageError(
            f"drafter {name!r} is unknown; it is one of {', '.join(sorted(drafters()))}"
        )
    if not 1 <= draft_tokens <= MAX_DRAFT_NODES:
        raise UsageError(f"draft_tokens={draft_tokens} is out of range 1..{MAX_DRAFT_NODES}")
    return drafters()[name](draft_tokens)
