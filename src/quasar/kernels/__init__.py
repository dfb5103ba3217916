"""Kernel backends, found by file name; the first that does not decline is used."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from quasar.errors import UsageError

if TYPE_CHECKING:
    from quasar.kernels.base import Backend

TIERS = ("reference", "scalar", "avx2", "avx512vnni", "avx512")
"""Instruction sets in rising order. QUASAR_ISA lowers the tier, it never raises it."""

PREFERENCE = ("cpu", "reference")


def tier_cap() -> str:
    cap = os.environ.get("QUASAR_ISA", TIERS[-1])
    if cap not in TIERS:
        raise UsageError(f"QUASAR_ISA={cap!r} is unknown; it is one of {', '.join(TIERS)}")
    return cap


def select(threads: int) -> tuple[Backend, dict[str, str]]:
    """The best backend here, and for each one passed over the reason."""
    declined: dict[str, str] = {}
    for name in PREFERENCE:
        made = importlib.import_module(f"quasar.kernels.{name}").probe(tier_cap(), threads)
        if not isinstance(made, str):
            return made, declined
        declined[name] = made
    raise UsageError(f"no kernel backend runs here: {declined}")
