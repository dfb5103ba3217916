"""Tiny random models as folders on disk: small enough for the reference kernels, real formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from quasar.checkpoints.packing import stored_linear
from quasar.kernels.base import LinearWeight
from quasar.models.families import parse_config
from quasar.models.tensors import EMBEDDING, FINAL_NORM, HEAD, layer_prefix, stored_shapes
from quasar.quantization.head import round_groups
from quasar.quantization.weights import round_to_nearest

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
}
_COMMON = {k: v for k, v in LLAMA.items() if k not in ("attention_bias", "mlp_bias")}
QWEN2 = _COMMON | {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "tie_word_embeddings": True,
}
QWEN3 = _COMMON | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 16,
}
MISTRAL = _COMMON | {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "sliding_window": 24,
}
OPENPANGU = _COMMON | {
    "model_type": "PanguEmbedded",
    "architectures": ["PanguEmbeddedForCausalLM"],
    "bias": True,
}
PHI3 = _COMMON | {
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 48,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.3],
        "long_factor": [1.2, 2.0, 5.0],
    },
    "sliding_window": None,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
GEMMA3 = {k: v for k, v in _COMMON.items() if k != "hidden_act"} | {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 3,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 20,
    "rope_local_base_freq": 100.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window": 24,
    "sliding_window_pattern": 2,
}
CONFIGS = {
    config["model_type"]: config
    for config in (LLAMA, QWEN2, QWEN3, MISTRAL, OPENPANGU, PHI3, GEMMA3)
}
IN_TRANSFORMERS = sorted(set(CONFIGS) - {"PanguEmbedded"})


def random_tensors(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights large enough that greedy text is varied, in BF16, by the family's own names."""
    generator = torch.Generator().manual_seed(seed)
    shape = parse_config(config)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * scale).bfloat16()

    def norm(size: int) -> torch.Tensor:
        weight = 1 + 0.1 * torch.randn(size, generator=generator)
        return (weight - shape.norm_offset).bfloat16()

    hidden = config["hidden_size"]
    tensors = {
        EMBEDDING: normal(config["vocab_size"], hidden, scale=1 / shape.embedding_scale),
        FINAL_NORM: norm(hidden),
    }
    if not config["tie_word_embeddings"]:
        tensors[HEAD] = normal(config["vocab_size"], hidden, scale=0.3)
    sizes = stored_shapes(shape)
    for layer in range(config["num_hidden_layers"]):
        made = {}
        for name in [name for name in sizes if "_proj." in name]:
            scale = 0.5 if name.endswith(".bias") else 1.5 * sizes[name][1] ** -0.5
            made[name] = normal(*sizes[name], scale=scale)
        made |= {name: norm(*size) for name, size in sizes.items() if name not in made}
        tensors |= {f"{layer_prefix(layer)}{name}": tensor for name, tensor in made.items()}
    return tensors


def write_folder(folder: Path, family: str, seed: int = 0, **overrides: object) -> Path:
    """A Hugging Face folder with config.json and model.safetensors, no tokenizer."""
    config = CONFIGS[family] | overrides
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config, seed), folder / "model.safetensors")
    return folder


def write_quantized(folder: Path, family: str, seed: int = 0, **overrides: object) -> Path:
    """The same model in the compressed-tensors W8A8 layout, by round-to-nearest."""
    config = CONFIGS[family] | overrides
    return _write_integers(folder, config, seed, round_to_nearest, "int-quantized", INT8_ROWS)


def write_four_bit(folder: Path, family: str, seed: int = 0) -> Path:
    """A model that groups of 32 inputs divide, in the W4A8 layout, by the nearest of few grids."""
    config = CONFIGS[family] | GROUPED
    return _write_integers(folder, config, seed, round_groups, "pack-quantized", INT4_GROUPS)


GROUPED = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
INT8_ROWS = INT8 | {"strategy": "channel", "dynamic": False}
INT4_GROUPS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": False,
    "strategy": "group",
    "group_size": 32,
    "dynamic": False,
}


def _write_integers(
    folder: Path,
    config: dict,
    seed: int,
    rounded: Callable[[torch.Tensor], LinearWeight],
    layout: str,
    weights: dict,
) -> Path:
    tensors = random_tensors(config, seed)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        parts = stored_linear(rounded(tensors.pop(name).float()))
        tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": INT8 | {"strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    save_file(tensors, folder / "model.safetensors")
    return folder
