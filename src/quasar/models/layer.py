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

from quasar.checkpoints.base import Checkpoint
from quasar.kernels.reference import rms_norm, rotate
from quasar.models.config import ModelConfig
from quasar.models.rotary import rotary_tables
from quasar.models.tensors import (
    EMBEDDING,
    FINAL_NORM,
    INPUT_NORM,
    LINEARS,
    POST_NORM,
    head_rows,
    layer_prefix,
    layer_shapes,
)

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


def read_layer(checkpoint: Checkpoint, config: ModelConfig, index: int) -> LayerTensors:
    """All tensors of layer `index`, as fp32."""
    prefix = layer_prefix(index)
    return {name: checkpoint.tensor(prefix + name).float() for name in layer_shapes(config)}


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
