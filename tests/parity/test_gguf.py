"""GGUF files of every family, made as llama.cpp's converter does: the logits of the folder."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tiny
from quasar.checkpoints import open_checkpoint
from quasar.models.families import parse_config
from quasar.models.layer import logits
from quasar.models.tensors import check_model

TOKENS = torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(4))
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "PanguEmbedded": gguf.MODEL_ARCH.PANGU_EMBED,
}
# A GGUF file of gemma3 does not hold what is the same in every published model.
PUBLISHED = {
    "gemma3_text": {
        "num_hidden_layers": 7,
        "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
    }
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CASES = [(family, "plain", PUBLISHED.get(family, {})) for family in sorted(ARCHITECTURES)] + [
    ("llama", "llama3", {"rope_scaling": LLAMA3}),
    ("llama", "linear", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
    ("llama", "bias", {"attention_bias": True}),
    ("qwen2", "yarn", {"rope_scaling": YARN | {"beta_fast": 16}}),
    ("phi3", "window", {"sliding_window": 24}),
    ("phi3", "unscaled", {"rope_scaling": None, "partial_rotary_factor": 1.0}),
    (
        "gemma3_text",
        "no window",
        PUBLISHED["gemma3_text"] | {"sliding_window": None, "layer_types": ["full_attention"] * 7},
    ),
    (
        "gemma3_text",
        "27b",
        PUBLISHED["gemma3_text"]
        | {
            "num_hidden_layers": 62,
            "query_pre_attn_scalar": 12,
            "hidden_size": 48,
            "intermediate_size": 16,
        },
    ),
]


@pytest.mark.parametrize(
    ("family", "name", "change"), CASES, ids=[f"{c[0]}, {c[1]}" for c in CASES]
)
def test_gguf_computes_what_the_folder_does(tmp_path, family, name, change):
    folder = tiny.write_folder(tmp_path / "model", family, seed=3, **change)
    source = open_checkpoint(folder)
    file = open_checkpoint(
        write_gguf(tmp_path / "model.gguf", folder, tiny.CONFIGS[family] | change)
    )
    config = parse_config(file.config)
    check_model(file, config)
    for tensor in source.names():
        assert torch.equal(file.tensor(tensor), source.tensor(tensor)), tensor
    expected = logits(source, parse_config(source.config), TOKENS)
    assert (logits(file, config, TOKENS) - expected).abs().max() <= 1e-5 * expected.abs().max()
    if name != "llama3" and family != "phi3":
        assert config == parse_config(source.config)


def write_gguf(path: Path, folder: Path, config: dict[str, Any]) -> Path:
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    add_sizes(writer, config)
    add_rope(writer, config)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in converted(config, load_file(folder / "model.safetensors")):
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        writer.add_tensor(found, np.ascontiguousarray(tensor.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config["model_type"] != "phi3":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config["model_type"] == "phi3" or config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"] or 0)


def add_rope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_rope_freq_base(config["rope_theta"])
    if config["model_type"] == "phi3":
        add_longrope(writer, config)
        return
    writer.add_rope_dimension_count(config["head_dim"])
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type")
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", np.array(list(llama3(config)), np.float32))
    elif kind is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])


def add_longrope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """No type of scaling: the tensors say it."""
    original, scaling = config["original_max_position_embeddings"], config["rope_scaling"]
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))
    if scaling is not None:
        ratio = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(ratio) / math.log(original)))
        for length in ("long", "short"):
            values = np.array(scaling[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", values)


def llama3(config: dict[str, Any]) -> Iterator[float]:
    """Divisors of the frequencies."""
    scaling = config["rope_scaling"]
    for pair in range(config["head_dim"] // 2):
        frequency = config["rope_theta"] ** (-2 * pair / config["head_dim"])
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = min(max((turns - low) / (high - low), 0), 1)
        yield 1 / ((1 - smooth) / scaling["factor"] + smooth)


def converted(
    config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        projection = name.partition("self_attn.")[2][:1]
        if config["model_type"] in ("llama", "mistral") and projection in heads:
            halves = tensor.view(heads[projection], 2, -1, *tensor.shape[1:])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        if config["model_type"] == "gemma3_text" and name.endswith("norm.weight"):
            tensor = tensor.float() + 1
        yield name, tensor
