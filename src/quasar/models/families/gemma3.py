"""Gemma 3, text: norms that multiply by 1 + w, also after each sublayer and on q and k; most layers
see a window and have a rotary base of their own; gated GELU; the embedding times sqrt(hidden)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quasar.errors import CheckpointError
from quasar.models.config import Layout, ModelConfig
from quasar.models.families.base import ConfigReader
from quasar.models.families.rope import Rope

MODEL_TYPES = ("gemma3_text",)

LAYOUT = Layout(
    names={
        "self_attn.output_norm.weight": "post_attention_layernorm.weight",
        "post_attention_layernorm.weight": "pre_feedforward_layernorm.weight",
        "mlp.output_norm.weight": "post_feedforward_layernorm.weight",
    }
)


def parse(config: Mapping[str, Any]) -> ModelConfig:
    reader = ConfigReader(config)
    reader.exactly("hidden_activation", "gelu_pytorch_tanh")
    reader.exactly("attn_logit_softcapping", None)
    reader.exactly("final_logit_softcapping", None)
    bias = reader.flag("attention_bias", False)
    sizes = reader.sizes(head_dim=256, kv_heads=4)
    rope, window_theta = _rope(reader, sizes["head_dim"])
    result = ModelConfig(
        family="gemma3",
        **sizes,
        **rope,
        rms_norm_eps=reader.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        tied_embeddings=reader.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        windows=_windows(reader, sizes["layers"]),
        window_rope_theta=window_theta,
        attention_scale=reader.number("query_pre_attn_scalar", 0.0, 1e9, 256) ** -0.5,
        activation="gelu_tanh",
        norm_offset=1.0,
        output_norms=True,
        embedding_scale=sizes["hidden_size"] ** 0.5,
        layout=LAYOUT,
    )
    reader.finish()
    return result


def _windows(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    """Without `layer_types` every sixth layer (`sliding_window_pattern`) sees everything."""
    pattern = reader.integer("sliding_window_pattern", 1 << 10, 6)
    reader.ignore("_sliding_window_pattern")
    local = reader.local_layers([bool((layer + 1) % pattern) for layer in range(layers)])
    if not any(local):
        reader.ignore("sliding_window")
        return ()
    window = reader.window(absent=4096)
    if not window:
        raise CheckpointError("config: sliding_window=None, but some layers have one")
    return tuple(window if is_local else 0 for is_local in local)


def _rope(reader: ConfigReader, head_dim: int) -> tuple[Rope, float]:
    """Settings of the layers that see everything, and the base of those with a window."""
    nested = reader.optional("rope_parameters") or {}
    if not isinstance(nested, Mapping) or not set(nested) <= {
        "full_attention",
        "sliding_attention",
    }:
        raise CheckpointError(
            f"config: rope_parameters={nested!r} is not an object by kind of attention"
        )
    parts = {f"rope_parameters.{kind}": part for kind, part in nested.items()}
    local = parts.pop("rope_parameters.sliding_attention", None)
    wide = reader.rope_reader({"rope_scaling": reader.optional("rope_scaling"), **parts}, head_dim)
    narrow = reader.rope_reader(
        {"rope_parameters.sliding_attention": local}, head_dim, "rope_local_base_freq"
    )
    return wide.read(1e6), narrow.read_theta(10000.0)
