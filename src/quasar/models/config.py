"""The shape of a decoder, free of any file format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quasar.kernels.base import Activation
from quasar.models.scaling import LongRopeScaling, Scaling


@dataclass(frozen=True, slots=True)
class Layout:
    """How a family's checkpoints call what the decoder calls by the names in `tensors.py`."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a layer that have another name in the file: ours -> the file's."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Linears of the file whose rows are those of several of ours, in this order."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the generic decoder must know. A family file translates config.json into this."""

    family: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    tied_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of each head of q and k before the rotation."""
    rope_scaling: Scaling | None = None
    rotary_dim: int | None = None
    """Leading dimensions of a head that are rotated; None: all of them."""
    windows: tuple[int, ...] = ()
    """By layer: how many positions a row sees, its own included, 0 for all; (): all in each."""
    window_rope_theta: float | None = None
    """Base of the layers with a window, which then have no scaling; None: as the other layers."""
    attention_scale: float | None = None
    """Factor of q . k; None: head_dim ** -0.5."""
    activation: Activation = "silu"
    norm_offset: float = 0.0
    """Added to every stored norm weight before it multiplies."""
    output_norms: bool = False
    """Norms between each sublayer and the residual stream."""
    embedding_scale: float = 1.0
    layout: Layout = field(default_factory=Layout)

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    @property
    def short_texts(self) -> int:
        """Texts of up to so many tokens are rotated otherwise than longer ones; 0: all alike."""
        scaling = self.rope_scaling
        return scaling.original if isinstance(scaling, LongRopeScaling) else 0

    @property
    def parameters(self) -> int:
        """Weights of embedding, linears and norms; a tied head is counted once."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        linears = self.hidden_size * (qkv + self.heads * self.head_dim + 3 * self.intermediate_size)
        norms = self.hidden_size * (4 if self.output_norms else 2)
        heads = 2 * self.head_dim if self.qk_norm else 0
        tables = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.layers * (linears + norms + heads) + tables + self.hidden_size
