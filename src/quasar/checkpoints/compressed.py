"""compressed-tensors folders, scheme W8A8: int8 weights by output channel, activations by token.

A quantised linear is `weight` I8 [out, in], `weight_scale` [out, 1] F32 or BF16 (weight = codes *
scale) and an optional `bias`. Modules of the config's `ignore` list are stored in floating point.
Any other scheme is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quasar.checkpoints.hf import SafetensorsCheckpoint
from quasar.errors import CheckpointError
from quasar.kernels.base import Int8Weight, LinearWeight

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_WEIGHTS = {**_INT8, "strategy": "channel", "dynamic": False}
_ACTIVATIONS = {**_INT8, "strategy": "token", "dynamic": True}
_SCALE = ".weight_scale"
_MAX_PATTERNS = 64
_SAFE_PATTERN = re.compile(r"re:\^?(?:\.\*)?(?:[\w-]|\\?\.)*(?:\.\*)?\$?")
"""Names with `.*` at either end. A free regular expression could take for ever to match."""


class CompressedCheckpoint(SafetensorsCheckpoint):
    """A Hugging Face folder whose linears are W8A8."""

    format = "compressed-tensors"

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        quantization = config["quantization_config"]
        ignore = check_scheme(quantization, path)
        self._ignore = frozenset(ignore)
        self._ignore_patterns = [i.removeprefix("re:") for i in ignore if i.startswith("re:")]
        super().__init__(path, config)
        self.quantization = quantization
        self._names = tuple(n for n in self._names if not n.endswith(_SCALE))
        for name, entry in self._entries.items():
            if name.endswith(_SCALE):
                self._check_scale(name)
            elif entry.dtype == torch.int8:
                self._check_weight(name)
            elif self._is_plain_linear(name):
                raise CheckpointError(
                    f"{self.where(name)} is not quantised, yet `ignore` does not list it"
                )

    def linear(self, module: str) -> LinearWeight:
        name = f"{module}.weight"
        if self.entry(name).dtype != torch.int8:
            return super().linear(module)
        return Int8Weight(self.tensor(name), self._scale(module), self.bias(module))

    def tensor(self, name: str) -> Tensor:
        entry = self.entry(name)
        return entry.read() if entry.dtype == torch.int8 else super().tensor(name)

    def _scale(self, module: str) -> Tensor:
        """[out] fp32, exactly as stored; a scale that is not a positive number is refused."""
        name = module + _SCALE
        scale = self.entry(name).read().float().flatten()
        if not (torch.isfinite(scale) & (scale > 0)).all():
            raise CheckpointError(f"{self.where(name)} holds scales that are not positive numbers")
        return scale

    def _check_scale(self, name: str) -> None:
        weight = self._entries.get(name.removesuffix("_scale"))
        if weight is None or weight.dtype != torch.int8:
            raise CheckpointError(f"{self.where(name)} belongs to no I8 weight")

    def _check_weight(self, name: str) -> None:
        weight, module = self.entry(name), name.removesuffix(".weight")
        if self._ignored(module):
            raise CheckpointError(f"{self.where(name)} is I8, yet `ignore` lists its module")
        scale = self.entry(module + _SCALE)
        if scale.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise CheckpointError(f"{self.where(module + _SCALE)} has dtype {scale.dtype}")
        if len(weight.shape) != 2 or scale.shape not in ((weight.shape[0], 1), weight.shape[:1]):
            raise CheckpointError(
                f"{self.where(module + _SCALE)} has shape {list(scale.shape)}, but its weight "
                f"{list(weight.shape)} needs one scale an output channel"
            )

    def _is_plain_linear(self, name: str) -> bool:
        """A projection kept in floating point although the scheme covers it."""
        module = name.removesuffix(".weight")
        return (
            module.endswith(("_proj", "lm_head")) and name != module and not self._ignored(module)
        )

    def _ignored(self, module: str) -> bool:
        return module in self._ignore or any(re.match(p, module) for p in self._ignore_patterns)


def check_scheme(quantization: Any, path: Path) -> tuple[str, ...]:
    """Refuse all but W8A8 for every Linear of the folder `path`; return the ignored modules."""
    where = f"{path / 'config.json'}: quantization_config"
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{where} is not an object")
    method = quantization.get("quant_method")
    if method != "compressed-tensors":
        raise CheckpointError(f"{where}: quant_method {method!r} is not supported")
    for key, allowed in (
        ("format", ("int-quantized",)),
        ("quantization_status", (None, "compressed", "frozen")),
        ("kv_cache_scheme", (None,)),
        ("transform_config", (None, {})),
        ("sparsity_config", (None, {})),
    ):
        if quantization.get(key) not in allowed:
            raise CheckpointError(f"{where}: {key} {quantization.get(key)!r} is not supported")
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise CheckpointError(f"{where}: exactly one entry in config_groups is supported")
    (name, group), *_ = groups.items()
    _check_group(group, f"{where}: config_groups.{name}")
    ignore = quantization.get("ignore") or []
    if not isinstance(ignore, list) or not all(isinstance(item, str) for item in ignore):
        raise CheckpointError(f"{where}: ignore is not a list of names")
    if sum(item.startswith("re:") for item in ignore) > _MAX_PATTERNS:
        raise CheckpointError(f"{where}: ignore has more than {_MAX_PATTERNS} patterns")
    for item in ignore:
        if item.startswith("re:") and not _SAFE_PATTERN.fullmatch(item):
            raise CheckpointError(f"{where}: ignore pattern {item!r} is not supported")
    return tuple(ignore)


def _check_group(group: Any, where: str) -> None:
    if not isinstance(group, dict) or group.get("targets") != ["Linear"]:
        raise CheckpointError(f"{where}: targets must be ['Linear']")
    if group.get("output_activations") is not None:
        raise CheckpointError(f"{where}: output_activations is not supported")
    for part, required in (("weights", _WEIGHTS), ("input_activations", _ACTIVATIONS)):
        scheme = group.get(part)
        if not isinstance(scheme, dict):
            raise CheckpointError(f"{where}.{part} is missing")
        for key, value in required.items():
            if scheme.get(key) != value:
                raise CheckpointError(
                    f"{where}.{part}: {key} {scheme.get(key)!r} is not supported, only {value!r}"
                )
