"""Paged KV cache: blocks of slots in a shared pool, one table of blocks a sequence.

The sequence owns its cache and verifiers borrow it: K and V mean the same for every precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quasar.errors import QuasarError
from quasar.kernels.base import AttentionSpec, Backend, Buffer


class OutOfBlocks(QuasarError):
    """The pool cannot hold another sequence now."""


class SequenceCache:
    """The slots of one sequence: `length` are filled, `table` says in which blocks."""

    __slots__ = ("length", "rotary_row", "table")

    def __init__(self, table: Tensor, rotary_row: int = 0) -> None:
        self.table = table
        """[blocks] int32."""
        self.rotary_row = rotary_row
        """The row of the rotary tables for its first position."""
        self.length = 0


class KVCache:
    """K and V of all layers for all sequences."""

    def __init__(
        self,
        backend: Backend,
        specs: Sequence[AttentionSpec],
        tokens: int,
        short_texts: int = 0,
    ) -> None:
        """`specs`: one for each layer. Their rotary tables begin with `short_texts` rows for
        sequences of at most so many tokens; those of longer ones follow."""
        self.backend = backend
        self._short_texts = short_texts
        self.specs = list(specs)
        self.blocks = self._blocks_for(tokens)
        self.layers: list[Buffer] = [backend.new_cache(spec, self.blocks) for spec in specs]
        self._free = list(range(self.blocks - 1, -1, -1))

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.backend.block_size)

    @property
    def capacity(self) -> int:
        """Slots in the whole pool."""
        return self.blocks * self.backend.block_size

    @property
    def free_slots(self) -> int:
        return len(self._free) * self.backend.block_size

    def open(self, tokens: int) -> SequenceCache:
        """Reserve room for `tokens` slots. Raises OutOfBlocks, and then takes nothing."""
        needed = self._blocks_for(tokens)
        if needed > len(self._free):
            raise OutOfBlocks(f"{tokens} cache slots wanted, {self.free_slots} free")
        taken = [self._free.pop() for _ in range(needed)]
        row = self._short_texts if tokens > self._short_texts else 0
        return SequenceCache(torch.tensor(taken, dtype=torch.int32), row)

    def close(self, sequence: SequenceCache) -> None:
        """Give all blocks back."""
        self._free.extend(reversed(sequence.table.tolist()))
        sequence.table = sequence.table[:0]
        sequence.length = 0

    def keep(self, sequence: SequenceCache, nodes: Sequence[int]) -> None:
        """Of the rows just appended keep `nodes` (ascending), in this order, drop the others."""
        start = sequence.length
        moved = [(start + node, start + i) for i, node in enumerate(nodes) if node != i]
        if moved:
            source, target = torch.tensor(moved, dtype=torch.int32).T.contiguous()
            for spec, layer in zip(self.specs, self.layers, strict=True):
                self.backend.move(spec, layer, sequence.table, source, target)
        sequence.length = start + len(nodes)

    def check_integrity(self) -> None:
        """No block is free twice."""
        assert len(set(self._free)) == len(self._free) <= self.blocks
