"""The one decoder: norm, attention, MLP and residual, for every family and precision.

It knows buffers and packed linears, not formats, sampling or drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quasar.cache import KVCache
from quasar.checkpoints.base import Checkpoint
from quasar.errors import CheckpointError
from quasar.kernels.base import (
    AttentionSpec,
    Backend,
    Buffer,
    DenseWeight,
    LinearWeight,
    PackedLinear,
    RaggedBatch,
    concatenate,
)
from quasar.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head"
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    input_norm: Buffer
    qkv: PackedLinear
    o: PackedLinear
    post_norm: Buffer
    gate_up: PackedLinear
    down: PackedLinear

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        return (self.qkv, self.o, self.gate_up, self.down)


@dataclass(slots=True)
class Workspace:
    """Activations of one pass, fp32."""

    x: Buffer
    qkv: Buffer
    attention: Buffer
    hidden: Buffer

    @classmethod
    def of(cls, config: ModelConfig, spec: AttentionSpec, rows: int) -> Workspace:
        return cls(
            Buffer.empty(rows, config.hidden_size),
            Buffer.empty(rows, spec.qkv_columns),
            Buffer.empty(rows, config.heads * config.head_dim),
            Buffer.empty(rows, config.intermediate_size),
        )

    @property
    def rows(self) -> int:
        return self.x.tensor.shape[0]


class Decoder:
    """A model ready to run on one backend."""

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        layers: Sequence[DecoderLayer],
        embedding: Tensor,
        final_norm: Buffer,
        head: PackedLinear,
    ) -> None:
        self.config = config
        self.backend = backend
        self.layers = list(layers)
        self.embedding = embedding
        """[vocabulary, hidden] bf16, mapped from the file where the format allows."""
        self.final_norm = final_norm
        self.head = head
        self.spec = attention_spec(config)
        self._workspace = Workspace.of(config, self.spec, 64)
        self._logits = Buffer.empty(8, head.out_features)

    def new_cache(self, tokens: int) -> KVCache:
        return KVCache(self.backend, self.spec, len(self.layers), tokens)

    def run(
        self,
        batch: RaggedBatch,
        cache: KVCache,
        layers: range | None = None,
        hidden: Sequence[int] = (),
    ) -> tuple[Buffer, list[Tensor]]:
        """Run `layers` (all by default): the residual stream, and copies of it after `hidden`."""
        if batch.rows > self._workspace.rows:
            self._workspace = Workspace.of(self.config, self.spec, batch.rows)
        rows, eps, space, backend = (
            batch.rows,
            self.config.rms_norm_eps,
            self._workspace,
            self.backend,
        )
        x = space.x
        x.tensor[:rows] = self.embedding[batch.tokens]
        bound = backend.bind(batch)
        states = {}
        for index in range(len(self.layers)) if layers is None else layers:
            layer = self.layers[index]
            backend.norm_linear(rows, x, layer.input_norm, eps, layer.qkv, space.qkv)
            backend.attend(bound, space.qkv, self.spec, cache.layers[index], space.attention)
            backend.linear_add(rows, space.attention, layer.o, x)
            backend.norm_gated(rows, x, layer.post_norm, eps, layer.gate_up, space.hidden)
            backend.linear_add(rows, space.hidden, layer.down, x)
            if index in hidden:
                states[index] = x.tensor[:rows].clone()
        return x, [states[index] for index in hidden]

    def logits(self, x: Buffer, rows: int, selected: Tensor | None = None) -> Buffer:
        """Final norm and head of the first `rows` rows, or the `selected` ones: [rows, vocab]."""
        if selected is not None:
            x, rows = Buffer.of(x.tensor[selected]), selected.shape[0]
        if rows > self._logits.tensor.shape[0]:
            self._logits = Buffer.empty(rows, self.head.out_features)
        self.backend.norm_linear(
            rows, x, self.final_norm, self.config.rms_norm_eps, self.head, self._logits
        )
        return self._logits

    def pass_bytes(self) -> int:
        """Weight bytes read by one pass."""
        return self.head.nbytes + sum(
            linear.nbytes for layer in self.layers for linear in layer.linears
        )


def attention_spec(config: ModelConfig) -> AttentionSpec:
    """Rotary tables (RoFormer, arXiv 2104.09864) in fp64, rounded to fp32 once."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angles = torch.outer(
        torch.arange(config.context_length, dtype=torch.float64), config.rope_theta**-half
    )
    return AttentionSpec(
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.head_dim**-0.5,
        angles.cos().float().contiguous(),
        angles.sin().float().contiguous(),
    )


class LayerReader:
    """Reads the tensors of a checkpoint under their canonical names, checked against the config."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.used: set[str] = set()

    def linear(self, module: str, out_features: int, in_features: int, bias: bool) -> LinearWeight:
        weight = self.checkpoint.linear(module)
        values = weight.weight if isinstance(weight, DenseWeight) else weight.codes
        if tuple(values.shape) != (out_features, in_features):
            raise CheckpointError(
                f"{self.checkpoint.path}: {module}.weight has shape {list(values.shape)}, "
                f"the config says {[out_features, in_features]}"
            )
        if (weight.bias is not None) != bias:
            found = "has a bias" if weight.bias is not None else "lacks its bias"
            raise CheckpointError(f"{self.checkpoint.path}: {module} {found}")
        self.used |= {f"{module}.{part}" for part in ("weight", "weight_scale", "bias")}
        return weight

    def vector(self, name: str) -> Buffer:
        tensor = self._checked(name, (self.config.hidden_size,))
        return Buffer.of(tensor.float()[None].contiguous())

    def embedding(self) -> Tensor:
        return self._checked(EMBEDDING, (self.config.vocab_size, self.config.hidden_size))

    def head(self) -> LinearWeight:
        """The output projection in BF16; the embedding itself when tied."""
        config = self.config
        if not config.tied_embeddings:
            return self.linear(HEAD, config.vocab_size, config.hidden_size, bias=False)
        name = f"{HEAD}.weight"
        if name in self.checkpoint.names():
            self.used.add(name)
            if not torch.equal(self.checkpoint.tensor(name), self.embedding()):
                raise CheckpointError(
                    f"{self.checkpoint.path}: {name} differs from {EMBEDDING}, to which it is tied"
                )
        return DenseWeight(self.embedding())

    def _checked(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found = self.checkpoint.shape(name)
        if found != shape:
            raise CheckpointError(
                f"{self.checkpoint.path}: {name} has shape {list(found)}, "
                f"the config says {list(shape)}"
            )
        self.used.add(name)
        return self.checkpoint.tensor(name)

    def layer(self, index: int, backend: Backend) -> DecoderLayer:
        config, prefix = self.config, f"model.layers.{index}"
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size

        def attention(name: str, out_features: int, in_features: int, bias: bool) -> LinearWeight:
            return self.linear(f"{prefix}.self_attn.{name}", out_features, in_features, bias)

        qkv = [
            attention(name, size, hidden, config.qkv_bias)
            for name, size in (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width))
        ]
        gate = self.linear(f"{prefix}.mlp.gate_proj", inner, hidden, bias=False)
        up = self.linear(f"{prefix}.mlp.up_proj", inner, hidden, bias=False)
        return DecoderLayer(
            input_norm=self.vector(f"{prefix}.input_layernorm.weight"),
            qkv=backend.pack(self._fused(prefix, qkv)),
            o=backend.pack(attention("o_proj", hidden, width, config.o_bias)),
            post_norm=self.vector(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=backend.pack_gated(gate, up),
            down=backend.pack(self.linear(f"{prefix}.mlp.down_proj", hidden, inner, bias=False)),
        )

    def _fused(self, prefix: str, weights: list[LinearWeight]) -> LinearWeight:
        if len({type(weight) for weight in weights}) > 1:
            raise CheckpointError(
                f"{self.checkpoint.path}: {prefix}: q, k and v must share one precision"
            )
        return concatenate(tuple(weights))

    def check_leftovers(self) -> None:
        """Every tensor of the file has a place in the model."""
        leftover = [
            name
            for name in self.checkpoint.names()
            if name not in self.used and not name.endswith(IGNORED_SUFFIXES)
        ]
        if leftover:
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {leftover[0]} has no place in a "
                f"{self.config.family} model ({len(leftover)} such tensors)"
            )


def load_decoder(
    checkpoint: Checkpoint,
    config: ModelConfig,
    backend: Backend,
    head: Callable[[LinearWeight], LinearWeight] = lambda weight: weight,
) -> Decoder:
    """Stream a checkpoint into packed form; `head` may change the precision of the output layer.

    Raises CheckpointError for a missing, leftover or misshapen tensor.
    """
    reader = LayerReader(checkpoint, config)
    layers = []
    for index in range(config.layers):
        layers.append(reader.layer(index, backend))
        checkpoint.release()
    embedding = reader.embedding()
    packed_head = backend.pack(head(reader.head()))
    final_norm = reader.vector(FINAL_NORM)
    reader.check_leftovers()
    checkpoint.release()
    return Decoder(config, backend, layers, embedding, final_norm, packed_head)
