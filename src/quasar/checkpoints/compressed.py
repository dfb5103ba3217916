"""compressed-tensors folders: W8A8 (`int-quantized`), W4A8 and W4A16 (`pack-quantized`).

A quantised linear is a few tensors below its module's name (docs/format.md); seen from above it is
`weight` and `bias` as ever. W4A16 has 16-bit activations, so its dequantised weights, rounded once
to BF16, are the target: such a folder is a BF16 model. Modules of the config's `ignore` list are
stored in floating point.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quasar.checkpoints.base import to_bfloat16
from quasar.checkpoints.hf import Entry, SafetensorsCheckpoint
from quasar.checkpoints.packing import PACKED, SCALE, SHAPE, ZERO, unpack, words
from quasar.checkpoints.scheme import DOWN, parse_rotation, parse_scheme
from quasar.errors import CheckpointError
from quasar.kernels.base import Int4Weight, Int8Weight, LinearWeight

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST_SCALE = torch.finfo(torch.float32).max / 127
"""Times a code this is a number."""


class CompressedCheckpoint(SafetensorsCheckpoint):
    """A Hugging Face folder whose linears are quantised."""

    format = "compressed-tensors"

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        quantization = config["quantization_config"]
        self.scheme = parse_scheme(quantization, f"{path / 'config.json'}: quantization_config")
        self.down_rotation = parse_rotation(config, self.scheme, str(path / "config.json"))
        super().__init__(path, config)
        self.precision = self.scheme.precision
        self.quantization = quantization
        self._shapes: dict[str, tuple[int, ...]] = {}
        """[out, in] by the name of the weight, of quantised linears."""
        for name in self._entries:
            module, _, part = name.rpartition(".")
            if part in (SCALE, ZERO, SHAPE, "weight_g_idx"):
                self._check_part(module, part)
            elif part == PACKED and not self.scheme.packs(module):
                raise CheckpointError(f"{self.where(name)} is packed, yet its scheme is W8A8")
            elif part == PACKED or (part == self._stem(module) and self._is_int8(name)):
                self._shapes[f"{module}.weight"] = self._checked_shape(module)
            elif part == "weight" and self._is_plain_linear(module):
                if self._is_int8(name):
                    raise CheckpointError(f"{self.where(name)} is I8, yet its scheme is 4-bit")
                raise CheckpointError(
                    f"{self.where(name)} is not quantised, yet `ignore` does not list it"
                )
        parts = (f".{SCALE}", f".{ZERO}", f".{SHAPE}", f".{PACKED}")
        plain = [name for name in self._names if not name.endswith(parts)]
        self._names = tuple(dict.fromkeys((*plain, *self._shapes)))

    def linear(self, module: str) -> LinearWeight:
        if f"{module}.weight" not in self._shapes or self.precision == "bf16":
            return super().linear(module)
        if not self.scheme.packs(module):
            codes = self.entry(f"{module}.weight").read()
            return Int8Weight(codes, self._scale(module).flatten(), self.bias(module))
        return self._int4(module)

    def precision_of(self, module: str) -> str:
        """The scheme of a linear, or bf16, without reading it."""
        return self.scheme.of(module) if f"{module}.weight" in self._shapes else "bf16"

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes.get(name) or super().shape(name)

    def tensor(self, name: str) -> Tensor:
        if name not in self._shapes:
            return super().tensor(name)
        module = name.removesuffix(".weight")
        if not self.scheme.packs(module):
            return self.entry(name).read()
        if self.scheme.name == "w4a8":
            return self._codes(module)
        weight = self._int4_parts(module)
        grouped = weight.codes.view(*weight.scale.shape, -1).float() - weight.zero[..., None]
        values = grouped.mul_(weight.scale[..., None]).flatten(1)
        return to_bfloat16(values, self.where(f"{module}.{PACKED}"))

    def _stem(self, module: str) -> str:
        """The part that a quantised linear is known by."""
        return PACKED if self.scheme.packs(module) else "weight"

    def _codes(self, module: str) -> Tensor:
        columns = self._shapes[f"{module}.weight"][1]
        return unpack(self.entry(f"{module}.{PACKED}").read(), columns)

    def _int4_parts(self, module: str) -> Int4Weight:
        """As stored; its scales may be any positive numbers."""
        scale = self._scale(module)
        zero = torch.full(scale.shape, 8, dtype=torch.uint8)
        if not self.scheme.symmetric:
            packed = self.entry(f"{module}.{ZERO}").read()
            zero = unpack(packed.t(), scale.shape[0]).t().contiguous()
        rotation = self.down_rotation if module.endswith(DOWN) else 0
        return Int4Weight(self._codes(module), scale, zero, self.bias(module), rotation)

    def _int4(self, module: str) -> Int4Weight:
        weight = self._int4_parts(module)
        try:
            weight.check()
        except ValueError as error:
            raise CheckpointError(f"{self.where(f'{module}.{SCALE}')}: {error}") from None
        return weight

    def _scale(self, module: str) -> Tensor:
        """[out, groups] fp32, exactly as stored; one that is not a positive number is refused."""
        name = f"{module}.{SCALE}"
        scale = self.entry(name).read().float()
        if not (torch.isfinite(scale) & (scale > 0)).all():
            raise CheckpointError(f"{self.where(name)} holds scales that are not positive numbers")
        if self.precision != "bf16" and bool((scale > _LARGEST_SCALE).any()):
            raise CheckpointError(f"{self.where(name)} holds scales that make infinite weights")
        return scale.view(scale.shape[0], -1)

    def _check_part(self, module: str, part: str) -> None:
        """A tensor beside a quantised weight: is there one, and does the scheme have this part?"""
        stem = self._entries.get(f"{module}.{self._stem(module)}")
        name, packed = f"{module}.{part}", self.scheme.packs(module)
        if part == "weight_g_idx":
            raise CheckpointError(
                f"{self.where(name)} reorders the inputs (actorder), which is not supported"
            )
        if stem is None or (not packed and stem.dtype != torch.int8):
            kind = PACKED if packed else "I8 weight"
            raise CheckpointError(f"{self.where(name)} belongs to no {kind}")
        if part == ZERO and (self.scheme.symmetric or not packed):
            raise CheckpointError(f"{self.where(name)} is there, yet the scheme is symmetric")
        if part == SHAPE and not packed:
            raise CheckpointError(f"{self.where(name)} is not of the format int-quantized")

    def _checked_shape(self, module: str) -> tuple[int, ...]:
        """[out, in] of a quantised linear whose parts all have the right types and sizes."""
        name = f"{module}.{self._stem(module)}"
        stem, stem_name = self.entry(name), self.where(name)
        if self.scheme.ignores(module):
            raise CheckpointError(
                f"{stem_name} is quantised (I8 or packed), yet `ignore` lists its module"
            )
        if not module.endswith("_proj") and self.precision != "bf16":
            raise CheckpointError(f"{stem_name}: only projections may be quantised")
        if not self.scheme.packs(module):
            shape = stem.shape
            if len(shape) != 2:
                raise CheckpointError(f"{self.where(f'{module}.weight')} is no matrix")
            self._expect(module, SCALE, _FLOATS, ((shape[0], 1), shape[:1]))
            return shape
        if f"{module}.weight" in self._entries:
            raise CheckpointError(f"{self.where(f'{module}.weight')} is there twice, also packed")
        out, columns = self._stored_shape(module)
        size = self.scheme.group_size or columns
        if columns % size:
            raise CheckpointError(
                f"{self.where(f'{module}.{SHAPE}')}: {columns} inputs are no multiple of the "
                f"group_size {size}"
            )
        groups = columns // size
        self._expect(module, PACKED, (torch.int32,), ((out, words(columns)),))
        self._expect(module, SCALE, _FLOATS, ((out, groups),))
        if not self.scheme.symmetric:
            self._expect(module, ZERO, (torch.int32,), ((words(out), groups),))
        return out, columns

    def _stored_shape(self, module: str) -> tuple[int, int]:
        """The two numbers of weight_shape."""
        entry = self._expect(module, SHAPE, (torch.int64, torch.int32), ((2,),))
        out, columns = entry.read().tolist()
        if not (1 <= out < 1 << 40 and 1 <= columns < 1 << 40):
            raise CheckpointError(f"{self.where(f'{module}.{SHAPE}')} holds {[out, columns]}")
        return out, columns

    def _expect(
        self,
        module: str,
        part: str,
        dtypes: tuple[torch.dtype, ...],
        shapes: tuple[tuple[int, ...], ...],
    ) -> Entry:
        name = f"{module}.{part}"
        entry = self.entry(name)
        if entry.dtype not in dtypes:
            raise CheckpointError(f"{self.where(name)} has dtype {entry.dtype}, not {dtypes[0]}")
        if entry.shape not in shapes:
            raise CheckpointError(
                f"{self.where(name)} has shape {list(entry.shape)}, its linear needs "
                f"{list(shapes[0])}"
            )
        return entry

    def _is_int8(self, name: str) -> bool:
        return self._entries[name].dtype == torch.int8

    def _is_plain_linear(self, module: str) -> bool:
        """A projection kept in floating point although the scheme covers it."""
        return module.endswith(("_proj", "lm_head")) and not self.scheme.ignores(module)
