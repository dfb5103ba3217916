"""Model families: one file each, found by listing this folder.

A family file has `MODEL_TYPES`, the `model_type` values it serves, and `parse(config)`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from quasar.errors import CheckpointError
from quasar.models.config import ModelConfig

_READING = ("base", "rope")
"""Files that families share."""
_WRAPPERS = {
    "gemma3": "it wraps a text and a vision model; give a folder of the text model alone "
    "(model_type 'gemma3_text') or a GGUF file, which holds no more",
}

Parser = Callable[[Mapping[str, Any]], ModelConfig]


@cache
def families() -> Mapping[str, Parser]:
    """The parser of every `model_type`."""
    parsers: dict[str, Parser] = {}
    for file in pkgutil.iter_modules(__path__):
        if file.name in _READING:
            continue
        family = importlib.import_module(f"{__name__}.{file.name}")
        parsers.update(dict.fromkeys(family.MODEL_TYPES, family.parse))
    return parsers


def parse_config(config: Mapping[str, Any]) -> ModelConfig:
    """Translate config.json; refuses an unknown family, and any key or value not understood."""
    model_type = config.get("model_type")
    if _has_experts(config):
        raise CheckpointError(f"model_type {model_type!r}: mixture of experts is not supported")
    parse = families().get(model_type) if isinstance(model_type, str) else None
    if parse is None:
        known = ", ".join(sorted(families(), key=str.lower))
        reason = _WRAPPERS.get(model_type) if isinstance(model_type, str) else None
        why = reason or f"supported: {known}"
        raise CheckpointError(f"model_type {model_type!r} is not supported; {why}")
    return parse(config)


def _has_experts(config: Mapping[str, Any]) -> bool:
    """Whether the model routes tokens to experts, by its type or by how many it says it has."""
    model_type = config.get("model_type")
    if isinstance(model_type, str) and (
        "moe" in model_type.lower() or model_type.replace("-", "_") in ("mixtral", "gpt_oss")
    ):
        return True
    counts = ("num_experts", "num_local_experts", "n_routed_experts", ".expert_count")
    return any(type(n) is int and n > 0 for key, n in config.items() if key.endswith(counts))
