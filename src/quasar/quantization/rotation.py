"""A model with its residual stream and its heads' values rotated: the same function, other weights.

QuaRot (arXiv 2404.00456), SpinQuant (arXiv 2405.16406): outliers lie in few channels; an orthogonal
matrix spreads them over all, and costs nothing at run time where it can be folded into the weights.

    R1 [hidden, hidden]      the residual stream x becomes x R1. RMSNorm without a gain commutes
                             with it, so gains go into the columns of what reads the norm: qkv,
                             gate and up, head.
    R2 [head_dim, head_dim]  the values of each head, one matrix a layer: attention mixes tokens,
                             not channels.

    embedding        E R1                    v     R2^T (W diag(g) R1), a block of rows a kv head
    q, k, gate, up   W diag(g) R1            o     R1^T (W R2), a block of columns a head
    head             W diag(g) R1            down  R1^T W

Biases of v are rotated by R2, those of o by R1. The head gets the gain of the final norm, the
embedding does not: where they were tied they no longer are. A norm between a sublayer and the
residual stream has a gain with nothing behind it that could take it: such families are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from quasar.checkpoints.base import Checkpoint
from quasar.errors import UsageError
from quasar.kernels.base import DenseWeight
from quasar.models.config import ModelConfig
from quasar.models.layer import head_chunks
from quasar.models.tensors import (
    EMBEDDING,
    FINAL_NORM,
    GROUPS,
    HEAD,
    INPUT_NORM,
    POST_NORM,
    final_norm,
    head_rows,
    layer_prefix,
    linear_shapes,
)
from quasar.quantization.orthogonal import Rotation

RESIDUAL_SEED = 0
"""Of R1; the R2 of layer i has the seed i + 1."""
GAINS = {"qkv": INPUT_NORM, "gate_up": POST_NORM}
"""The norms that make the inputs of a layer's groups."""
VALUES, OUT = "self_attn.v_proj", "self_attn.o_proj"


def check_rotatable(config: ModelConfig) -> None:
    if config.output_norms:
        raise UsageError(
            f"--rotate: {config.family} norms what its sublayers give before it is added to the "
            "residual stream; a rotation cannot pass the gains of these norms"
        )


class RotatedCheckpoint(Checkpoint):
    """An unquantised checkpoint as it would be if its model were rotated and its head untied.

    Computed tensor by tensor when read. `linear` gives fp32, which a quantiser rounds once; tables
    and biases are rounded to what a file holds.
    """

    def __init__(
        self, base: Checkpoint, config: ModelConfig, stored: torch.dtype = torch.bfloat16
    ) -> None:
        """config: that of `base`. stored: the precision of tables and biases."""
        check_rotatable(config)
        self.path, self.format, self.files = base.path, base.format, base.files
        self.config = {**base.config, "tie_word_embeddings": False}
        self.generation_config = base.generation_config
        self.quantization, self.tokenizer_metadata = base.quantization, base.tokenizer_metadata
        self._base, self._config, self._stored = base, config, stored
        self._residual = Rotation.of(config.hidden_size, RESIDUAL_SEED)
        # Of one layer, which is read several times.
        self._values = lru_cache(1)(lambda index: Rotation.of(config.head_dim, index + 1))

    def names(self) -> Sequence[str]:
        return tuple(dict.fromkeys((*self._base.names(), HEAD)))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(EMBEDDING if name == HEAD else name)

    def tensor(self, name: str) -> Tensor:
        if name == EMBEDDING:
            return self._table(self._base.tensor(EMBEDDING), None)
        if name == HEAD:
            gain = final_norm(self._base, self._config)
            return self._table(head_rows(self._base, self._config), gain)
        if name == FINAL_NORM or name.endswith((INPUT_NORM, POST_NORM)):
            return torch.full(self.shape(name), 1 - self._config.norm_offset).bfloat16()
        if not name.endswith((".weight", ".bias")) or "_proj." not in name:
            return self._base.tensor(name)
        module, _, part = name.rpartition(".")
        linear = self.linear(module)
        tensor = linear.weight if part == "weight" else linear.bias
        assert tensor is not None
        return tensor.to(self._stored)

    def linear(self, module: str) -> DenseWeight:
        """weight [out, in] fp32: not yet rounded."""
        whole = self._base.linear(module)
        assert isinstance(whole, DenseWeight)
        index, name = _place(module)
        weights, biases, start = [], [], 0
        for part in self._config.layout.fused.get(name, (name,)):
            rows = slice(start, start + linear_shapes(self._config)[part][0])
            start = rows.stop
            weights.append(self._weight(index, part, whole.weight[rows].float()))
            if whole.bias is not None:
                biases.append(self._bias(index, part, whole.bias[rows]))
        return DenseWeight(torch.cat(weights), torch.cat(biases) if biases else None)

    def bias(self, module: str) -> Tensor | None:
        return self.linear(module).bias

    def fingerprint(self) -> str:
        """That of the model which is rotated."""
        return self._base.fingerprint()

    def release(self) -> None:
        self._base.release()

    def _weight(self, index: int, part: str, weight: Tensor) -> Tensor:
        """One linear of layer `index`, fp32."""
        for group, norm in GAINS.items():
            if part in GROUPS[group]:
                weight = self._residual(weight * self._gain(index, norm))
        if part == VALUES:
            return self._by_head(index, weight.t()).t().contiguous()
        if part == OUT:
            weight = self._by_head(index, weight)
        return self._residual.rows(weight) if part in (OUT, *GROUPS["down"]) else weight

    def _bias(self, index: int, part: str, bias: Tensor) -> Tensor:
        if part == VALUES:
            bias = self._by_head(index, bias)
        elif part in (OUT, *GROUPS["down"]):
            bias = self._residual(bias)
        return bias.to(self._stored).float()

    def _by_head(self, index: int, x: Tensor) -> Tensor:
        """x [..., heads * head_dim] times R2, head by head."""
        heads = x.reshape(*x.shape[:-1], -1, self._config.head_dim)
        return self._values(index)(heads).flatten(-2)

    def _gain(self, index: int, norm: str) -> Tensor:
        """[hidden] fp32, as it multiplies."""
        stored = self._base.tensor(layer_prefix(index) + norm)
        return stored.float() + self._config.norm_offset

    def _table(self, rows: Tensor, gain: Tensor | None) -> Tensor:
        """rows [vocab, hidden] bf16 times diag(gain) R1, a chunk in fp32 at a time."""
        table = torch.empty(rows.shape, dtype=self._stored)
        for start, chunk in head_chunks(rows):
            scaled = chunk if gain is None else chunk * gain
            table[start : start + len(chunk)] = self._residual(scaled)
        return table


def _place(module: str) -> tuple[int, str]:
    """`model.layers.3.mlp.down_proj` -> 3, `mlp.down_proj`."""
    _, _, index, name = module.split(".", 3)
    return int(index), name
