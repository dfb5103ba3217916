"""The report card of a quantised folder: what was done to each linear and what it cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from quasar import __version__
from quasar.quantization.calibrate import CalibrationText
from quasar.quantization.recipe import Recipe
from quasar.quantization.simulation import Fidelity
from quasar.quantization.trial import TrialResult

REPORT_FILE = "quantization_report.json"


@dataclass(frozen=True, slots=True)
class Rotation:
    """The recipe on the model as it is and on its rotated form; both beside the BF16 model."""

    unrotated: Fidelity
    rotated: Fidelity

    @property
    def better(self) -> bool:
        return self.rotated.kl < self.unrotated.kl


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one run of the quantiser did and measured."""

    requested: Recipe
    kept: bool
    """False where the recipe turned out worse than round-to-nearest, which the folder then has."""
    source: str
    source_sha256: str
    text: CalibrationText
    result: TrialResult
    """Of the better form, if two were made; round-to-nearest is that of the unrotated one."""
    rotation: Rotation | None
    """None where none was asked for."""
    seconds: float
    peak_rss_bytes: int

    @property
    def recipe(self) -> Recipe:
        """What the folder holds."""
        return self.requested if self.kept else self.requested.plain

    @property
    def rotated(self) -> bool:
        """Whether the folder holds the rotated form."""
        return self.kept and self.rotation is not None and self.rotation.better

    def summary(self) -> dict[str, Any]:
        """`_rtn`: round-to-nearest without smoothing; KL in nats against BF16."""
        rtn = self.result.rtn
        kept = self.result.recipe if self.kept else rtn
        return {
            "scheme": self.recipe.scheme,
            "smooth": self.recipe.smooth,
            "rotate": self.rotated,
            "group_size": self.recipe.format.group_size,
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
        return [
            {
                "name": error.name,
                "scheme": error.scheme if self.kept else self.recipe.scheme,
                "smoothing": error.smoothing if self.kept else "none",
                "rotation": error.rotation if self.kept else 0,
                "relative_error": error.recipe if self.kept else error.rtn,
                "relative_error_rtn": error.rtn,
            }
            for error in self.result.errors
        ]

    def ignored(self) -> list[str]:
        """Linears that were left in BF16."""
        return [entry["name"] for entry in self.linears() if entry["scheme"] == "bf16"]

    def to_json(self) -> dict[str, Any]:
        return {
            "quasar_version": __version__,
            "summary": self.summary(),
            "weights": self.recipe.weights,
            "int8": self.recipe.int8,
            "head": "bf16",
            "requested": {
                "smooth": self.requested.smooth,
                "weights": self.requested.weights,
                "rotate": self.rotation is not None,
                **asdict(self.result.recipe),
            },
            "rotation": None if self.rotation is None else asdict(self.rotation),
            "int8_head": asdict(self.result.int8_head),
            "source": {"name": self.source, "sha256": self.source_sha256},
            "text": {
                "name": self.text.name,
                "calibration_tokens": sum(len(ids) for ids in self.text.calibration),
                "held_out_tokens": sum(len(ids) for ids in self.text.held_out),
            },
            "linears": self.linears(),
        }
