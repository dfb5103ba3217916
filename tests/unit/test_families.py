"""config.json by whitelist: what is understood, what is refused by name."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import tiny_files
from transformers import LlamaConfig, Qwen2Config

from quasar.errors import CheckpointError
from quasar.models.families import parse_config

QWEN2: dict[str, Any] = tiny_files.CONFIG | {"model_type": "qwen2"}


def test_llama_fields() -> None:
    config = parse_config(tiny_files.CONFIG)
    assert (config.family, config.hidden_size, config.layers) == ("llama", 32, 2)
    assert (config.heads, config.kv_heads, config.head_dim) == (4, 2, 8)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-5, 10000.0)
    assert not (config.qkv_bias or config.o_bias or config.tied_embeddings)


def test_llama_attention_bias_covers_o() -> None:
    config = parse_config(tiny_files.CONFIG | {"attention_bias": True})
    assert config.qkv_bias and config.o_bias


def test_qwen2_always_has_qkv_bias() -> None:
    config = parse_config(QWEN2)
    assert (config.family, config.qkv_bias, config.o_bias) == ("qwen2", True, False)


@pytest.mark.parametrize("config", [LlamaConfig(), Qwen2Config()], ids=lambda c: c.model_type)
def test_what_transformers_writes_is_understood(config: Any) -> None:
    parsed = parse_config(json.loads(config.to_json_string()))
    assert parsed.hidden_size == config.hidden_size
    assert parsed.rope_theta == 10000.0
    assert parsed.head_dim == config.hidden_size // config.num_attention_heads


def test_smollm2_config_is_understood() -> None:
    extras = {
        "architectures": ["LlamaForCausalLM"],
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_scaling": None,
        "transformers.js_config": {"dtype": "q4"},
        "pretraining_tp": 1,
        "hidden_act": "silu",
    }
    assert parse_config(tiny_files.CONFIG | extras) == parse_config(tiny_files.CONFIG)


def test_rope_parameters_replace_rope_theta() -> None:
    config = {k: v for k, v in tiny_files.CONFIG.items() if k != "rope_theta"}
    rope = {"rope_type": "default", "rope_theta": 5e5}
    assert parse_config(config | {"rope_parameters": rope}).rope_theta == 5e5


def test_head_dim_may_differ_from_hidden_over_heads() -> None:
    assert parse_config(tiny_files.CONFIG | {"head_dim": 16}).head_dim == 16


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, r"'mamba'.*supported: gemma3_text, llama, mistral, PanguEmb"),
        ({"model_type": None}, "None"),
        ({"model_type": ["llama"]}, r"\['llama'\]"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 33}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"vocab_size": 2**40}, "vocab_size"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": math.inf}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta=10+ is not a finite number"),
        ({"rope_theta": 0.5}, "rope_theta=0.5"),
        ({"rope_parameters": {"rope_theta": 10**400}}, r"rope_parameters\.rope_theta=10+$"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"num_hidden_layers": 10**400}, "num_hidden_layers"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings='true' is not true or false"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, "rope_scaling.*'dynamic'"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"rope_scaling.*\['yarn'\]"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.*'yarn' needs factor"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"_attn_implementation_internal": "evil/kernel"}, "_attn_implementation_internal"),
    ],
)
def test_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse_config(tiny_files.CONFIG | change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"use_sliding_window": 1}, "use_sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window=0"),
        ({"use_sliding_window": True, "layer_types": ["chunked_attention"] * 2}, "'chunked_att"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_qwen2_refuses_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse_config(QWEN2 | change)


def test_qwen2_window_without_use_is_harmless() -> None:
    unused = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 1}
    assert parse_config(QWEN2 | unused) == parse_config(QWEN2)
