"""The one decoder: norm, attention, MLP and residual, for every family and precision.

It knows buffers and packed linears, not formats, sampling or drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
    DOWN_NORM,
    EMBEDDING,
    GROUPS,
    INPUT_NORM,
    K_NORM,
    O_NORM,
    POST_NORM,
    Q_NORM,
    check_model,
    final_norm,
    head_rows,
    layer_prefix,
    read_linears,
    read_norms,
)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    input_norm: Buffer
    qkv: PackedLinear
    o: PackedLinear
    post_norm: Buffer
    gate_up: PackedLinear
    down: PackedLinear
    q_norm: Tensor | None = None
    """[head_dim] fp32, as k_norm."""
    k_norm: Tensor | None = None
    o_norm: Buffer | None = None
    """Norm of what `o` gives, before it joins the residual stream; so for `down`."""
    down_norm: Buffer | None = None

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
    y: Buffer
    """What a sublayer gives, where a norm stands before the residual stream."""

    @classmethod
    def of(cls, config: ModelConfig, rows: int) -> Workspace:
        return cls(
            Buffer.empty(rows, config.hidden_size),
            Buffer.empty(rows, (config.heads + 2 * config.kv_heads) * config.head_dim),
            Buffer.empty(rows, config.heads * config.head_dim),
            Buffer.empty(rows, config.intermediate_size),
            Buffer.empty(rows if config.output_norms else 0, config.hidden_size),
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
        self._specs: dict[int, list[AttentionSpec]] = {}
        self._workspace = Workspace.of(config, 64)
        self._logits = Buffer.empty(8, head.out_features)

    def new_cache(self, tokens: int) -> KVCache:
        specs = self._specs_for(tokens)
        return KVCache(self.backend, specs, tokens, self.config.short_texts)

    def _specs_for(self, tokens: int) -> list[AttentionSpec]:
        """Rotary tables for at least `tokens` positions: a model may promise millions."""
        positions = min(1 << max(tokens - 1, 1).bit_length(), self.config.context_length)
        if positions not in self._specs:
            self._specs[positions] = attention_specs(self.config, self.layers, positions)
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
        linear, norm_add = backend.linear, backend.norm_add
        space, specs, storage = self._workspace, cache.specs, cache.layers
        x, qkv, attention, inner, y = space.x, space.qkv, space.attention, space.hidden, space.y
        self._embed(batch.tokens, x.tensor[:rows])
        bound = backend.bind(batch)
        states = {}
        for index in range(len(self.layers)) if layers is None else layers:
            layer = self.layers[index]
            norm_linear(rows, x, layer.input_norm, eps, layer.qkv, qkv)
            attend(bound, qkv, specs[index], storage[index], attention)
            if layer.o_norm is None:
                linear_add(rows, attention, layer.o, x)
            else:
                linear(rows, attention, layer.o, y)
                norm_add(rows, y, layer.o_norm, eps, x)
            norm_gated(rows, x, layer.post_norm, eps, layer.gate_up, inner)
            if layer.down_norm is None:
                linear_add(rows, inner, layer.down, x)
            else:
                linear(rows, inner, layer.down, y)
                norm_add(rows, y, layer.down_norm, eps, x)
            if index in hidden:
                states[index] = x.tensor[:rows].clone()
        return x, [states[index] for index in hidden]

    def _embed(self, tokens: Tensor, out: Tensor) -> None:
        out[:] = self.embedding[tokens]
        if self.config.embedding_scale != 1.0:
            out *= self.config.embedding_scale

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


def attention_specs(
    config: ModelConfig, layers: Sequence[DecoderLayer], positions: int
) -> list[AttentionSpec]:
    """One for each layer; layers of one kind share the rotary tables, if not the whole spec."""
    shape = (config.heads, config.kv_heads, config.head_dim, config.score_scale)
    windows = [config.window(index) for index in range(len(layers))]
    plain = {
        window: AttentionSpec(*shape, *rotary_tables(config, positions, window), window)
        for window in set(windows)
    }
    if not config.qk_norm:
        return [plain[window] for window in windows]
    return [
        replace(
            plain[window],
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            norm_eps=config.rms_norm_eps,
        )
        for window, layer in zip(windows, layers, strict=True)
    ]


def unchanged(weight: LinearWeight) -> LinearWeight:
    return weight


def load_decoder(
    checkpoint: Checkpoint,
    config: ModelConfig,
    backend: Backend,
    head: Callable[[Tensor], LinearWeight] = DenseWeight,
    down: Callable[[LinearWeight], LinearWeight] = unchanged,
) -> Decoder:
    """Stream a checkpoint into packed form.

    `head` makes the output layer of its BF16 rows, `down` what is computed of a stored linear.
    File pages are let go after each part, so the peak is the packed model and one part.
    Raises CheckpointError for a missing, leftover or misshapen tensor, before anything is packed.
    """
    check_model(checkpoint, config)
    layers = []
    for index in range(config.layers):
        layers.append(_load_layer(checkpoint, config, index, backend, down))
        checkpoint.release()
    trim_heap()
    embedding = checkpoint.tensor(EMBEDDING)
    checkpoint.release()
    head_weight = head(head_rows(checkpoint, config))
    checkpoint.release()
    packed_head = backend.pack(head_weight)
    norm = _row(final_norm(checkpoint, config))
    checkpoint.release()
    return Decoder(config, backend, layers, embedding, norm, packed_head)


def _load_layer(
    checkpoint: Checkpoint,
    config: ModelConfig,
    index: int,
    backend: Backend,
    down: Callable[[LinearWeight], LinearWeight],
) -> DecoderLayer:
    linears, norms = read_linears(checkpoint, config, index), read_norms(checkpoint, config, index)
    groups = {group: tuple(linears[name] for name in names) for group, names in GROUPS.items()}
    for weights in groups.values():
        if len({type(weight) for weight in weights}) > 1:
            raise CheckpointError(
                f"{checkpoint.path}: {layer_prefix(index)}: linears with one input must share "
                "one precision"
            )
    rows = {name: _row(norms[name]) for name in norms}
    gate, up = groups["gate_up"]
    return DecoderLayer(
        input_norm=rows[INPUT_NORM],
        qkv=backend.pack(concatenate(groups["qkv"])),
        o=backend.pack(*groups["o"]),
        post_norm=rows[POST_NORM],
        gate_up=backend.pack_gated(gate, up, config.activation),
        down=backend.pack(down(*groups["down"])),
        q_norm=norms.get(Q_NORM),
        k_norm=norms.get(K_NORM),
        o_norm=rows.get(O_NORM),
        down_norm=rows.get(DOWN_NORM),
    )


def _row(norm: Tensor) -> Buffer:
    return Buffer.of(norm[None].contiguous())
