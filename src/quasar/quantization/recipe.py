"""A recipe makes a quantised layer of an fp32 one and of what its inputs look like."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

import torch
from torch import Tensor

from quasar.memory import trim_heap
from quasar.models.config import ModelConfig
from quasar.models.layer import LayerTensors
from quasar.models.tensors import GROUPS
from quasar.quantization.calibrate import GroupSample, LayerSample
from quasar.quantization.gptq import InverseFactor, compensated_codes
from quasar.quantization.search import search_group
from quasar.quantization.smooth import UNSMOOTHED, Smoothing, fold, smoothquant
from quasar.quantization.weights import (
    QuantizedLayer,
    QuantizedWeight,
    WeightFormat,
    clipped_grid,
    covering_grid,
)

SMOOTHING = ("search", "smoothquant", "none")
WEIGHTS = ("rtn", "clip", "gptq")
SCHEMES = ("w8a8", "w4a8")
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class LayerResult:
    layer: QuantizedLayer
    smoothing: Smoothing
    """Scales as they came out."""


@dataclass(frozen=True, slots=True)
class Recipe:
    format: WeightFormat
    smooth: str = "search"
    weights: str = "rtn"

    @property
    def scheme(self) -> str:
        return f"w{self.format.bits}a8"

    @property
    def name(self) -> str:
        return f"{self.smooth}, {self.weights}"

    @property
    def plain(self) -> Recipe:
        """Round-to-nearest in the same format."""
        return Recipe(self.format, "none", "rtn")

    def apply(
        self, tensors: LayerTensors, sample: LayerSample, config: ModelConfig, workers: Executor
    ) -> LayerResult:
        """tensors: one layer, fp32. Groups of linears are spread over `workers`."""
        chosen = self._smoothing(tensors, sample, config, workers)
        trim_heap()
        folded, scales = fold(tensors, chosen.scales, config)

        def quantize(group: str) -> dict[str, QuantizedWeight]:
            return self._quantize_group(group, folded, sample[group], scales.get(group))

        linears: dict[str, QuantizedWeight] = {}
        for part in workers.map(quantize, GROUPS):
            linears |= part
        return LayerResult(QuantizedLayer.of(folded, linears), Smoothing(scales, chosen.labels))

    def _smoothing(
        self, tensors: LayerTensors, sample: LayerSample, config: ModelConfig, workers: Executor
    ) -> Smoothing:
        if self.smooth == "none":
            return UNSMOOTHED
        if self.smooth == "smoothquant":
            return smoothquant(tensors, {g: sample[g].absmax for g in GROUPS}, config)
        found = workers.map(
            lambda group: search_group(group, tensors, sample[group], config, self.format), GROUPS
        )
        chosen = {g: c for g, c in zip(GROUPS, found, strict=True) if c is not None}
        return Smoothing(
            {group: choice.scale for group, choice in chosen.items()},
            {group: choice.label for group, choice in chosen.items()},
        )

    def _quantize_group(
        self, group: str, folded: LayerTensors, sample: GroupSample, scale: Tensor | None
    ) -> dict[str, QuantizedWeight]:
        """By linear; `scale` [in] is what the inputs of the folded layer are divided by."""
        divisor = torch.ones_like(sample.absmax) if scale is None else scale
        energy = sample.energy() / divisor.square()
        inverse = None
        if self.weights == "gptq":
            inverse = InverseFactor.of(sample.moments().div_(divisor).div_(divisor[:, None]))
        found = {}
        for name in GROUPS[group]:
            weight = folded[f"{name}.weight"]
            if self.weights == "rtn":
                grid = covering_grid(weight, self.format)
            else:
                grid = clipped_grid(weight, self.format, energy)
            codes = grid.codes(weight)
            if inverse is not None:
                codes = compensated_codes(weight, grid, inverse)
            found[name] = grid.pack(codes, folded.get(f"{name}.bias"))
        return found


def default_recipe(
    scheme: str, smooth: str = "search", weights: str | None = None, group_size: int | None = None
) -> Recipe:
    """A scheme with what measured best for it where nothing is said.

    W8A8: the noise is in the activations; GPTQ changed the KL by less than 2 % (SmolLM2-135M).
    """
    if scheme == "w8a8":
        return Recipe(WeightFormat(), smooth, weights or "rtn")
    return Recipe(WeightFormat(4, group_size or GROUP_SIZES[0]), smooth, weights or "gptq")
