"""The decoder in plain fp32 torch, one layer in memory at a time: for calibration and parity.

This is offline work over whole texts, so it uses the fast library products (their bits depend on
the number of rows); a verification pass never does. A linear is any callable, so that a quantised
product can take the place of an fp32 one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quasar.checkpoints.base import Checkpoint
from quasar.kernels.base import Activation, DenseWeight
from quasar.kernels.reference import rms_norm, rotate
from quasar.models.config import ModelConfig
from quasar.models.rotary import rotary_table
from quasar.models.tensors import (
    DOWN_NORM,
    EMBEDDING,
    INPUT_NORM,
    K_NORM,
    LINEARS,
    O_NORM,
    POST_NORM,
    Q_NORM,
    final_norm,
    head_rows,
    read_linears,
    read_norms,
)

LayerTensors = dict[str, Tensor]
"""The fp32 tensors of one layer by the names of `tensors.py`, norm weights as they multiply."""
Product = Callable[[Tensor], Tensor]
"""[rows, in] fp32 -> [rows, out] fp32."""
Observer = Callable[[str, Tensor], None]
"""Told each group's name and its input [rows, in]."""
ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


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
        index: int,
        tensors: Mapping[str, Tensor],
        linears: Mapping[str, Product] | None = None,
    ) -> None:
        """`index` says which window and rotary embedding the layer has."""
        self.config, self.window = config, config.window(index)
        self.input_norm, self.post_norm = tensors[INPUT_NORM], tensors[POST_NORM]
        self.q_norm, self.k_norm = tensors.get(Q_NORM), tensors.get(K_NORM)
        self.o_norm, self.down_norm = tensors.get(O_NORM), tensors.get(DOWN_NORM)
        products = float_linears(tensors) if linears is None else linears
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = (
            products[name] for name in LINEARS
        )

    def __call__(self, hidden: Tensor, observe: Observer = unobserved) -> Tensor:
        normed = self._normed(hidden, self.input_norm)
        observe("qkv", normed)
        attended = self._attend(normed)
        observe("o", attended)
        hidden = hidden + self._normed(self.o(attended), self.o_norm)
        normed = self._normed(hidden, self.post_norm)
        observe("gate_up", normed)
        gated = ACTIVATIONS[self.config.activation](self.gate(normed)) * self.up(normed)
        observe("down", gated)
        return hidden + self._normed(self.down(gated), self.down_norm)

    def _normed(self, x: Tensor, norm: Tensor | None) -> Tensor:
        return x if norm is None else rms_norm(x, norm, self.config.rms_norm_eps)

    def _attend(self, normed: Tensor) -> Tensor:
        """Causal grouped-query attention: [tokens, hidden] -> [tokens, heads * head_dim]."""
        tokens, dim = normed.shape[0], self.config.head_dim
        cos, sin = rotary_table(self.config, tokens, self.window)
        mask = self._mask(tokens)
        q, k, v = (
            p(normed).view(tokens, -1, dim).transpose(0, 1) for p in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(
            rotate(self._normed(q, self.q_norm), cos, sin)[None],
            rotate(self._normed(k, self.k_norm), cos, sin)[None],
            v[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.config.score_scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1).reshape(tokens, -1)

    def _mask(self, tokens: int) -> Tensor | None:
        """[tokens, tokens], true where a row sees a column; None where causal is all it is."""
        if not 0 < self.window < tokens:
            return None
        seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        return seen.triu(1 - self.window)


def read_layer(checkpoint: Checkpoint, config: ModelConfig, index: int) -> LayerTensors:
    """All tensors of layer `index` of an unquantised model, as fp32."""
    tensors = read_norms(checkpoint, config, index)
    for name, linear in read_linears(checkpoint, config, index).items():
        assert isinstance(linear, DenseWeight)
        tensors[f"{name}.weight"] = linear.weight.float()
        if linear.bias is not None:
            tensors[f"{name}.bias"] = linear.bias
    return tensors


def embedded(table: Tensor, tokens: Tensor, config: ModelConfig) -> Tensor:
    """table [vocab, hidden] bf16, tokens [n] -> the residual stream [n, hidden] fp32."""
    return table[tokens].float() * config.embedding_scale


def head_chunks(rows: Tensor, size: int = 8192) -> Iterator[tuple[int, Tensor]]:
    """(first token id, fp32 rows) of the head, so that it is never whole in fp32."""
    for start in range(0, rows.shape[0], size):
        yield start, rows[start : start + size].float()


def logits(checkpoint: Checkpoint, config: ModelConfig, tokens: Tensor) -> Tensor:
    """tokens [n] of one sequence -> logits [n, vocab] fp32, reading one layer at a time."""
    hidden = embedded(checkpoint.tensor(EMBEDDING), tokens, config)
    for index in range(config.layers):
        hidden = Layer(config, index, read_layer(checkpoint, config, index))(hidden)
    normed = rms_norm(hidden, final_norm(checkpoint, config), config.rms_norm_eps)
    chunks = head_chunks(head_rows(checkpoint, config))
    return torch.cat([normed @ rows.t() for _, rows in chunks], dim=-1)
