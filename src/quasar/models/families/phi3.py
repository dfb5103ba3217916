"""Phi-3, Phi-3.5 and Phi-4: Llama with fused q, k, v and gate, up, LongRoPE, heads that may be
rotated in part, and a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quasar.models.config import Layout, ModelConfig
from quasar.models.families.base import ConfigReader

MODEL_TYPES = ("phi3",)

LAYOUT = Layout(
    fused={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    }
)


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """Keys of Microsoft's own code for what these models do not do must say so."""
    reader = ConfigReader(config)
    reader.exactly("hidden_act", "silu")
    reader.exactly("attention_bias", False)
    reader.exactly("lm_head_bias", False)
    reader.exactly("full_attn_mod", 1)
    reader.exactly("interpolate_factor", 1)
    sizes = reader.sizes()
    window = reader.window(absent=None)
    result = ModelConfig(
        family="phi3",
        **sizes,
        **reader.rope(10000.0, sizes["head_dim"], partial=True),
        rms_norm_eps=reader.number("rms_norm_eps", 0.0, 1.0, 1e-5),
        tied_embeddings=reader.flag("tie_word_embeddings", False),
        windows=(window,) * sizes["layers"] if window else (),
        layout=LAYOUT,
    )
    reader.finish()
    return result
