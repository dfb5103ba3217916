"""The one decoder: norm, attention, MLP and residual, for every family and precision.

It knows buffers and packed linears, not formats, sampling or drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
from quasar.memory import trim_heap
from quasar.models.config import ModelConfig
from quasar.models.rotary import rotary_tables
from quasar.models.tensors import (
    EMBEDDING,
    FINAL_NORM,
    INPUT_NORM,
    LINEARS,
    POST_NORM,
    check_model,
    head_rows,
    layer_prefix,
)


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
    def of(cls, config: ModelConfig, rows: int) -> Workspace:
        return cls(
            Buffer.empty(rows, config.hidden_size),
            Buffer.empty(rows, (config.heads + 2 * config.kv_heads) * config.head_dim),
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
        self._specs: dict[int, AttentionSpec] = {}
        self._workspace = Workspace.of(config, 64)
        self._logits = Buffer.empty(8, head.out_features)

    def new_cache(self, tokens: int) -> KVCache:
        return KVCache(self.backend, self._spec(tokens), len(self.layers), tokens)

    def _spec(self, tokens: int) -> AttentionSpec:
        """Rotary tables for at least `tokens` positions: a model may promise millions."""
        positions = min(1 << max(tokens - 1, 1).bit_length(), self.config.context_length)
        if positions not in self._specs:
            self._specs[positions] = attention_spec(self.config, positions)
        return self._specs[positions]

    def run(
        self,
        batch: RaggedBatch,
        cache: KVCache,
        layers: range | None = None,
        hidden: Sequence[int] = (),
    ) -> tuple[Buffer, list[Tensor]]:
        """Run `layers` (all by default): the residual stream, and copies of it after `hidden`."""
        rows, eps, backend = batch.rows, self.config.rms_norm_eps, self.backend
        if rows > self._workspace.rows:
            self._workspace = Workspace.of(self.config, rows)
        # Kernels stream through the caches, so whatever Python looks up in this loop is looked up
        # in memory: names are bound once.
        norm_linear, norm_gated, linear_add, attend = (
            backend.norm_linear,
            backend.norm_gated,
            backend.linear_add,
            backend.attend,
        )
        space, spec, storage = self._workspace, cache.spec, cache.layers
        x, qkv, attention, inner = space.x, space.qkv, space.attention, space.hidden
        x.tensor[:rows] = self.embedding[batch.tokens]
        bound = backend.bind(batch)
        states = {}
        for index in range(len(self.layers)) if layers is None else layers:
            layer = self.layers[index]
            norm_linear(rows, x, layer.input_norm, eps, layer.qkv, qkv)
            attend(bound, qkv, spec, storage[index], attention)
            linear_add(rows, attention, layer.o, x)
            norm_gated(rows, x, layer.post_norm, eps, layer.gate_up, inner)
            linear_add(rows, inner, layer.down, x)
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


def attention_spec(config: ModelConfig, positions: int) -> AttentionSpec:
    cos, sin = rotary_tables(config, positions)
    scale = config.head_dim**-0.5
    return AttentionSpec(config.heads, config.kv_heads, config.head_dim, scale, cos, sin)


def load_decoder(
    checkpoint: Checkpoint,
    config: ModelConfig,
    backend: Backend,
    head: Callable[[Tensor], LinearWeight] = DenseWeight,
) -> Decoder:
    """Stream a checkpoint into packed form; `head` makes the output layer of its BF16 rows.

    File pages are let go after each part, so the peak is the packed model and one part.
    Raises CheckpointError for a missing, leftover or misshapen tensor, before anything is packed.
    """
    check_model(checkpoint, config)
    layers = []
    for index in range(config.layers):
        layers.append(_load_layer(checkpoint, layer_prefix(index), backend))
        checkpoint.release()
    trim_heap()
    embedding = checkpoint.tensor(EMBEDDING)
    checkpoint.release()
    head_weight = head(head_rows(checkpoint, config))
    checkpoint.release()
    packed_head = backend.pack(head_weight)
    final_norm = _norm(checkpoint, FINAL_NORM)
    checkpoint.release()
    return Decoder(config, backend, layers, embedding, final_norm, packed_head)


def _load_layer(checkpoint: Checkpoint, prefix: str, backend: Backend) -> DecoderLayer:
    q, k, v, o, gate, up, down = (checkpoint.linear(prefix + name) for name in LINEARS)
    for group in ((q, k, v), (gate, up)):
        if len({type(weight) for weight in group}) > 1:
            raise CheckpointError(
                f"{checkpoint.path}: {prefix}: linears with one input must share one precision"
            )
    return DecoderLayer(
        input_norm=_norm(checkpoint, prefix + INPUT_NORM),
        qkv=backend.pack(concatenate((q, k, v))),
        o=backend.pack(o),
        post_norm=_norm(checkpoint, prefix + POST_NORM),
        gate_up=backend.pack_gated(gate, up),
        down=backend.pack(down),
    )


def _norm(checkpoint: Checkpoint, name: str) -> Buffer:
    return Buffer.of(checkpoint.tensor(name).float()[None].contiguous())
