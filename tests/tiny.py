"""Tiny random models as folders on disk: small enough for the reference kernels, real formats."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

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
QWEN2 = {
    key: value for key, value in LLAMA.items() if key not in ("attention_bias", "mlp_bias")
} | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
CONFIGS = {"llama": LLAMA, "qwen2": QWEN2}


def random_tensors(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights large enough that greedy text is varied, in BF16."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).bfloat16()

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = config["num_attention_heads"] * config["head_dim"]
    kv_width = config["num_key_value_heads"] * config["head_dim"]
    tensors = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden),
        "model.norm.weight": (1 + 0.1 * torch.randn(hidden, generator=generator)).bfloat16(),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(config["vocab_size"], hidden, scale=0.3)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes = {
            "self_attn.q_proj": (width, hidden),
            "self_attn.k_proj": (kv_width, hidden),
            "self_attn.v_proj": (kv_width, hidden),
            "self_attn.o_proj": (hidden, width),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, shape in shapes.items():
            tensors[f"{prefix}.{name}.weight"] = normal(*shape, scale=1.5 * shape[1] ** -0.5)
            if config["model_type"] == "qwen2" and name.endswith(("q_proj", "k_proj", "v_proj")):
                tensors[f"{prefix}.{name}.bias"] = normal(shape[0], scale=0.5)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weight = 1 + 0.1 * torch.randn(hidden, generator=generator)
            tensors[f"{prefix}.{norm}.weight"] = weight.bfloat16()
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
    tensors = random_tensors(config, seed)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        weight = tensors.pop(name).float()
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().clamp(-127, 127).to(torch.int8)
        tensors[f"{name}_scale"] = scale
    weights = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights | {"strategy": "channel", "dynamic": False},
                "input_activations": weights | {"strategy": "token", "dynamic": True},
                "output_activations": None,
            }
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
