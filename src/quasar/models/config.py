"""The shape of a decoder, free of any file format."""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def parameters(self) -> int:
        """Weights of embedding, linears and norms; a tied head is counted once."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        layer = self.hidden_size * (qkv + self.heads * self.head_dim + 3 * self.intermediate_size)
        tables = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        norms = self.hidden_size * (2 * self.layers + 1)
        return self.layers * layer + tables + norms
