"""The report card of a quantised folder: what was done to each linear and what it cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from quasar import __version__
from quasar.quantization.calibrate import CalibrationText
from quasar.quantization.simulation import Fidelity
from quasar.quantization.trial import TrialResult

REPORT_FILE = "quantization_report.json"


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one run of the quantiser did and measured."""

    scheme: str
    smooth: str
    """What the folder holds."""
    requested: str
    """What was asked for; where it turns out worse, round-to-nearest is kept."""
    source: str
    source_sha256: str
    text: CalibrationText
    result: TrialResult
    seconds: float
    peak_rss_bytes: int

    @property
    def kept(self) -> Fidelity:
        return self.result.recipe if self.smooth == self.requested else self.result.rtn

    def summary(self) -> dict[str, Any]:
        """`_rtn`: round-to-nearest without smoothing; KL in nats against BF16."""
        kept, rtn = self.kept, self.result.rtn
        return {
            "scheme": self.scheme,
            "smooth": self.smooth,
            "group_size": None,
            "kl": kept.kl,
            "kl_rtn": rtn.kl,
            "top1": kept.top1,
            "top1_rtn": rtn.top1,
            "perplexity": kept.perplexity,
            "perplexity_rtn": rtn.perplexity,
            "perplexity_bf16": self.result.bf16.perplexity,
            "seconds": round(self.seconds, 3),
            "peak_rss_bytes": self.peak_rss_bytes,
        }

    def linears(self) -> list[dict[str, Any]]:
        """One entry a linear: its relative error as stored, and by plain round-to-nearest."""
        kept = self.smooth == self.requested
        return [
            {
                "name": error.name,
                "scheme": self.scheme,
                "smoothing": self.smooth if error.smoothed and kept else "none",
                "relative_error": error.recipe if kept else error.rtn,
                "relative_error_rtn": error.rtn,
            }
            for error in self.result.errors
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "quasar_version": __version__,
            "summary": self.summary(),
            "requested": {"smooth": self.requested, **asdict(self.result.recipe)},
            "source": {"name": self.source, "sha256": self.source_sha256},
            "text": {
                "name": self.text.name,
                "calibration_tokens": sum(len(ids) for ids in self.text.calibration),
                "held_out_tokens": sum(len(ids) for ids in self.text.held_out),
            },
            "linears": self.linears(),
        }
