"""The report card of a quantised folder: what was done to each linear and what it cost."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quasar import __version__
from quasar.quantization.simulation import Fidelity

REPORT_FILE = "quantization_report.json"


@dataclass(frozen=True, slots=True)
class LinearReport:
    """One linear; errors are relative: |quantised output - output| / |output| over sampled rows."""

    name: str
    scheme: str
    smoothing: str
    relative_error: float
    relative_error_rtn: float
    """Before smoothing: round-to-nearest."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything measured by one run of the quantiser."""

    scheme: str
    smooth: str
    """What the folder holds."""
    smooth_requested: str
    """What was asked for; round-to-nearest is kept where it turns out better."""
    group_size: int | None
    bf16: Fidelity
    recipe: Fidelity
    """The requested recipe, also where it was not kept."""
    rtn: Fidelity
    seconds: float
    peak_rss_bytes: int
    source: str
    source_sha256: str
    calibration: str
    calibration_tokens: int
    held_out_tokens: int
    linears: Sequence[LinearReport]

    @property
    def kept(self) -> Fidelity:
        return self.recipe if self.smooth == self.smooth_requested else self.rtn

    def summary(self) -> dict[str, Any]:
        return {
            "scheme": self.scheme,
            "smooth": self.smooth,
            "group_size": self.group_size,
            "kl": self.kept.kl,
            "kl_rtn": self.rtn.kl,
            "top1": self.kept.top1,
            "top1_rtn": self.rtn.top1,
            "perplexity": self.kept.perplexity,
            "perplexity_rtn": self.rtn.perplexity,
            "perplexity_bf16": self.bf16.perplexity,
            "seconds": round(self.seconds, 3),
            "peak_rss_bytes": self.peak_rss_bytes,
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "quasar_version": __version__,
            "summary": self.summary(),
            "source": {"name": self.source, "sha256": self.source_sha256},
            "requested": {"smooth": self.smooth_requested, "kl": self.recipe.kl},
            "text": {
                "name": self.calibration,
                "calibration_tokens": self.calibration_tokens,
                "held_out_tokens": self.held_out_tokens,
            },
            "linears": [asdict(linear) for linear in self.linears],
        }


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes, mapped file pages included."""
    try:
        # VmHWM belongs to this program; ru_maxrss survives exec, so it may be the parent's.
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        found = None
    if found:
        return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
