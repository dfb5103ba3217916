"""openPangu-Embedded: Llama with a bias on q, k, v and o."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quasar.models.config import ModelConfig
from quasar.models.families.base import ConfigReader

MODEL_TYPES = ("PanguEmbedded",)


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """`bias` is true unless the config says otherwise; the MLP has none."""
    reader = ConfigReader(config)
    reader.exactly("hidden_act", "silu")
    bias = reader.flag("bias", True)
    sizes = reader.sizes()
    result = ModelConfig(
        family="openpangu",
        **sizes,
        **reader.rope(16e6, sizes["head_dim"]),
        rms_norm_eps=reader.number("rms_norm_eps", 0.0, 1.0, 1e-5),
        tied_embeddings=reader.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        o_bias=bias,
    )
    reader.finish()
    return result
