"""A verifier: a model in one precision that judges drafts in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from quasar.cache import KVCache
from quasar.checkpoints.base import Checkpoint
from quasar.checkpoints.scheme import DOWN, EXTENSION
from quasar.errors import CheckpointError, UsageError
from quasar.kernels.base import (
    Backend,
    Buffer,
    DenseWeight,
    Int8Weight,
    LinearWeight,
    RaggedBatch,
)
from quasar.memory import trim_heap
from quasar.models.config import ModelConfig
from quasar.models.decoder import Decoder, load_decoder
from quasar.models.families import parse_config
from quasar.quantization.hadamard import rotated
from quasar.quantization.head import GROUP_SIZE, quantize_head, quantize_head_int4

PRECISIONS = ("bf16", "w8a8", "w4a8")
"""Verifiers by name; each is also a precision of the head."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Logits [rows, vocabulary] fp32, valid until the next pass, and the hidden states wanted."""

    logits: Buffer
    hidden: list[Tensor]


class Verifier:
    """Borrows the sequences' cache; knows nothing of drafts beyond the shape of the batch."""

    def __init__(self, decoder: Decoder, precision: str, head_precision: str) -> None:
        self.decoder = decoder
        self.precision = precision
        self.head_precision = head_precision

    @property
    def backend(self) -> Backend:
        return self.decoder.backend

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    def new_cache(self, tokens: int) -> KVCache:
        return self.decoder.new_cache(tokens)

    def verify(
        self,
        batch: RaggedBatch,
        cache: KVCache,
        rows: Tensor | None = None,
        *,
        layers: range | None = None,
        hidden: Sequence[int] = (),
    ) -> Verification:
        """One pass. `rows` [n] int64 are those whose logits are wanted (default all).

        `layers` runs a part of the model; `hidden` names layers whose output is kept.
        """
        x, states = self.decoder.run(batch, cache, layers, hidden)
        return Verification(self.decoder.logits(x, batch.rows, rows), states)


HEADS: Mapping[str, Callable[[Tensor, Backend], LinearWeight]] = {
    "bf16": lambda rows, backend: DenseWeight(rows),
    "w8a8": lambda rows, backend: quantize_head(rows, backend.rotate),
    "w4a8": lambda rows, backend: quantize_head_int4(rows, backend.rotate),
}
"""How the head of each precision is made of the BF16 rows [vocab, hidden]."""


def load_verifier(
    checkpoint: Checkpoint, precision: str, head_precision: str, backend: Backend
) -> Verifier:
    """Load a checkpoint as a verifier of this precision, which the file must hold."""
    for name, value in (("verifier", precision), ("head", head_precision)):
        if value not in PRECISIONS:
            raise UsageError(f"--{name} {value} is unknown; it is one of {', '.join(PRECISIONS)}")
    if checkpoint.precision != precision:
        raise UsageError(
            f"{checkpoint.path} holds {checkpoint.precision} weights: --verifier {precision} needs "
            "others"
        )
    config = parse_config(checkpoint.config)
    if head_precision == "w4a8" and config.hidden_size % GROUP_SIZE:
        raise UsageError(
            f"--head w4a8 needs groups of {GROUP_SIZE} inputs, which do not divide "
            f"{checkpoint.path}'s hidden size of {config.hidden_size}"
        )
    block = checkpoint.down_rotation
    if config.intermediate_size % (block or 1):
        raise CheckpointError(
            f"{checkpoint.path / 'config.json'}: blocks of {block} inputs ({EXTENSION}) do not "
            f"divide the {config.intermediate_size} inputs of {DOWN}"
        )

    def down(weight: LinearWeight) -> LinearWeight:
        if not block or not isinstance(weight, Int8Weight):
            return weight
        return rotated(weight, block, backend.rotate)

    def head(rows: Tensor) -> LinearWeight:
        return HEADS[head_precision](rows, backend)

    decoder = load_decoder(checkpoint, config, backend, head, down)
    trim_heap()  # what was packed: 56 MB of SmolLM2-135M's head otherwise stay for ever
    return Verifier(decoder, precision, head_precision)
