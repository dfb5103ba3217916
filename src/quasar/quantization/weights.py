"""Weights to INT8: one symmetric scale a row, round to nearest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quasar.kernels.base import Int8Weight
from quasar.models.config import ModelConfig
from quasar.models.layer import LayerTensors
from quasar.models.tensors import LINEARS, stored_linears, stored_norms

HEAD_CHUNK_ROWS = 4096
"""Rows of a head that are held in fp32 at a time: 16 MB at 1024 columns."""


def round_to_nearest(weight: Tensor, bias: Tensor | None = None) -> Int8Weight:
    """weight [out, in] fp32 -> codes * scale with scale = absmax / 127 of the row.

    Codes are rounded to nearest even and lie in -127..127. A row of zeros (or so small that its
    scale would leave the normal numbers) gets scale 1 and codes 0: scales are always positive.
    """
    scale = weight.abs().amax(dim=1) / 127.0
    scale = torch.where(scale >= torch.finfo(torch.float32).tiny, scale, torch.ones_like(scale))
    codes = (weight / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return Int8Weight(codes, scale, bias)


def quantize_head(rows: Tensor) -> Int8Weight:
    """The INT8 head from the target's BF16 rows [vocab, hidden], a chunk in fp32 at a time."""
    head = Int8Weight(torch.empty(rows.shape, dtype=torch.int8), torch.empty(rows.shape[0]))
    for start in range(0, rows.shape[0], HEAD_CHUNK_ROWS):
        chunk = slice(start, start + HEAD_CHUNK_ROWS)
        part = round_to_nearest(rows[chunk].float())
        head.codes[chunk], head.scale[chunk] = part.codes, part.scale
    return head


def dequantize(weight: Int8Weight) -> Tensor:
    """[out, in] fp32."""
    return weight.codes.float() * weight.scale[:, None]


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A layer whose linears are INT8."""

    norms: Mapping[str, Tensor]
    """Norm weights as they multiply, fp32."""
    linears: Mapping[str, Int8Weight]

    @classmethod
    def round(cls, tensors: LayerTensors) -> QuantizedLayer:
        """Round-to-nearest of all linears."""
        return cls(
            {name: tensors[name] for name in tensors if name.endswith("norm.weight")},
            {
                name: round_to_nearest(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))
                for name in LINEARS
            },
        )

    def stored(self, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """The family's names and tensors in the compressed-tensors layout `int-quantized`."""
        yield from stored_norms(self.norms, config).items()
        for name, weight in stored_linears(self.linears, config).items():
            assert isinstance(weight, Int8Weight)
            yield f"{name}.weight", weight.codes
            yield f"{name}.weight_scale", weight.scale[:, None]
            if weight.bias is not None:
                yield f"{name}.bias", weight.bias.bfloat16()
