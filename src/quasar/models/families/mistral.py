"""Mistral: Llama whose rows see a sliding window, or everything in later models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quasar.models.config import ModelConfig
from quasar.models.families.base import ConfigReader

MODEL_TYPES = ("mistral",)


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """`sliding_window` null says none; where it is absent transformers takes 4096."""
    reader = ConfigReader(config)
    reader.exactly("hidden_act", "silu")
    reader.exactly("attention_bias", False)
    sizes = reader.sizes(kv_heads=8)
    window = reader.window(absent=4096)
    result = ModelConfig(
        family="mistral",
        **sizes,
        **reader.rope(10000.0, sizes["head_dim"]),
        rms_norm_eps=reader.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        tied_embeddings=reader.flag("tie_word_embeddings", False),
        windows=(window,) * sizes["layers"] if window else (),
    )
    reader.finish()
    return result
