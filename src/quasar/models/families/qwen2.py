"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quasar.models.config import ModelConfig
from quasar.models.families.base import ConfigReader

MODEL_TYPES = ("qwen2",)


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """The bias is part of the architecture, not of the config."""
    reader = ConfigReader(config)
    reader.exactly("hidden_act", "silu")
    sizes = reader.sizes()
    result = ModelConfig(
        family="qwen2",
        **sizes,
        **reader.rope(10000.0, sizes["head_dim"]),
        rms_norm_eps=reader.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        tied_embeddings=reader.flag("tie_word_embeddings", False),
        qkv_bias=True,
        windows=windows(reader, sizes["layers"]),
    )
    reader.finish()
    return result


def windows(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    """`use_sliding_window` gives one to the layers from `max_window_layers` on, null none."""
    used = reader.flag("use_sliding_window", False)
    window = reader.window(absent=4096) if used else None
    if window is None:
        reader.ignore("sliding_window", "max_window_layers")
        reader.exactly("layer_types", ["full_attention"] * layers)
        return ()
    first = reader.integer("max_window_layers", 1 << 20, 28, least=0)
    local = reader.local_layers([layer >= first for layer in range(layers)])
    return tuple(window if is_local else 0 for is_local in local)
