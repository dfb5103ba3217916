"""The paged cache hands out each block once and compacts accepted paths."""

import pytest
import torch

from quasar.cache import KVCache, OutOfBlocks
from quasar.kernels.base import AttentionSpec, Buffer, RaggedBatch
from quasar.kernels.reference import ReferenceBackend

SPEC = AttentionSpec(2, 1, 4, 0.5, torch.ones(256, 2), torch.zeros(256, 2))


def make(tokens):
    return KVCache(ReferenceBackend(), [SPEC] * 2, tokens)


def test_blocks_are_reserved_and_returned():
    cache = make(100)
    assert cache.capacity == 128
    first, second = cache.open(33), cache.open(60)
    assert cache.free_slots == 0
    assert not set(first.table.tolist()) & set(second.table.tolist())
    with pytest.raises(OutOfBlocks, match="1 cache slots wanted, 0 free"):
        cache.open(1)
    cache.close(first)
    assert cache.free_slots == 64
    cache.close(second)
    cache.check_integrity()
    assert cache.free_slots == 128


def append(cache, sequence, values):
    """One pass whose row i writes K = V = values[i] (rotation by angle 0 changes nothing)."""
    rows = len(values)
    batch = RaggedBatch.chunk([0] * rows, sequence.length, sequence)
    qkv = Buffer.of(torch.tensor(values)[:, None].expand(rows, 16).float().contiguous())
    for layer in cache.layers:
        cache.backend.attend(batch, qkv, SPEC, layer, Buffer.empty(rows, 8))


def stored(cache, sequence, layer):
    slots = torch.arange(sequence.length)
    kv = cache.backend._slots(SPEC, cache.layers[layer], sequence.table, slots)
    assert (kv == kv[:1, :1, :, :1]).all()
    return kv[0, 0, :, 0].tolist()


def test_keep_compacts_the_accepted_path_in_every_layer():
    cache = make(64)
    sequence = cache.open(64)
    append(cache, sequence, list(range(30)))
    cache.keep(sequence, range(30))
    append(cache, sequence, [100.0, 101.0, 102.0, 103.0, 104.0])
    cache.keep(sequence, [0, 2, 4])
    assert sequence.length == 33
    for layer in range(2):
        assert stored(cache, sequence, layer) == [*range(30), 100.0, 102.0, 104.0]
    append(cache, sequence, [7.0, 8.0])
    cache.keep(sequence, [0])
    assert stored(cache, sequence, 1)[-2:] == [104.0, 7.0]
