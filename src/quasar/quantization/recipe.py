"""A recipe makes a quantised layer of an fp32 one and of what its inputs look like."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quasar.kernels.base import DenseWeight, Int8Weight
from quasar.memory import trim_heap
from quasar.models.config import ModelConfig
from quasar.models.layer import LayerTensors
from quasar.models.tensors import GROUPS, linear_shapes
from quasar.quantization.calibrate import GroupSample, LayerSample
from quasar.quantization.gptq import Objective, rounded
from quasar.quantization.hadamard import rotate_with_matrix, rotated
from quasar.quantization.moments import moments_over
from quasar.quantization.search import CHECKING_TOKENS, Candidate, search_scales, shape_of
from quasar.quantization.simulation import relative_errors
from quasar.quantization.smooth import UNSMOOTHED, Smoothing, fold, smoothquant
from quasar.quantization.weights import (
    Grid,
    QuantizedLayer,
    QuantizedWeight,
    WeightFormat,
    clipped_grid,
    covering_grid,
)

SMOOTHING = ("search", "smoothquant", "none")
WEIGHTS = ("rtn", "clip", "gptq")
SCHEMES = ("w8a8", "w4a8")
ROTATED = "down"
"""The group whose inputs a verifier may rotate."""
GROUP_SIZES = (32, 64, 128)
INT8_GROUPS = ("qkv",)
"""Groups of a W4A8 model that keep 8 bits where nothing is said: rounding q, k and v of
Qwen2.5-Coder-0.5B to 4 bits makes a third of the KL, with 7 % of the weights."""
INT8_SHARE = 1 / 6
"""Of a layer's weights, above which they do not: 8 bits take 1.8 times the bytes."""
LARGEST_ERROR = {8: 0.1, 4: 0.35}
"""Relative error of a linear, by bits, above which its group is not worth quantising."""


@dataclass(frozen=True, slots=True)
class LayerResult:
    layer: QuantizedLayer
    """As it is stored."""
    verified: QuantizedLayer
    """As a verifier computes it."""
    smoothing: Smoothing
    """Scales as they came out."""


@dataclass(frozen=True, slots=True)
class Recipe:
    format: WeightFormat
    smooth: str = "search"
    weights: str = "rtn"
    rotation: int = 0
    """Size of the blocks in which a verifier rotates the inputs of `down` (`hadamard.py`), or 0."""
    int8: tuple[str, ...] = ()
    """Groups of linears that have 8 bits in a 4-bit format."""

    @property
    def scheme(self) -> str:
        return f"w{self.format.bits}a8"

    @property
    def name(self) -> str:
        parts = [self.smooth, self.weights, *["hadamard"] * bool(self.rotation)]
        return ", ".join([*parts, *(f"{group} in INT8" for group in self.int8)])

    def format_of(self, group: str) -> WeightFormat:
        return WeightFormat() if group in self.int8 else self.format

    @property
    def plain(self) -> Recipe:
        """Round-to-nearest in the same format."""
        return Recipe(self.format, "none", "rtn")

    @property
    def needs_moments(self) -> bool:
        """Whether it uses the second moments of the inputs, and so more calibration text."""
        return self.weights == "gptq"

    def apply(
        self, tensors: LayerTensors, sample: LayerSample, config: ModelConfig, workers: Executor
    ) -> LayerResult:
        """tensors: one layer, fp32. Groups of linears are spread over `workers`.

        A group with an error above LARGEST_ERROR stays in BF16, unsmoothed.
        """
        smoothing = self._smoothing(tensors, sample, config, workers)
        trim_heap()
        result = self._quantize(tensors, smoothing, sample, config, workers)
        rows = {group: sample[group].checking.thinned(CHECKING_TOKENS).rows for group in GROUPS}
        scales = result.smoothing.scales
        errors = relative_errors(tensors, result.verified, scales, rows, config, workers)
        bad = {
            group
            for group, names in GROUPS.items()
            if max(errors[n] for n in names) > LARGEST_ERROR[self.format_of(group).bits]
        }
        if not bad:
            return result
        return self._quantize(tensors, smoothing.without(bad), sample, config, workers, bad)

    def _quantize(
        self,
        tensors: LayerTensors,
        smoothing: Smoothing,
        sample: LayerSample,
        config: ModelConfig,
        workers: Executor,
        dense: Collection[str] = (),
    ) -> LayerResult:
        """The smoothed layer, its groups quantised but for those in `dense`."""
        folded, scales = fold(tensors, smoothing.scales, config)

        def quantize(group: str) -> Mapping[str, QuantizedWeight | DenseWeight]:
            if group in dense:
                return {n: dense_weight(folded, n) for n in GROUPS[group]}
            divisor = scales.get(group, torch.ones_like(sample[group].absmax))
            if group == ROTATED and self._stores_rotated:
                return self._quantize_rotated(group, folded, sample[group], divisor)
            return self._quantize_group(group, folded, sample[group], divisor)

        linears: dict[str, QuantizedWeight | DenseWeight] = {}
        for part in workers.map(quantize, GROUPS):
            linears |= part
        layer = QuantizedLayer.of(folded, linears)
        return LayerResult(layer, self._verified(layer), Smoothing(scales, smoothing.labels))

    @property
    def _stores_rotated(self) -> bool:
        """4-bit codes cannot be rounded once more when they are loaded."""
        return self.rotation != 0 and self.format_of(ROTATED).bits == 4

    def _verified(self, layer: QuantizedLayer) -> QuantizedLayer:
        (name,) = GROUPS[ROTATED]
        weight = layer.linears[name]
        if not self.rotation or not isinstance(weight, Int8Weight):
            return layer
        found = rotated(weight, self.rotation, rotate_with_matrix)
        return QuantizedLayer(layer.norms, {**layer.linears, name: found})

    def _smoothing(
        self, tensors: LayerTensors, sample: LayerSample, config: ModelConfig, workers: Executor
    ) -> Smoothing:
        if self.smooth == "none":
            return UNSMOOTHED
        if self.smooth == "smoothquant":
            return smoothquant(tensors, {g: sample[g].absmax for g in GROUPS}, config)

        def search(group: str) -> Candidate | None:
            if group == ROTATED and self.rotation:
                return None  # a channel that is scaled up would be spread over its block
            weights = [tensors[f"{name}.weight"] for name in GROUPS[group]]
            format = self.format_of(group)
            return search_scales(weights, sample[group], format, shape_of(group, config))

        found = workers.map(search, GROUPS)
        chosen = {g: c for g, c in zip(GROUPS, found, strict=True) if c is not None}
        return Smoothing(
            {group: choice.scale for group, choice in chosen.items()},
            {group: choice.label for group, choice in chosen.items()},
        )

    def _quantize_rotated(
        self, group: str, folded: LayerTensors, sample: GroupSample, divisor: Tensor
    ) -> dict[str, QuantizedWeight]:
        """As `_quantize_group`, of W H."""
        turned = dict(folded)
        for name in GROUPS[group]:
            turned[f"{name}.weight"] = folded[f"{name}.weight"].clone()
            rotate_with_matrix(turned[f"{name}.weight"], self.rotation)
        inputs = sample.rotated(divisor, self.rotation)
        found = self._rounded(group, turned, inputs.energy(), inputs.moments)
        return {name: replace(weight, rotation=self.rotation) for name, weight in found.items()}

    def _quantize_group(
        self, group: str, folded: LayerTensors, sample: GroupSample, divisor: Tensor
    ) -> dict[str, QuantizedWeight]:
        """By linear; inputs of the folded layer are those of the sample over divisor [in]."""
        moments = None
        if self.needs_moments and sample.moments is not None:
            moments = moments_over(sample.moments, divisor)
        return self._rounded(group, folded, sample.energy() / divisor.square(), moments)

    def _rounded(
        self, group: str, folded: LayerTensors, energy: Tensor, moments: Tensor | None
    ) -> dict[str, QuantizedWeight]:
        """By linear; energy [in] and moments [in, in] of the inputs, which GPTQ uses up."""
        weights = {name: folded[f"{name}.weight"] for name in GROUPS[group]}
        format = self.format_of(group)
        grids = {name: self._grid(weight, format, energy) for name, weight in weights.items()}
        trim_heap()
        objective = None
        if self.needs_moments:
            assert moments is not None
            objective = Objective.of(moments)
        found = {}
        for name, weight in weights.items():
            grid = grids[name]
            if objective is None:
                codes = grid.codes(weight)
            else:
                grid, codes = rounded(weight, grid, objective)
            found[name] = grid.pack(codes, folded.get(f"{name}.bias"))
        return found

    def _grid(self, weight: Tensor, format: WeightFormat, energy: Tensor) -> Grid:
        if self.weights == "rtn":
            return covering_grid(weight, format)
        return clipped_grid(weight, format, energy)


def default_recipe(
    scheme: str,
    smooth: str = "search",
    weights: str | None = None,
    group_size: int | None = None,
    rotation: int = 0,
    int8: tuple[str, ...] = (),
) -> Recipe:
    """A scheme with what measured best for it where nothing is said.

    W8A8: the noise is in the activations; GPTQ changed the KL by less than 2 % (SmolLM2-135M).
    """
    if scheme == "w8a8":
        return Recipe(WeightFormat(), smooth, weights or "rtn", rotation)
    format = WeightFormat(4, group_size or GROUP_SIZES[0])
    return Recipe(format, smooth, weights or "gptq", rotation, int8)


def default_int8(config: ModelConfig) -> tuple[str, ...]:
    """INT8_GROUPS, where they are small enough."""
    sizes = {name: rows * columns for name, (rows, columns) in linear_shapes(config).items()}
    wider = sum(sizes[name] for group in INT8_GROUPS for name in GROUPS[group])
    return INT8_GROUPS if wider <= INT8_SHARE * sum(sizes.values()) else ()


def dense_weight(tensors: LayerTensors, name: str) -> DenseWeight:
    return DenseWeight(tensors[f"{name}.weight"].bfloat16(), tensors.get(f"{name}.bias"))
