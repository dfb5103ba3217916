"""The decoder in plain fp32 torch, one layer in memory at a time: for calibration and parity.

This is offline work over whole texts, so it uses the fast library products (their bits depend on
the number of rows); a verification pass never does. A linear is any callable, so that a quantised
product can take the place of an fp32 one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quasar.checkpoints.base import Checkpoint, check_tensors
from quasar.kernels.reference import rms_norm, rotate
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

LayerTensors = dict[str, Tensor]
"""The fp32 tensors of one layer by Hugging Face name without the layer's prefix."""
Product = Callable[[Tensor], Tensor]
"""[rows, in] fp32 -> [rows, out] fp32."""
Observer = Callable[[str, Tensor], None]
"""Told each group's name and its input [rows, in]."""


@dataclass(frozen=True, slots=True)
class FloatLinear:
    """weight [out, in] and bias [out] or None, both fp32."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def float_linears(tensors: Mapping[str, Tensor]) -> dict[str, Product]:
    return {n: FloatLinear(tensors[f"{n}.weight"], tensors.get(f"{n}.bias")) for n in LINEARS}


def unobserved(group: str, x: Tensor) -> None:
    pass


class Layer:
    """hidden [tokens, hidden_size] of one sequence that starts at position 0 -> the same shape."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        linears: Mapping[str, Product] | None = None,
    ) -> None:
        self.config = config
        self.input_norm, self.post_norm = tensors[INPUT_NORM], tensors[POST_NORM]
        products = float_linears(tensors) if linears is None else linears
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = (
            products[name] for name in LINEARS
        )

    def __call__(self, hidden: Tensor, observe: Observer = unobserved) -> Tensor:
        eps = self.config.rms_norm_eps
        normed = rms_norm(hidden, self.input_norm, eps)
        observe("qkv", normed)
        attended = self._attend(normed)
        observe("o", attended)
        hidden = hidden + self.o(attended)
        normed = rms_norm(hidden, self.post_norm, eps)
        observe("gate_up", normed)
        gated = F.silu(self.gate(normed)) * self.up(normed)
        observe("down", gated)
        return hidden + self.down(gated)

    def _attend(self, normed: Tensor) -> Tensor:
        """Causal grouped-query attention: [tokens, hidden] -> [tokens, heads * head_dim]."""
        tokens, dim = normed.shape[0], self.config.head_dim
        cos, sin = rotary_tables(self.config, tokens)
        q, k, v = (
            p(normed).view(tokens, -1, dim).transpose(0, 1) for p in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(
            rotate(q, cos, sin)[None],
            rotate(k, cos, sin)[None],
            v[None],
            is_causal=True,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1).reshape(tokens, -1)


def rotary_tables(config: ModelConfig, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, head_dim / 2] fp32, the angles taken in fp64."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


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
    if not config.tied_embeddings:
        expected[HEAD] = table
    for index in range(config.layers):
        prefix = layer_prefix(index)
        expected |= {prefix + name: shape for name, shape in layer_shapes(config).items()}
    check_tensors(checkpoint, expected)


def read_layer(checkpoint: Checkpoint, config: ModelConfig, index: int) -> LayerTensors:
    """All tensors of layer `index`, as fp32."""
    prefix = layer_prefix(index)
    return {name: checkpoint.tensor(prefix + name).float() for name in layer_shapes(config)}


def layer_prefix(index: int) -> str:
    return f"model.layers.{index}."


def head_rows(checkpoint: Checkpoint, config: ModelConfig) -> Tensor:
    """[vocab, hidden] bf16, the embedding where the two are tied."""
    return checkpoint.tensor(EMBEDDING if config.tied_embeddings else HEAD)


def head_chunks(rows: Tensor, size: int = 8192) -> Iterator[tuple[int, Tensor]]:
    """(first token id, fp32 rows) of the head, so that it is never whole in fp32."""
    for start in range(0, rows.shape[0], size):
        yield start, rows[start : start + size].float()


def logits(checkpoint: Checkpoint, config: ModelConfig, tokens: Tensor) -> Tensor:
    """tokens [n] of one sequence -> logits [n, vocab] fp32, reading one layer at a time."""
    hidden = checkpoint.tensor(EMBEDDING)[tokens].float()
    for index in range(config.layers):
        hidden = Layer(config, read_layer(checkpoint, config, index))(hidden)
    normed = rms_norm(hidden, checkpoint.tensor(FINAL_NORM).float(), config.rms_norm_eps)
    chunks = head_chunks(head_rows(checkpoint, config))
    return torch.cat([normed @ rows.t() for _, rows in chunks], dim=-1)
