"""Weights to integers: W8A8 with a scale a row, W4A8 with a scale and zero point a group.

Round-to-nearest takes the grid that just covers the weights. `clip` tries narrower ones and keeps,
for each row or group, the one with the least error weighted by the energy of the input channels:
sum_j e_j (W_ij - Q_ij)^2, the diagonal part of the error in the output.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quasar.checkpoints.packing import stored_linear
from quasar.kernels.base import DenseWeight, Int4Weight, Int8Weight
from quasar.models.config import ModelConfig
from quasar.models.layer import LayerTensors
from quasar.models.tensors import GROUPS, LINEARS, stored_linears, stored_norms

SHRINKS = tuple(1 - 0.04 * i for i in range(9))
"""Grids that `clip` tries, as shares of the covering one. Finer or narrower ones change the error
of Gaussian weights in groups of 32 by less than 0.3 %."""
CLIPPED_ROWS = 1024
"""Of a weight, clipped at a time."""
SCALE_BITS = 5
"""Significant bits of a 4-bit group's scale (see Int4Weight); costs 0.5 % of the error."""

QuantizedWeight = Int8Weight | Int4Weight


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """8 bits with a scale a row (`group_size` None), or 4 bits with groups of input channels."""

    bits: int = 8
    group_size: int | None = None

    @property
    def half_range(self) -> float:
        """Half the number of steps that a grid has."""
        return 127.0 if self.bits == 8 else 7.5


@dataclass(frozen=True, slots=True)
class Grid:
    """What can be represented: (code - zero) * scale, low <= code <= high.

    scale and zero are [out, groups, 1] fp32; a row of an 8-bit weight is one group, its zero 0.
    """

    scale: Tensor
    zero: Tensor
    low: int
    high: int

    @property
    def groups(self) -> int:
        return self.scale.shape[1]

    def codes(self, weight: Tensor) -> Tensor:
        """weight [out, in] -> nearest codes [out, in], fp32 holding integers."""
        grouped = by_group(weight, self.groups) / self.scale
        return grouped.add_(self.zero).round_().clamp_(self.low, self.high).flatten(1)

    def values(self, codes: Tensor) -> Tensor:
        """What codes [out, in] stand for."""
        return ((by_group(codes, self.groups) - self.zero) * self.scale).flatten(1)

    def pack(self, codes: Tensor, bias: Tensor | None) -> QuantizedWeight:
        scale, zero = self.scale[..., 0], self.zero[..., 0]
        if self.low < 0:
            return Int8Weight(codes.to(torch.int8), scale[:, 0], bias)
        return Int4Weight(codes.to(torch.uint8), scale, zero.to(torch.uint8), bias)


def by_group(x: Tensor, groups: int) -> Tensor:
    """[rows, in] -> [rows, groups, in / groups]."""
    return x.reshape(x.shape[0], groups, -1)


def covering_grid(weight: Tensor, format: WeightFormat, share: float = 1.0) -> Grid:
    """The grid from the smallest to the largest weight of each row or group, times `share`.

    8 bits: scale = absmax / 127. 4 bits: scale = (max - min) / 15 of a range that contains 0,
    rounded to SCALE_BITS, and the zero point nearest to -min / scale. Rows and groups of zeros (or
    so small that their scale would leave the normal numbers) get scale 1: scales are positive.
    """
    grouped = by_group(weight, weight.shape[1] // (format.group_size or weight.shape[1]))
    if format.bits == 8:
        scale = _normal(grouped.abs().amax(dim=2, keepdim=True) * share / 127.0)
        return Grid(scale, torch.zeros_like(scale), -127, 127)
    least = grouped.amin(dim=2, keepdim=True).clamp_max(0) * share
    most = grouped.amax(dim=2, keepdim=True).clamp_min(0) * share
    scale = _normal(short((most - least) / 15.0))
    return Grid(scale, (-least / scale).round_().clamp_(0, 15), 0, 15)


def clipped_grid(
    weight: Tensor, format: WeightFormat, energy: Tensor, shrinks: Sequence[float] = SHRINKS
) -> Grid:
    """The best grid of some for each row or group; energy [in] as in the module's text.

    CLIPPED_ROWS at a time, which bounds the memory.
    """
    parts = [
        _clipped(weight[start : start + CLIPPED_ROWS], format, energy, shrinks)
        for start in range(0, len(weight), CLIPPED_ROWS)
    ]
    scale = torch.cat([grid.scale for grid in parts])
    return replace(parts[0], scale=scale, zero=torch.cat([grid.zero for grid in parts]))


def _clipped(
    weight: Tensor, format: WeightFormat, energy: Tensor, shrinks: Sequence[float]
) -> Grid:
    best = covering_grid(weight, format, shrinks[0])
    least = grid_error(weight, best, energy)
    for share in shrinks[1:]:
        grid = covering_grid(weight, format, share)
        error = grid_error(weight, grid, energy)
        better = error < least
        scale = torch.where(better, grid.scale, best.scale)
        zero = torch.where(better, grid.zero, best.zero)
        best, least = replace(best, scale=scale, zero=zero), torch.minimum(error, least)
    return best


def grid_error(weight: Tensor, grid: Grid, energy: Tensor) -> Tensor:
    """Weighted square error of rounding to a grid, [out, groups, 1]."""
    error = grid.values(grid.codes(weight)).sub_(weight).square_().mul_(energy)
    return by_group(error, grid.groups).sum(dim=2, keepdim=True)


def short(scale: Tensor) -> Tensor:
    """The nearest number of SCALE_BITS significant bits."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp((mantissa * 2**SCALE_BITS).round() / 2**SCALE_BITS, exponent)


def _normal(scale: Tensor) -> Tensor:
    return torch.where(scale >= torch.finfo(torch.float32).tiny, scale, torch.ones_like(scale))


def round_to_nearest(weight: Tensor, bias: Tensor | None = None) -> Int8Weight:
    """weight [out, in] fp32 -> INT8 with scale = absmax / 127 of the row, rounded to even."""
    grid = covering_grid(weight, WeightFormat())
    return Int8Weight(grid.codes(weight).to(torch.int8), grid.scale[:, 0, 0], bias)


def dequantize(weight: QuantizedWeight) -> Tensor:
    """[out, in] fp32, for inputs that are rotated where the weight is."""
    if isinstance(weight, Int8Weight):
        return weight.codes.float() * weight.scale[:, None]
    grouped = by_group(weight.codes.float(), weight.scale.shape[1])
    return ((grouped - weight.zero.float()[..., None]) * weight.scale[..., None]).flatten(1)


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A layer whose linears are integers, but for those that were left in BF16."""

    norms: Mapping[str, Tensor]
    """Norm weights as they multiply, fp32."""
    linears: Mapping[str, QuantizedWeight | DenseWeight]

    @classmethod
    def of(
        cls, tensors: LayerTensors, linears: Mapping[str, QuantizedWeight | DenseWeight]
    ) -> QuantizedLayer:
        """Quantised linears with the norms of the layer that they were made from."""
        norms = {name: tensor for name, tensor in tensors.items() if name.endswith("norm.weight")}
        return cls(norms, {name: linears[name] for name in LINEARS})

    @classmethod
    def round(
        cls,
        tensors: LayerTensors,
        format: WeightFormat = WeightFormat(),
        int8: Collection[str] = (),
    ) -> QuantizedLayer:
        """Round-to-nearest of all linears; those of the groups in `int8` have 8 bits."""
        linears = {}
        wider = {name for group in int8 for name in GROUPS[group]}
        for name in LINEARS:
            weight = tensors[f"{name}.weight"]
            grid = covering_grid(weight, WeightFormat() if name in wider else format)
            linears[name] = grid.pack(grid.codes(weight), tensors.get(f"{name}.bias"))
        return cls.of(tensors, linears)

    def stored(self, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a compressed-tensors folder by the family's names."""
        yield from stored_norms(self.norms, config).items()
        for module, weight in stored_linears(self.linears, config).items():
            for part, tensor in stored_linear(weight):
                yield f"{module}.{part}", tensor

    def dense(self, config: ModelConfig) -> list[str]:
        """The linears that were left in BF16, by the family's names."""
        linears = stored_linears(self.linears, config)
        return [name for name, weight in linears.items() if isinstance(weight, DenseWeight)]
