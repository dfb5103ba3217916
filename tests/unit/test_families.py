"""config.json by whitelist: what is understood, what is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import tiny_files
import torch
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from quasar.errors import CheckpointError
from quasar.models.families import parse_config
from quasar.models.scaling import Llama3Scaling, LongRopeScaling, YarnScaling

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


CLASSES = [LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig, Phi3Config, Gemma3TextConfig]


@pytest.mark.parametrize("make", CLASSES, ids=lambda c: c.model_type)
def test_what_transformers_writes_is_understood(make: Callable[[], Any]) -> None:
    """All keys, and those that save_pretrained keeps: defaults are the same."""
    config = make()
    parsed = parse_config(json.loads(config.to_json_string()))
    assert parsed.hidden_size == config.hidden_size
    heads = config.hidden_size // config.num_attention_heads
    assert parsed.head_dim == (getattr(config, "head_dim", None) or heads)
    rope = config.rope_parameters
    assert parsed.rope_theta == rope.get("full_attention", rope)["rope_theta"]
    assert parse_config(config.to_dict()) == parsed
    least = {"model_type": config.model_type}
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        least[key] = getattr(config, key)
    least |= {"vocab_size": config.vocab_size, "num_key_value_heads": config.num_key_value_heads}
    least["max_position_embeddings"] = config.max_position_embeddings
    assert parse_config(least) == parsed


# What config.json of published models says, as far as it is not in every config.
COMMON: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
}
LLAMA32 = COMMON | {
    "model_type": "llama",
    "hidden_act": "silu",
    "head_dim": 64,
    "mlp_bias": False,
    "attention_bias": False,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
QWEN3 = COMMON | {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "head_dim": 128,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_window_layers": 28,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
}
MISTRAL = COMMON | {
    "model_type": "mistral",
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}
PHI4_MINI = COMMON | {
    "model_type": "phi3",
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "full_attn_mod": 1,
    "hidden_act": "silu",
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "resid_pdrop": 0.0,
    "rope_scaling": {"long_factor": [2] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
}
GEMMA3 = COMMON | {
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
PANGU = COMMON | {"model_type": "PanguEmbedded", "bias": True, "rope_theta": 16000000.0}


def test_llama_3_scaling() -> None:
    assert parse_config(LLAMA32).rope_scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)


def test_qwen3_norms_heads_of_its_own_size() -> None:
    config = parse_config(QWEN3)
    assert config.qk_norm and config.head_dim == 128
    assert not (config.qkv_bias or config.o_bias or config.windows)


def test_mistral_window_may_be_null_but_absent_is_4096() -> None:
    assert parse_config(MISTRAL).windows == (4096,) * 6
    assert parse_config(MISTRAL | {"sliding_window": None}).windows == ()
    absent = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert parse_config(absent).windows == (4096,) * 6


def test_phi4_mini() -> None:
    config = parse_config(PHI4_MINI)
    assert (config.rotary_dim, config.windows) == (96, (262144,) * 6)
    scaling = config.rope_scaling
    assert isinstance(scaling, LongRopeScaling)
    assert (scaling.short, scaling.long) == ((1.0,) * 48, (2.0,) * 48)
    assert scaling.attention_factor == pytest.approx(math.sqrt(1 + math.log(8) / math.log(4096)))
    assert parse_config(PHI4_MINI | {"rope_scaling": None}).rope_scaling is None


def test_gemma3() -> None:
    config = parse_config(GEMMA3)
    assert config.windows == (512,) * 5 + (0,)
    assert (config.rope_theta, config.window_rope_theta) == (1e6, 1e4)
    assert (config.score_scale, config.embedding_scale) == (256**-0.5, 512**0.5)
    assert config.tied_embeddings and config.qk_norm and config.output_norms
    assert (config.activation, config.norm_offset) == ("gelu_tanh", 1.0)
    kinds = ["full_attention", *["sliding_attention"] * 5]
    assert parse_config(GEMMA3 | {"layer_types": kinds}).windows == (0,) + (512,) * 5


def test_openpangu_has_biases_on_q_k_v_and_o() -> None:
    config = parse_config(PANGU)
    assert config.qkv_bias and config.o_bias
    assert (config.rope_theta, config.head_dim) == (16e6, 128)
    assert not parse_config(PANGU | {"bias": False}).o_bias


def test_yarn_reaches_its_factor_times_the_original_context() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = parse_config(QWEN3 | {"rope_scaling": scaling})
    assert config.context_length == 4 * 32768
    assert config.rope_scaling == YarnScaling(
        4.0, 32768, 32.0, 1.0, True, pytest.approx(0.1 * math.log(4) + 1)
    )


def test_both_spellings_may_say_the_same() -> None:
    parameters = LLAMA32["rope_scaling"] | {"rope_theta": 500000.0}
    assert parse_config(LLAMA32 | {"rope_parameters": parameters}) == parse_config(LLAMA32)


def test_longrope_divides_by_the_factors_of_the_context() -> None:
    config = parse_config(PHI4_MINI)
    frequencies = torch.ones(48, dtype=torch.float64)
    scaling = config.rope_scaling
    assert scaling is not None
    assert torch.equal(scaling.stretched(frequencies, 1e4, 4096), frequencies)
    assert torch.equal(scaling.stretched(frequencies, 1e4, 4097), frequencies / 2)


@pytest.mark.parametrize(
    "model_type",
    ["qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss", "phimoe", "qwen3moe", "gpt-oss"],
)
def test_mixtures_of_experts_are_refused_by_name(model_type: str) -> None:
    named = f"'{model_type}': mixture of experts is not supported"
    with pytest.raises(CheckpointError, match=named):
        parse_config({"model_type": model_type})
    with pytest.raises(CheckpointError, match="mixture of experts"):
        parse_config(MISTRAL | {"num_local_experts": 8})


@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        (LLAMA32, {"rope_parameters": {"rope_theta": 1e4}}, "rope_theta=500000.0 contradicts"),
        (LLAMA32, {"rope_parameters": {"factor": 8}}, "rope_scaling.factor=32.0 contradicts"),
        (LLAMA32, {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "needs low_freq_factor"),
        (LLAMA32, {"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor=0.5"),
        (LLAMA32, {"rope_scaling": {"type": "linear", "factor": math.nan}}, "factor=nan"),
        (LLAMA32, {"rope_scaling": {"type": "linear", "factor": 2, "beta": 1}}, "scaling.beta=1"),
        (LLAMA32, {"rope_scaling": {"type": "yarn", "factor": 10**400}}, "factor=10+ is not"),
        (LLAMA32, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (QWEN3, {"attention_bias": 1}, "attention_bias=1"),
        (QWEN3, {"head_dim": 127}, "head_dim=127 is odd"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window=0"),
        (MISTRAL, {"layer_types": ["full_attention"] * 6}, "layer_types"),
        (PHI4_MINI, {"full_attn_mod": 2}, "full_attn_mod=2"),
        (PHI4_MINI, {"partial_rotary_factor": 0.76}, "partial_rotary_factor=0.76"),
        (PHI4_MINI, {"partial_rotary_factor": 1.0}, "short_factor is not a list of 64"),
        (PHI4_MINI, {"original_max_position_embeddings": 0}, "original_max_position_embeddings=0"),
        (PHI4_MINI, {"rope_scaling": {"type": "yarn", "factor": 2, "long_factor": [1]}}, "long_f"),
        (GEMMA3, {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3, {"sliding_window": None}, "sliding_window=None"),
        (GEMMA3, {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        (GEMMA3, {"layer_types": ["full_attention"] * 5}, "layer_types is not a list of 6"),
        (GEMMA3, {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.*kind of attention"),
        (
            GEMMA3,
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}},
            "sliding_attention.rope_type='linear' is not supported in layers with a window",
        ),
        (GEMMA3, {"model_type": "gemma3"}, "'gemma3' is not supported.*gemma3_text"),
        (PANGU, {"bias": "yes"}, "bias='yes'"),
    ],
)
def test_families_refuse_by_name(
    config: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    parse_config(config)
    with pytest.raises(CheckpointError, match=named):
        parse_config(config | change)


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


def test_qwen2_window_from_a_layer_on() -> None:
    used = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    assert parse_config(QWEN2 | used).windows == (0, 64)
    kinds = ["sliding_attention", "full_attention"]
    assert parse_config(QWEN2 | used | {"layer_types": kinds}).windows == (64, 0)


def test_qwen2_window_null_is_none_but_absent_is_4096() -> None:
    used = {"use_sliding_window": True, "max_window_layers": 1}
    absent = {key: value for key, value in QWEN2.items() if key != "sliding_window"}
    assert parse_config(absent | used).windows == (0, 4096)
    assert parse_config(absent | used | {"sliding_window": None}).windows == ()
    kinds = {"layer_types": ["full_attention", "sliding_attention"]}
    with pytest.raises(CheckpointError, match="layer_types"):
        parse_config(absent | used | {"sliding_window": None} | kinds)


# Keys of configs that older versions of transformers, trainers and other families leave behind.
LEFT_BEHIND: dict[str, Any] = {
    "add_cross_attention": False,
    "do_sample": True,
    "embd_pdrop": 0.0,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "layer_types": None,
    "max_sequence_length": 2048,
    "mlp_bias": False,
    "num_experts": None,
    "problem_type": None,
    "pruned_heads": {},
    "resid_pdrop": 0.0,
    "return_dict": True,
    "rope_interleaved": False,
    "temperature": 0.6,
    "use_bidirectional_attention": False,
    "use_mrope": False,
    "use_sliding_window": False,
}


@pytest.mark.parametrize("config", [LLAMA32, QWEN2, QWEN3, MISTRAL, PHI4_MINI, GEMMA3, PANGU])
def test_keys_left_behind_change_nothing(config: dict[str, Any]) -> None:
    assert parse_config(LEFT_BEHIND | config) == parse_config(config)


@pytest.mark.parametrize("config", [LLAMA32, QWEN2, QWEN3, MISTRAL, PHI4_MINI, GEMMA3, PANGU])
@pytest.mark.parametrize(
    "change",
    [
        {"is_encoder_decoder": True},
        {"is_causal": False},
        {"mlp_bias": True},
        {"pruned_heads": {"0": [1]}},
        {"rope_interleaved": True},
        {"use_bidirectional_attention": True},
        {"use_mrope": True},
    ],
)
def test_the_same_keys_are_refused_where_they_would(
    config: dict[str, Any], change: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError, match=next(iter(change))):
        parse_config(config | change)
