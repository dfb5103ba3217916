"""Rotary embedding in config.json: `rope_theta` and `rope_scaling`, or `rope_parameters`."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, TypedDict

from quasar.errors import CheckpointError
from quasar.models.scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Scaling,
    YarnScaling,
)

MAX_CONTEXT = 1 << 24
_MAX_FACTOR = 1e6


class Rope(TypedDict):
    """Fields of ModelConfig."""

    rope_theta: float
    rope_scaling: Scaling | None
    rotary_dim: int | None
    context_length: int


class RopeReader:
    """The rotary settings of one config.json, from wherever they are spelled."""

    def __init__(self, context: int, head_dim: int) -> None:
        self.context, self.head_dim = context, head_dim
        self._settings: dict[str, tuple[str, Any]] = {}
        self._kind = ""

    def add_all(self, where: str, part: Any) -> None:
        """The settings of the object that the config has at `where`, or None."""
        if part is None:
            return
        if not isinstance(part, Mapping):
            raise CheckpointError(f"config: {where}={part!r} is not an object")
        for key, value in part.items():
            name = f"{where}.{key}" if where else str(key)
            self.add(name, "rope_type" if key == "type" else str(key), value)

    def add(self, name: str, key: str, value: Any) -> None:
        """One setting that the config has at `name`; None says nothing."""
        if value is None:
            return
        before = self._settings.setdefault(key, (name, value))
        if before[1] != value:
            raise CheckpointError(f"config: {before[0]}={before[1]!r} contradicts {name}={value!r}")

    def read(self, default_theta: float, partial: bool = False) -> Rope:
        """All settings; whatever nobody asked for is refused by name."""
        theta = self._number("rope_theta", 1.0, sys.float_info.max, default_theta)
        rotary_dim = self._rotary_dim() if partial else None
        if self._settings.get("partial_rotary_factor", ("", 1.0))[1] == 1.0:
            self._settings.pop("partial_rotary_factor", None)
        scaling, context = self._scaling(rotary_dim or self.head_dim)
        for name, value in self._settings.values():
            raise CheckpointError(f"config: {name}={value!r} is not supported")
        return {
            "rope_theta": theta,
            "rope_scaling": scaling,
            "rotary_dim": rotary_dim,
            "context_length": context,
        }

    def read_theta(self, default_theta: float) -> float:
        """The base where nothing but plain rotation is allowed."""
        rope = self.read(default_theta)
        if rope["rope_scaling"] is not None:
            raise CheckpointError(f"config: {self._kind} is not supported in layers with a window")
        return rope["rope_theta"]

    def _scaling(self, rotary_dim: int) -> tuple[Scaling | None, int]:
        """The scaling, and the context that the model reaches with it."""
        name, kind = self._settings.pop("rope_type", ("rope_type", "default"))
        self._kind = f"{name}={kind!r}"
        if kind == "default":
            self._settings.pop("original_max_position_embeddings", None)
            return None, self.context
        if kind == "linear":
            return LinearScaling(self._factor()), self.context
        if kind == "llama3":
            return self._llama3(), self.context
        if kind == "yarn":
            scaling = self._yarn()
            # Qwen's configs keep the original context there when YaRN is switched on.
            return scaling, max(self.context, int(scaling.original * scaling.factor))
        if kind in ("longrope", "su"):
            return self._longrope(rotary_dim // 2), self.context
        raise CheckpointError(f"config: {name}={kind!r} is not supported")

    def _llama3(self) -> Llama3Scaling:
        low = self._number("low_freq_factor", 0.0, _MAX_FACTOR)
        high = self._number("high_freq_factor", 0.0, _MAX_FACTOR)
        if not 0 < low < high:
            raise CheckpointError(f"config: low_freq_factor={low} is not below {high}")
        return Llama3Scaling(self._factor(), low, high, self._original())

    def _yarn(self) -> YarnScaling:
        """Attention is scaled by 0.1 ln(factor) + 1 unless the config says otherwise."""
        factor = self._factor()
        mscale = self._number("mscale", 0.0, _MAX_FACTOR, 0.0)
        all_dims = self._number("mscale_all_dim", 0.0, _MAX_FACTOR, 0.0)
        attention = 0.1 * math.log(factor) + 1.0
        if mscale and all_dims:
            attention = (0.1 * mscale * math.log(factor) + 1.0) / (
                0.1 * all_dims * math.log(factor) + 1.0
            )
        return YarnScaling(
            factor,
            self._original(),
            self._number("beta_fast", 1e-3, _MAX_FACTOR, 32.0),
            self._number("beta_slow", 1e-3, _MAX_FACTOR, 1.0),
            self._flag("truncate", True),
            self._number("attention_factor", 1e-3, _MAX_FACTOR, attention),
        )

    def _longrope(self, pairs: int) -> LongRopeScaling:
        """Attention is scaled by sqrt(1 + ln(factor) / ln(original)) unless the config says."""
        original = self._original()
        factor = self._number("factor", 1e-3, _MAX_FACTOR, self.context / original)
        attention = 1.0
        if factor > 1.0 and original > 1:
            attention = math.sqrt(1 + math.log(factor) / math.log(original))
        return LongRopeScaling(
            self._divisors("short_factor", pairs),
            self._divisors("long_factor", pairs),
            original,
            self._number("attention_factor", 1e-3, _MAX_FACTOR, attention),
        )

    def _rotary_dim(self) -> int | None:
        share = self._number("partial_rotary_factor", 1e-3, 1.0, 1.0)
        if share == 1.0:
            return None
        dims = int(self.head_dim * share)
        if dims < 2 or dims % 2:
            raise CheckpointError(
                f"config: partial_rotary_factor={share} of head_dim={self.head_dim} is no even "
                "number of dimensions"
            )
        return dims

    def _factor(self) -> float:
        return self._number("factor", 1.0, _MAX_FACTOR)

    def _original(self) -> int:
        name, value = self._take("original_max_position_embeddings", self.context)
        if type(value) is not int or not 1 <= value <= MAX_CONTEXT:
            raise CheckpointError(f"config: {name}={value!r} is not an integer in 1..{MAX_CONTEXT}")
        return value

    def _divisors(self, key: str, count: int) -> tuple[float, ...]:
        name, value = self._take(key, None)
        numbers = isinstance(value, list) and all(
            type(x) in (int, float) and 1e-6 < x < 1e9 for x in value
        )
        if not numbers or len(value) != count:
            raise CheckpointError(f"config: {name} is not a list of {count} positive numbers")
        return tuple(float(x) for x in value)

    def _number(self, key: str, least: float, most: float, default: float | None = None) -> float:
        name, value = self._take(key, default)
        if type(value) not in (int, float) or not least <= value <= most:
            raise CheckpointError(
                f"config: {name}={value!r} is not a finite number from {least:g} to {most:g}"
            )
        return float(value)

    def _flag(self, key: str, default: bool) -> bool:
        name, value = self._take(key, default)
        if type(value) is not bool:
            raise CheckpointError(f"config: {name}={value!r} is not true or false")
        return value

    def _take(self, key: str, default: Any) -> tuple[str, Any]:
        name, value = self._settings.pop(key, (key, default))
        if value is None:
            raise CheckpointError(f"config: {self._kind} needs {name}, which is missing")
        return name, value
