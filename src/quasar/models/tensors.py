"""A decoder's tensors: our names for them, their shapes, and how checkpoints store them.

Names are those of Hugging Face's Llama; a family whose files use others says so in its `Layout`.
Everything above this file sees our names, one linear each for q, k, v, gate and up, and norm
weights as they multiply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quasar.checkpoints.base import Checkpoint, check_tensors
from quasar.errors import CheckpointError
from quasar.kernels.base import DenseWeight, Int4Weight, Int8Weight, LinearWeight, concatenate
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
"""Makes the input of q, k and v."""
POST_NORM = "post_attention_layernorm.weight"
"""Makes the input of gate and up, in every family."""
Q_NORM, K_NORM = "self_attn.q_norm.weight", "self_attn.k_norm.weight"
O_NORM, DOWN_NORM = "self_attn.output_norm.weight", "mlp.output_norm.weight"
"""Norms of what `o` and `down` give, before it is added to the residual stream."""


def norm_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names (without prefix) and shapes of one layer's norms."""
    names = (INPUT_NORM, POST_NORM) + ((O_NORM, DOWN_NORM) if config.output_norms else ())
    heads = (Q_NORM, K_NORM) if config.qk_norm else ()
    hidden: tuple[int, ...] = (config.hidden_size,)
    return dict.fromkeys(names, hidden) | dict.fromkeys(heads, (config.head_dim,))


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Names (without prefix) of one layer's linears and [out, in] of each."""
    hidden, inner = config.hidden_size, config.intermediate_size
    width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    rows = (width, kv_width, kv_width, hidden, inner, inner, hidden)
    columns = {"qkv": hidden, "o": width, "gate_up": hidden, "down": inner}
    widths = [columns[group] for group, names in GROUPS.items() for _ in names]
    return dict(zip(LINEARS, zip(rows, widths, strict=True), strict=True))


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names (without prefix) and shapes of one layer's tensors."""
    biased = GROUPS["qkv"] * config.qkv_bias + GROUPS["o"] * config.o_bias
    shapes: dict[str, tuple[int, ...]] = dict(norm_shapes(config))
    for name, shape in linear_shapes(config).items():
        shapes[f"{name}.weight"] = shape
        if name in biased:
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def stored_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """As `layer_shapes`, by the names that a checkpoint of this family has."""
    shapes = layer_shapes(config)
    stored = dict(shapes)
    for module, parts in config.layout.fused.items():
        for kind in ("weight", "bias"):
            found = [stored.pop(name) for part in parts if (name := f"{part}.{kind}") in stored]
            if found:
                stored[f"{module}.{kind}"] = (sum(shape[0] for shape in found), *found[0][1:])
    return {config.layout.names.get(name, name): shape for name, shape in stored.items()}


def check_model(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Refuse missing, leftover and misshapen tensors."""
    table = (config.vocab_size, config.hidden_size)
    expected: dict[str, tuple[int, ...]] = {EMBEDDING: table, FINAL_NORM: (config.hidden_size,)}
    if not config.tied_embeddings or HEAD in checkpoint.names():
        expected[HEAD] = table
    stored = stored_shapes(config)
    for index in range(config.layers):
        expected |= {layer_prefix(index) + name: shape for name, shape in stored.items()}
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


def final_norm(checkpoint: Checkpoint, config: ModelConfig) -> Tensor:
    """[hidden] fp32, as it multiplies."""
    return checkpoint.tensor(FINAL_NORM).float() + config.norm_offset


def read_norms(checkpoint: Checkpoint, config: ModelConfig, index: int) -> dict[str, Tensor]:
    """The norm weights of one layer, fp32, as they multiply."""
    prefix, names = layer_prefix(index), config.layout.names
    return {
        name: checkpoint.tensor(prefix + names.get(name, name)).float() + config.norm_offset
        for name in norm_shapes(config)
    }


def read_linears(
    checkpoint: Checkpoint, config: ModelConfig, index: int
) -> dict[str, LinearWeight]:
    """The linears of one layer in the precision they are stored in, fused ones taken apart."""
    prefix, shapes = layer_prefix(index), linear_shapes(config)
    fused = config.layout.fused
    inside = {part for parts in fused.values() for part in parts}
    linears = {name: checkpoint.linear(prefix + name) for name in LINEARS if name not in inside}
    for module, parts in fused.items():
        whole, start = checkpoint.linear(prefix + module), 0
        for part in parts:
            rows = slice(start, start + shapes[part][0])
            linears[part], start = _rows(whole, rows), rows.stop
    return {name: linears[name] for name in LINEARS}


def _rows(weight: LinearWeight, rows: slice) -> LinearWeight:
    bias = None if weight.bias is None else weight.bias[rows]
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.weight[rows], bias)
    codes, scale, rotation = weight.codes[rows], weight.scale[rows], weight.rotation
    if isinstance(weight, Int8Weight):
        return Int8Weight(codes, scale, bias, rotation)
    return Int4Weight(codes, scale, weight.zero[rows], bias, rotation)


def storable_norm(weight: Tensor, config: ModelConfig) -> Tensor:
    """The nearest norm weight (as it multiplies, fp32) that a BF16 file of this family can hold."""
    return (weight - config.norm_offset).bfloat16().float() + config.norm_offset


def stored_norms(norms: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """What a checkpoint of this family holds for these norms of a layer: its names, BF16."""
    names = config.layout.names
    return {
        names.get(name, name): (weight - config.norm_offset).bfloat16()
        for name, weight in norms.items()
    }


def stored_modules(names: Sequence[str], config: ModelConfig) -> list[str]:
    """The modules that hold these linears in a checkpoint of this family."""
    inside = {part: module for module, parts in config.layout.fused.items() for part in parts}
    return list(dict.fromkeys(inside.get(name, name) for name in names))


def stored_linears(
    linears: Mapping[str, LinearWeight], config: ModelConfig
) -> dict[str, LinearWeight]:
    """The linears of a layer as a checkpoint of this family has them: its names, fused or not."""
    stored = dict(linears)
    for module, parts in config.layout.fused.items():
        stored[module] = concatenate(tuple(stored.pop(part) for part in parts))
    return stored
