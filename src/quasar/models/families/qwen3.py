"""Qwen3: Llama with a norm of each head of q and k before the rotation, and heads of their own
size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quasar.models.config import ModelConfig
from quasar.models.families.base import ConfigReader
from quasar.models.families.qwen2 import windows

MODEL_TYPES = ("qwen3",)


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """`head_dim` times the heads need not be the hidden size; `attention_bias` is as in Llama."""
    reader = ConfigReader(config)
    reader.exactly("hidden_act", "silu")
    bias = reader.flag("attention_bias", False)
    sizes = reader.sizes(head_dim=128)
    result = ModelConfig(
        family="qwen3",
        **sizes,
        **reader.rope(10000.0, sizes["head_dim"]),
        rms_norm_eps=reader.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        tied_embeddings=reader.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        windows=windows(reader, sizes["layers"]),
    )
    reader.finish()
    return result
