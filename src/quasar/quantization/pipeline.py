"""Checkpoint in, W8A8 checkpoint out: one layer in memory at a time.

Three models run side by side through the layers over the same held-out text: BF16, the recipe and
plain round-to-nearest. So when the last layer is written the whole-model effect of the recipe is
known, and a recipe that is worse than doing nothing is not kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quasar.checkpoints.base import Checkpoint
from quasar.errors import CheckpointError, UsageError
from quasar.kernels.reference import rms_norm
from quasar.models.config import ModelConfig
from quasar.models.layer import (
    GROUPS,
    FloatLinear,
    Layer,
    LayerTensors,
    Observer,
    embedding,
    final_norm,
    head_rows,
    layer_prefix,
    read_layer,
    unobserved,
)
from quasar.quantization.calibrate import (
    CalibrationText,
    ChannelMaxima,
    RowSample,
    calibration_text,
)
from quasar.quantization.report import REPORT_FILE, LinearReport, Report, peak_memory
from quasar.quantization.simulation import Fidelity, Int8Linear, compare, simulated
from quasar.quantization.smooth import SMOOTHERS, Scales, fold
from quasar.quantization.weights import QuantizedLayer

SAMPLED_ROWS = 32
"""Rows of each held-out sequence on which the error of a linear is measured."""

ProgressCallback = Callable[[str, int, int], None]
"""Called with a stage's name, steps done and steps in all; what it raises stops the run."""


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """What to make of a checkpoint. Refuses what this version cannot do."""

    scheme: str = "w8a8"
    smooth: str = "smoothquant"
    calibration: Path | None = None
    """A UTF-8 text; None for the built-in one."""

    def __post_init__(self) -> None:
        for option, value, known in (
            ("--scheme", self.scheme, ("w8a8",)),
            ("--smooth", self.smooth, tuple(SMOOTHERS)),
        ):
            if value not in known:
                raise UsageError(
                    f"{option} {value} is not available in this version; "
                    f"it knows {' and '.join(known)}"
                )


class Trial:
    """The texts on their way through the model, under BF16, the recipe and round-to-nearest.

    The BF16 activations feed the next layer's calibration.
    """

    def __init__(self, config: ModelConfig, smooth: str, text: CalibrationText, table: Tensor):
        self.config, self.smooth = config, smooth
        self.smoother = SMOOTHERS[smooth]
        self.calibration = [table[ids].float() for ids in text.calibration]
        self.bf16 = [table[ids].float() for ids in text.held_out]
        self.rtn = list(self.bf16)
        self.recipe = self.rtn if smooth == "none" else list(self.bf16)
        self.targets = torch.cat([ids[1:] for ids in text.held_out])
        self.linears: list[LinearReport] = []

    def advance(self, prefix: str, tensors: LayerTensors) -> QuantizedLayer:
        """Move every text through one layer; gives the layer as the recipe quantises it."""
        maxima, sample = ChannelMaxima(), RowSample(SAMPLED_ROWS)
        layer = Layer(self.config, tensors)
        move(self.calibration, layer, maxima)
        move(self.bf16, layer, sample)
        plain = QuantizedLayer.round(tensors)
        move(self.rtn, simulated(self.config, plain))
        scales: Scales = {}
        quantized = plain
        if self.recipe is not self.rtn:
            scales = self.smoother(tensors, maxima.absmax, self.config)
            folded, scales = fold(tensors, scales, self.config)
            quantized = QuantizedLayer.round(folded)
            move(self.recipe, simulated(self.config, quantized))
        for group, names in GROUPS.items():
            rows = sample.rows(group)
            smoothed = rows / scales[group] if group in scales else rows
            for name in names:
                expected = FloatLinear(tensors[f"{name}.weight"], None)(rows)
                self.linears.append(
                    LinearReport(
                        prefix + name,
                        "w8a8",
                        self.smooth if group in scales else "none",
                        relative_error(quantized, name, smoothed, expected),
                        relative_error(plain, name, rows, expected),
                    )
                )
        return quantized

    def fidelity(
        self, norm: Tensor, head: Tensor, progress: Callable[[int, int], None]
    ) -> tuple[Fidelity, Fidelity, Fidelity]:
        """BF16, recipe and round-to-nearest on the held-out text."""
        arms = [self.bf16, self.recipe, self.rtn]
        eps = self.config.rms_norm_eps
        outputs = [torch.cat([rms_norm(x[:-1], norm, eps) for x in arm]) for arm in arms]
        bf16, recipe, rtn = compare(outputs, head, self.targets, progress)
        return bf16, recipe, rtn


def move(states: list[Tensor], layer: Layer, observe: Observer = unobserved) -> None:
    """Replace each sequence's hidden states by the layer's output."""
    for index, hidden in enumerate(states):
        states[index] = layer(hidden, observe)


def relative_error(layer: QuantizedLayer, name: str, rows: Tensor, expected: Tensor) -> float:
    """|quantised product - expected| / |expected|, biases left out."""
    product = Int8Linear(replace(layer.linears[name], bias=None))(rows)
    return float((product - expected).norm() / expected.norm().clamp_min(1e-30))
