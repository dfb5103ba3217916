"""What a verifier takes of memory, known from the shape of the model before anything is loaded.

Loading has a peak of its own: one layer, or the head, is there in the file's form and in packed
form at a time. Serving has all packed weights, the embedding as far as its rows were read (counted
in full), the cache as far as its slots were filled (likewise) and the activations of a pass.
Checked against the measured peak: tests/cli/test_footprint.py says how close it is.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from quasar.engine.scheduler import Limits
from quasar.models.config import ModelConfig
from quasar.models.tensors import GROUPS, linear_shapes
from quasar.quantization.head import CHUNK_ROWS

ELEMENT_BYTES = {"bf16": 2, "w8a8": 1, "w4a8": 0.5 + 2 / 32}
"""Of packed weights. Those of W4A8 come with 16 bits for each group, of 32 at least."""
UNPACKED_BYTES = {"bf16": 2, "w8a8": 1, "w4a8": 1 + 5 / 32}
"""Of weights on their way, as the operations take them."""
CHUNK_COPIES = {"w8a8": 3, "w4a8": 5}
"""Chunks of a head in fp32 at a time while it is rounded."""
PREPARED_BYTES = 5
"""Of an activation as products read it, 1 to 3; before it was rounded it may be there rotated."""
SCALE_BYTES = 4
"""Each row of an INT8 weight has one fp32 scale."""
PAGE = 2 << 20
"""The cache of each layer lies on huge pages of its own."""
BLOCK_SLOTS = 64
SCORE_VECTORS = 96
"""Query vectors a thread whose attention scores are held at once."""
SMALLEST_LOGITS = 8
"""Rows of logits for which there is always room."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes by what takes them; `loading` is what loading takes at its peak."""

    program: int
    layers: int
    head: int
    embedding: int
    cache: int
    working: int
    loading: int

    @property
    def serving(self) -> int:
        weights = self.layers + self.head + self.embedding
        return self.program + weights + self.cache + self.working

    @property
    def peak(self) -> int:
        return max(self.serving, self.program + self.loading)


def footprint(
    config: ModelConfig,
    precision: str,
    *,
    program: int,
    mapped: bool,
    cache_tokens: int,
    draft_tokens: int,
    threads: int,
    sequences: int = 1,
    int8: Collection[str] = (),
) -> Footprint:
    """The memory of a verifier whose head has its own precision; groups in `int8` have 8 bits.

    `program` is what the process takes with the model opened. `mapped`: the file holds BF16 that
    is used in place; else the embedding is a copy, and so is each part while it is packed.
    """
    rows = min(Limits().rows, cache_tokens)
    return Footprint(
        program=program,
        layers=config.layers * layer_bytes(config, precision, int8),
        head=linear_bytes(config.vocab_size, config.hidden_size, precision),
        embedding=2 * config.vocab_size * config.hidden_size,
        cache=cache_bytes(config, cache_tokens),
        working=working_bytes(config, rows, cache_tokens, threads)
        + 4 * config.vocab_size * max(SMALLEST_LOGITS, sequences * (1 + draft_tokens)),
        loading=loading_bytes(config, precision, mapped, int8),
    )


def linear_bytes(rows: int, columns: int, precision: str) -> int:
    scales = SCALE_BYTES if precision == "w8a8" else 0
    return rows * (math.ceil(columns * ELEMENT_BYTES[precision]) + scales)


def layer_bytes(config: ModelConfig, precision: str, int8: Collection[str] = ()) -> int:
    """The packed linears of one layer and its two norms."""
    shapes, total = linear_shapes(config), 2 * 4 * config.hidden_size
    for group, names in GROUPS.items():
        rows = sum(shapes[name][0] for name in names)
        columns = shapes[names[0]][1]
        total += linear_bytes(rows, columns, "w8a8" if group in int8 else precision)
    return total


def slot_bytes(config: ModelConfig) -> int:
    """K and V of one token in one layer, BF16."""
    return 2 * 2 * config.kv_heads * config.head_dim


def cache_bytes(config: ModelConfig, tokens: int) -> int:
    """A pool of `tokens` slots, all filled."""
    layer = -(-tokens // BLOCK_SLOTS) * BLOCK_SLOTS * slot_bytes(config)
    return config.layers * -(-layer // PAGE) * PAGE


def working_bytes(config: ModelConfig, rows: int, context: int, threads: int) -> int:
    """Activations of a pass, what the kernels work in, and the rotary tables."""
    hidden, inner = config.hidden_size, config.intermediate_size
    width = config.heads * config.head_dim
    outputs = hidden if config.output_norms else 0
    activations = 4 * rows * (hidden + outputs + _qkv(config) + width + inner)
    prepared = PREPARED_BYTES * rows * max(hidden, inner, width)
    scores = 4 * SCORE_VECTORS * threads * context
    return activations + prepared + scores + rotary_bytes(config, context)


def rotary_bytes(config: ModelConfig, context: int) -> int:
    """Cosines and sines for layers of each window, and of short texts that have their own."""
    rows = context + (config.short_texts if config.short_texts < context else 0)
    return 4 * rows * (config.rotary_dim or config.head_dim) * len(set(config.windows) or {0})


def loading_bytes(config: ModelConfig, precision: str, mapped: bool, int8: Collection[str]) -> int:
    """The packed layers, and the larger of one more layer and the head on their way."""
    one = layer_bytes(config, precision, int8)
    layers = config.layers * one
    gated = math.ceil(2 * config.hidden_size * config.intermediate_size * UNPACKED_BYTES[precision])
    table = 2 * config.vocab_size * config.hidden_size
    if precision == "bf16":
        packed = linear_bytes(config.vocab_size, config.hidden_size, precision)
        head = table + packed + (0 if mapped else table)
    else:  # rounded from the table's rows
        rounded = table / 2 * UNPACKED_BYTES[precision]
        chunks = CHUNK_COPIES[precision] * 4 * CHUNK_ROWS * config.hidden_size
        head = table + math.ceil(rounded) + chunks
    # Gate and up are laid side by side, then interleaved, before they are packed.
    return layers + max(one + 2 * gated, head)


def _qkv(config: ModelConfig) -> int:
    return (config.heads + 2 * config.kv_heads) * config.head_dim
