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

Parser = Callable[[Mapping[str, Any]], ModelConfig]


@cache
def families() -> Mapping[str, Parser]:
    """The parser of every `model_type`."""
    parsers: dict[str, Parser] = {}
    for file in pkgutil.iter_modules(__path__):
        if file.name == "base":
            continue
        family = importlib.import_module(f"{__name__}.{file.name}")
        parsers.update(dict.fromkeys(family.MODEL_TYPES, family.parse))
    return parsers


def parse_config(config: Mapping[str, Any]) -> ModelConfig:
    """Translate config.json; refuses an unknown family, and any key or value not understood."""
    model_type = config.get("model_type")
    parse = families().get(model_type) if isinstance(model_type, str) else None
    if parse is None:
        known = ", ".join(sorted(families()))
        raise CheckpointError(f"model_type {model_type!r} is not supported; supported: {known}")
    return parse(config)
