"""Attention against its twin, and the equality of bits that speculation stands on.

Caches start out full of NaN: a slot that is not visible and leaks into a result shows at once.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import TIERS_HERE, native
from torch import Tensor

from quasar.kernels.base import AttentionSpec, Backend, Buffer, RaggedBatch
from quasar.kernels.reference import ReferenceBackend

HEAD_DIMS = (2, 8, 16, 34, 64, 80, 96, 128, 160)
SHAPES = ((9, 3, 64), (14, 2, 64), (4, 4, 80), (8, 1, 128), (3, 3, 8))
"""(heads, kv_heads, head_dim)"""

pytestmark = pytest.mark.skipif(not TIERS_HERE, reason="no native tier runs here")
tiers = pytest.mark.parametrize("tier", TIERS_HERE)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def make_spec(heads: int, kv_heads: int, head_dim: int, positions: int = 512) -> AttentionSpec:
    inverse = 10000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.arange(positions)[:, None] * inverse
    cos, sin = angles.cos().float(), angles.sin().float()
    return AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, cos, sin)


@dataclass
class Part:
    """One sequence's rows of a pass. `parents` makes them a tree."""

    context: int
    qkv: Tensor
    table: list[int]
    parents: list[int] | None = None

    @property
    def rows(self) -> int:
        return self.qkv.shape[0]

    def ancestors(self) -> list[int]:
        bits: list[int] = []
        for node, parent in enumerate(self.parents or range(-1, min(self.rows, 65) - 1)):
            bits.append(bits[parent] | 1 << (node - 1) if node else 0)
        return [b - (1 << 64) if b >> 63 else b for b in bits] + [0] * (self.rows - len(bits))

    def positions(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents if self.parents is not None else range(-1, self.rows - 1):
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return [self.context + depth for depth in depths]


def make_batch(parts: list[Part]) -> RaggedBatch:
    def ints(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    width = max(len(part.table) for part in parts)
    offsets = [sum(part.rows for part in parts[:i]) for i in range(len(parts) + 1)]
    return RaggedBatch(
        tokens=torch.zeros(offsets[-1], dtype=torch.int64),
        positions=ints([p for part in parts for p in part.positions()]),
        row_offsets=ints(offsets),
        context_lengths=ints([part.context for part in parts]),
        block_tables=torch.tensor(
            [part.table + [0] * (width - len(part.table)) for part in parts], dtype=torch.int32
        ),
        ancestors=ints([a for part in parts for a in part.ancestors()], torch.int64),
        is_tree=ints([part.parents is not None for part in parts], torch.uint8),
    )


def new_cache(backend: Backend, spec: AttentionSpec, blocks: int) -> Buffer:
    cache = backend.new_cache(spec, blocks)
    cache.tensor.fill_(math.nan)
    return cache


def run(backend: Backend, spec: AttentionSpec, cache: Buffer, parts: list[Part]) -> Tensor:
    qkv = Buffer.of(torch.cat([part.qkv for part in parts]))
    out = Buffer.empty(qkv.tensor.shape[0], spec.heads * spec.head_dim)
    backend.attend(backend.bind(make_batch(parts)), qkv, spec, cache, out)
    return out.tensor


def random_rows(spec: AttentionSpec, rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, spec.qkv_columns, generator=generator) * 1.5


def random_tree(nodes: int, seed: int) -> list[int]:
    choose = random.Random(seed)
    return [-1, *(choose.randrange(node) for node in range(1, nodes))]


def in_chunks(
    backend: Backend, spec: AttentionSpec, qkv: Tensor, sizes: list[int], table: list[int]
) -> Tensor:
    """The rows of one sequence in several passes."""
    cache = new_cache(backend, spec, max(table) + 1)
    outs, context = [], 0
    for size in sizes:
        rows = qkv[context : context + size]
        outs.append(run(backend, spec, cache, [Part(context, rows, table)]))
        context += size
    return torch.cat(outs)


@tiers
@given(
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 7),
    head_dim=st.sampled_from(HEAD_DIMS),
    steps=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 9), st.booleans()), min_size=1, max_size=3
    ),
    threads=st.integers(1, 2),
    seed=st.integers(0, 999),
)
@settings(max_examples=40)
def test_agrees_with_the_twin(
    tier: str,
    kv_heads: int,
    group: int,
    head_dim: int,
    steps: list[tuple[int, int, bool]],
    threads: int,
    seed: int,
) -> None:
    """Several passes of two sequences, one of them now and then a tree."""
    spec = make_spec(kv_heads * group, kv_heads, head_dim)
    backends = (native(tier, threads), ReferenceBackend())
    caches = [new_cache(backend, spec, 10) for backend in backends]
    contexts = [0, 0]
    for step, (rows, nodes, tree) in enumerate(steps):
        qkv = random_rows(spec, rows + nodes, seed + step)
        parents = random_tree(nodes, seed + step) if tree else None
        parts = [
            Part(contexts[0], qkv[:rows], [7, 2, 9, 4, 1]),
            Part(contexts[1], qkv[rows:], [3, 8], parents),
        ]
        ours, twin = (
            run(backend, spec, cache, parts)
            for backend, cache in zip(backends, caches, strict=True)
        )
        torch.testing.assert_close(ours, twin, rtol=0, atol=3e-5)
        contexts = [contexts[0] + rows, contexts[1] + nodes]


@tiers
@pytest.mark.parametrize("rows", [*range(1, 41), 130])
def test_any_number_of_rows_agrees_with_the_twin(tier: str, rows: int) -> None:
    spec = make_spec(6, 2, 64)
    qkv, table = random_rows(spec, 37 + rows, rows), [4, 0, 2, 5, 1, 3]
    ours = in_chunks(native(tier, 2), spec, qkv, [37, rows], table)
    twin = in_chunks(ReferenceBackend(), spec, qkv, [37, rows], table)
    torch.testing.assert_close(ours, twin, rtol=0, atol=3e-5)


@tiers
@shapes
def test_chunks_equal_the_whole(tier: str, shape: tuple[int, int, int]) -> None:
    spec, backend = make_spec(*shape), native(tier, 2)
    qkv = random_rows(spec, 150, 1)
    whole = in_chunks(backend, spec, qkv, [150], list(range(5)))
    for sizes in ([1] * 150, [40, 1, 2, 64, 3, 17, 23], [149, 1]):
        assert torch.equal(in_chunks(backend, spec, qkv, sizes, list(range(5))), whole)


@tiers
@shapes
def test_a_sequence_alone_equals_itself_among_others(
    tier: str, shape: tuple[int, int, int]
) -> None:
    spec, backend = make_spec(*shape), native(tier, 2)
    sizes, tables = (70, 1, 13), ([6, 0, 3], [2], [5, 1])
    parts = [
        Part(0, random_rows(spec, size, size), table)
        for size, table in zip(sizes, tables, strict=True)
    ]
    together = run(backend, spec, new_cache(backend, spec, 7), parts).split(sizes)
    for part, among in zip(parts, together, strict=True):
        assert torch.equal(run(backend, spec, new_cache(backend, spec, 7), [part]), among)


@tiers
@shapes
def test_neither_threads_nor_blocks_change_a_bit(tier: str, shape: tuple[int, int, int]) -> None:
    spec = make_spec(*shape)
    qkv = random_rows(spec, 109, 3)
    first = in_chunks(native(tier, 1), spec, qkv, [100, 1, 8], [0, 1, 2, 3])
    for threads in (1, 2, 3, 5):
        for table in ([0, 1, 2, 3], [9, 4, 7, 0]):
            again = in_chunks(native(tier, threads), spec, qkv, [100, 1, 8], table)
            assert torch.equal(again, first)


@tiers
@shapes
@pytest.mark.parametrize("rows", [1, 2, 5, 40])
def test_a_long_context_gives_equal_bits_however_it_is_shared(
    tier: str, shape: tuple[int, int, int], rows: int
) -> None:
    """Few rows and a long context are shared among threads by slots and by dimensions."""
    context, table = 3001, list(range(99, 0, -1))
    spec = make_spec(*shape, positions=context + rows)
    qkv, outs = random_rows(spec, rows, 11), []
    for threads in (1, 2, 3, 8):
        backend = native(tier, threads)
        cache = backend.new_cache(spec, 100)
        cache.tensor.normal_(generator=torch.Generator().manual_seed(1))
        outs.append(run(backend, spec, cache, [Part(context, qkv, table)]))
        singles = [Part(context + i, qkv[i : i + 1], table) for i in range(rows)]
        outs.append(torch.cat([run(backend, spec, cache, [part]) for part in singles]))
        tree = Part(context, qkv, table, list(range(-1, rows - 1)))
        outs.append(run(backend, spec, cache, [tree]))
    assert all(torch.equal(out, outs[0]) for out in outs)


@tiers
@shapes
@pytest.mark.parametrize("nodes", [1, 6, 65])
def test_a_tree_without_branches_is_the_chain(
    tier: str, shape: tuple[int, int, int], nodes: int
) -> None:
    spec, backend = make_spec(*shape), native(tier, 2)
    context, rows = random_rows(spec, 45, 4), random_rows(spec, nodes, 5)
    outs = []
    for parents in (None, list(range(-1, nodes - 1))):
        cache = new_cache(backend, spec, 4)
        run(backend, spec, cache, [Part(0, context, [0, 1, 2, 3])])
        outs.append(run(backend, spec, cache, [Part(45, rows, [0, 1, 2, 3], parents)]))
    assert torch.equal(*outs)


def path_to(node: int, parents: list[int]) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


@tiers
@shapes
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("context", [0, 31, 77])
def test_a_path_of_a_tree_is_the_chain_of_its_tokens(
    tier: str, shape: tuple[int, int, int], seed: int, context: int
) -> None:
    """Also once the rest of the tree is dropped by `move` and decoding goes on."""
    spec, backend, table = make_spec(*shape), native(tier, 2), [5, 2, 0, 3, 1]
    nodes = (9, 65, 30, 2)[seed]
    parents = random_tree(nodes, seed)
    path = path_to(nodes - 1, parents)
    before, tree_rows = random_rows(spec, context, 6), random_rows(spec, nodes, 7)
    after = random_rows(spec, 3, 8)
    tree_cache, chain_cache = (new_cache(backend, spec, 6) for _ in range(2))
    if context:
        for cache in (tree_cache, chain_cache):
            run(backend, spec, cache, [Part(0, before, table)])
    in_tree = run(backend, spec, tree_cache, [Part(context, tree_rows, table, parents)])
    in_chain = run(backend, spec, chain_cache, [Part(context, tree_rows[path], table)])
    assert torch.equal(in_tree[path], in_chain)

    source = torch.tensor([context + node for node in path], dtype=torch.int32)
    target = torch.arange(context, context + len(path), dtype=torch.int32)
    backend.move(spec, tree_cache, torch.tensor(table, dtype=torch.int32), source, target)
    rest = Part(context + len(path), after, table)
    assert torch.equal(
        run(backend, spec, tree_cache, [rest]), run(backend, spec, chain_cache, [rest])
    )


@tiers
def test_a_long_context_agrees_with_the_twin(tier: str) -> None:
    """Longer than a block's scores, with large scores: the maximum must come first."""
    spec = make_spec(4, 2, 64, positions=3000)
    qkv = random_rows(spec, 2500, 9) * 4
    ours = in_chunks(native(tier, 2), spec, qkv, [2490, 10], list(range(79)))
    twin = ReferenceBackend()
    cache = new_cache(twin, spec, 79)
    context = Part(0, qkv[:2490], list(range(79)))
    batch = make_batch([context])
    heads = spec.heads * spec.head_dim
    for row in range(2490):  # only its K and V matter here
        k, v = qkv[row, heads:].view(2, spec.kv_heads, spec.head_dim)
        low, high = k.chunk(2, dim=-1)
        cos, sin = spec.cos[row], spec.sin[row]
        k = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
        twin._store(spec, cache, batch.block_tables[0], row, torch.stack((k, v)))
    last = run(twin, spec, cache, [Part(2490, qkv[2490:], list(range(79)))])
    torch.testing.assert_close(ours[2490:], last, rtol=0, atol=2e-4)


@tiers
def test_bad_batches_are_refused(tier: str) -> None:
    spec, backend = make_spec(2, 1, 8, positions=80), native(tier, 1)
    cache = new_cache(backend, spec, 3)
    with pytest.raises(ValueError, match="rotary tables"):
        run(backend, spec, cache, [Part(79, random_rows(spec, 2, 0), [0, 1])])
    with pytest.raises(ValueError, match="block table"):
        run(backend, spec, cache, [Part(63, random_rows(spec, 2, 0), [0])])
    chain = make_batch([Part(0, random_rows(spec, 66, 0), [0, 1, 2])])
    with pytest.raises(ValueError, match="65 rows"):
        backend.bind(replace(chain, is_tree=torch.ones(1, dtype=torch.uint8)))
    with pytest.raises(ValueError, match="row_offsets"):
        backend.bind(replace(chain, row_offsets=torch.tensor([0, 64], dtype=torch.int32)))
    with pytest.raises(ValueError, match="positions must be"):
        backend.bind(replace(chain, positions=chain.positions.long()))


def test_odd_heads_are_refused() -> None:
    backend = native(TIERS_HERE[0], 1)
    for shape in ((2, 1, 7), (3, 2, 8)):
        table = torch.zeros(4, shape[2] // 2)
        with pytest.raises(ValueError, match="cannot be grouped or rotated"):
            backend.new_cache(AttentionSpec(*shape, 1.0, table, table), 1)
