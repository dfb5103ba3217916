"""Names and shapes of a decoder's tensors, as Hugging Face calls them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quasar.checkpoints.base import Checkpoint, check_tensors
from quasar.errors import CheckpointError
from quasar.models.config import ModelConfig

GROUPS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The linears of a layer by the input they share."""

LINEARS = tuple(name for names in GROUPS.values() for name in names)
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
INPUT_NORM = "input_layernorm.weight"
POST_NORM = "post_attention_layernorm.weight"


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names (without prefix) and shapes of one layer's tensors."""
    hidden, inner = config.hidden_size, config.intermediate_size
    width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    rows = dict(
        zip(LINEARS, (width, kv_width, kv_width, hidden, inner, inner, hidden), strict=True)
    )
    columns = {"qkv": hidden, "o": width, "gate_up": hidden, "down": inner}
    biased = {"qkv": config.qkv_bias, "o": config.o_bias}
    shapes: dict[str, tuple[int, ...]] = {INPUT_NORM: (hidden,), POST_NORM: (hidden,)}
    for group, linears in GROUPS.items():
        for linear in linears:
            shapes[f"{linear}.weight"] = (rows[linear], columns[group])
            if biased.get(group, False):
                shapes[f"{linear}.bias"] = (rows[linear],)
    return shapes


def check_model(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Refuse missing, leftover and misshapen tensors."""
    table = (config.vocab_size, config.hidden_size)
    expected: dict[str, tuple[int, ...]] = {EMBEDDING: table, FINAL_NORM: (config.hidden_size,)}
    if not config.tied_embeddings or HEAD in checkpoint.names():
        expected[HEAD] = table
    for index in range(config.layers):
        prefix = layer_prefix(index)
        expected |= {prefix + name: shape for name, shape in layer_shapes(config).items()}
    check_tensors(checkpoint, expected)
    if config.tied_embeddings and HEAD in expected:
        if not torch.equal(checkpoint.tensor(HEAD), checkpoint.tensor(EMBEDDING)):
            raise CheckpointError(f"{checkpoint.path}: {HEAD} differs from the tied {EMBEDDING}")
        checkpoint.release()


def layer_prefix(index: int) -> str:
    return f"model.layers.{index}."


def head_rows(checkpoint: Checkpoint, config: ModelConfig) -> Tensor:
    """[vocab, hidden] bf16, the embedding where the two are tied."""
    return checkpoint.tensor(EMBEDDING if config.tied_embeddings else HEAD)
