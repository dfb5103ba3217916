"""Packs the rows of several sequences into one ragged batch."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import torch
from torch import Tensor

from quasar.engine.sequence import Sequence
from quasar.kernels.base import RaggedBatch
from quasar.types import Draft


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a pass that belongs to one sequence."""

    sequence: Sequence
    rows: int
    logits: int
    """Index of its first row of logits; -1 while more of its prompt is to come."""


@dataclass(frozen=True, slots=True)
class Pack:
    """A pass: the kernels' batch, the rows whose logits are wanted (None: all), whose is what."""

    batch: RaggedBatch
    logit_rows: Tensor | None
    slices: list[Slice]


def ancestor_bits(draft: Draft) -> list[int]:
    """Per row of a drafting sequence the draft nodes that it sees: none for the root, row 0."""
    bits = [0]
    for node, parent in enumerate(draft.parents):
        bits.append(bits[parent + 1] | 1 << node)
    return bits


def depths(draft: Draft) -> list[int]:
    """Distance of each row from the last accepted token."""
    found = [0]
    for parent in draft.parents:
        found.append(found[parent + 1] + 1)
    return found


def _signed(word: int) -> int:
    """A 64-bit pattern as the signed integer that torch stores."""
    return word - (1 << 64) if word >> 63 else word


def pack(sequences: List[tuple[Sequence, int]]) -> Pack:
    """Each sequence with the number of its pending tokens to take: all of them, or a chunk."""
    tokens: list[int] = []
    positions: list[int] = []
    ancestors: list[int] = []
    offsets, contexts, trees, wanted = [0], list[int](), list[bool](), list[int]()
    slices: list[Slice] = []
    for sequence, count in sequences:
        assert sequence.cache is not None, "only admitted sequences take part"
        start, draft = sequence.cached, sequence.draft
        complete = count == sequence.pending
        assert not draft or (complete and count == 1), "a draft follows the newest token only"
        tree = bool(draft) and not draft.is_chain
        tokens += sequence.tokens[start : start + count] + list(draft.tokens)
        first = start + sequence.cache.rotary_row
        positions += [*range(first, first + count), *(first + d for d in depths(draft)[1:])]
        rows = count + len(draft)
        ancestors += [_signed(word) for word in ancestor_bits(draft)] if tree else [0] * rows
        slices.append(Slice(sequence, rows, len(wanted) if complete else -1))
        if complete:
            wanted += range(offsets[-1] + count - 1, offsets[-1] + rows)
        contexts.append(start)
        trees.append(tree)
        offsets.append(offsets[-1] + rows)
    batch = RaggedBatch(
        torch.tensor(tokens),
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor(offsets, dtype=torch.int32),
        torch.tensor(contexts, dtype=torch.int32),
        _tables([sequence for sequence, _ in sequences]),
        torch.tensor(ancestors),
        torch.tensor(trees, dtype=torch.uint8),
    )
    partial = len(wanted) < len(tokens)
    selected = torch.tensor(wanted, dtype=torch.int64) if partial else None
    return Pack(batch, selected, slices)


def _tables(sequences: List[Sequence]) -> Tensor:
    tables = [sequence.cache.table for sequence in sequences if sequence.cache is not None]
    if len(tables) == 1:
        return tables[0][None]
    return torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
