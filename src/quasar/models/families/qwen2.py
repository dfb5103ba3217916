"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v. Full attention only."""

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
    reader.exactly("use_sliding_window", False)
    reader.ignore("sliding_window", "max_window_layers")
    sizes = reader.sizes()
    reader.exactly("layer_types", ["full_attention"] * sizes["layers"])
    reader.exactly("use_mrope", False)
    result = ModelConfig(
        family="qwen2",
        **sizes,
        rms_norm_eps=reader.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        rope_theta=reader.rope_theta(10000.0),
        tied_embeddings=reader.flag("tie_word_embeddings", False),
        qkv_bias=True,
    )
    reader.finish()
    return result
