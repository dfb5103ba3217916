"""Llama and what shares its mathematics (SmolLM2, TinyLlama, Vicuna): RMSNorm, GQA, gated SiLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quasar.models.config import ModelConfig
from quasar.models.families.base import ConfigReader

MODEL_TYPES = ("llama",)


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """`attention_bias` puts a bias on q, k, v and o alike."""
    reader = ConfigReader(config)
    reader.exactly("hidden_act", "silu")
    bias = reader.flag("attention_bias", False)
    sizes = reader.sizes()
    result = ModelConfig(
        family="llama",
        **sizes,
        **reader.rope(10000.0, sizes["head_dim"]),
        rms_norm_eps=reader.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        tied_embeddings=reader.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        o_bias=bias,
    )
    reader.finish()
    return result
