"""Logits as others define them: transformers in fp32, or a family's published equations."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file


def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """tokens [n] of one sequence -> [n, vocab] fp32, from the BF16 weights of the folder."""
    if json.loads((folder / "config.json").read_text())["model_type"] == "PanguEmbedded":
        return openpangu_logits(folder, tokens)
    model, notes = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not notes["missing_keys"] and not notes["unexpected_keys"]
    with torch.inference_mode():
        return model(tokens[None]).logits[0]


def openpangu_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """openPangu-Embedded (arXiv 2505.22375), which transformers lacks, head by head.

    h = x + O(attention(norm(x))) + b_o;  y = h + D(silu(G norm(h)) * U norm(h)).  q, k and v have
    biases; coordinates (i, i + d/2) of q and k are turned by position * theta^(-2i/d).
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: t.double() for name, t in load_file(folder / "model.safetensors").items()}
    x = tensors["model.embed_tokens.weight"][tokens]
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        layer = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        x = x + openpangu_attention(config, layer, norm(x, layer["input_layernorm.weight"], config))
        inner = norm(x, layer["post_attention_layernorm.weight"], config)
        gate, up = (inner @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * torch.sigmoid(gate) * up) @ layer["mlp.down_proj.weight"].T
    tied = config["tie_word_embeddings"]
    head = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    return (norm(x, tensors["model.norm.weight"], config) @ head.T).float()


def norm(x: torch.Tensor, weight: torch.Tensor, config: dict) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + config["rms_norm_eps"])


def openpangu_attention(config: dict, layer: dict, x: torch.Tensor) -> torch.Tensor:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q, k, v = (
        x @ layer[f"self_attn.{name}_proj.weight"].T + layer[f"self_attn.{name}_proj.bias"]
        for name in "qkv"
    )
    size = q.shape[1] // heads
    given = []
    for head in range(heads):
        at, kv_at = head * size, head * kv_heads // heads * size
        query = turned(q[:, at : at + size], config["rope_theta"])
        key = turned(k[:, kv_at : kv_at + size], config["rope_theta"])
        scores = (query @ key.T) / math.sqrt(size)
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        weights = torch.softmax(scores.masked_fill(future, -math.inf), dim=-1)
        given.append(weights @ v[:, kv_at : kv_at + size])
    projection = layer["self_attn.o_proj.weight"]
    return torch.cat(given, dim=1) @ projection.T + layer["self_attn.o_proj.bias"]


def turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """[positions, size]: pairs as complex numbers, turned by their angles."""
    half = x.shape[1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[0], dtype=torch.float64)[:, None] * frequencies
    pairs = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag), dim=1)
