"""Attention against its twin, and the equality of bits that speculation stands on.

Caches start out full of NaN: a slot that is not visible and leaks into a result shows at once.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import TIERS_HERE, native
from torch import Tensor

from quasar.kernels.base import AttentionSpec, Backend, Buffer, RaggedBatch
from quasar.kernels.reference import ReferenceBackend, rotate


class Shape(NamedTuple):
    """What an AttentionSpec is made of."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    unrotated: int = 0
    norms: bool = False


HEAD_DIMS = (2, 8, 16, 34, 64, 80, 96, 128, 160, 256)
WINDOWS = (0, 1, 2, 7, 16, 33, 500)
SHAPES = (
    Shape(9, 3, 64),
    Shape(14, 2, 64, window=37),
    Shape(4, 4, 80, unrotated=48),
    Shape(8, 1, 128, norms=True),
    Shape(3, 3, 8, window=3),
    Shape(4, 1, 256, window=20, norms=True),
    Shape(4, 2, 96, window=1000),
)

pytestmark = pytest.mark.skipif(not TIERS_HERE, reason="no native tier runs here")
tiers = pytest.mark.parametrize("tier", TIERS_HERE)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))


def make_spec(shape: Shape, positions: int = 512) -> AttentionSpec:
    heads, kv_heads, head_dim, window, unrotated, norms = shape
    rotated = head_dim - unrotated
    inverse = 10000.0 ** (-torch.arange(0, rotated, 2).double() / max(rotated, 1))
    angles = torch.arange(positions)[:, None] * inverse
    spec = AttentionSpec(
        heads,
        kv_heads,
        head_dim,
        head_dim**-0.5,
        angles.cos().float(),
        angles.sin().float(),
        window,
    )
    if not norms:
        return spec
    q_norm, k_norm = torch.linspace(0.5, 2.0, 2 * head_dim).view(2, head_dim).flip(1)
    return replace(spec, q_norm=q_norm, k_norm=k_norm, norm_eps=1e-6)


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
    window=st.sampled_from(WINDOWS),
    unrotated=st.integers(0, 100),
    norms=st.booleans(),
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
    window: int,
    unrotated: int,
    norms: bool,
    steps: list[tuple[int, int, bool]],
    threads: int,
    seed: int,
) -> None:
    """Several passes of two sequences, one of them now and then a tree."""
    unrotated = min(2 * unrotated, head_dim)
    spec = make_spec(Shape(kv_heads * group, kv_heads, head_dim, window, unrotated, norms))
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
    spec = make_spec(Shape(6, 2, 64, window=rows % 4 * 15))
    qkv, table = random_rows(spec, 37 + rows, rows), [4, 0, 2, 5, 1, 3]
    ours = in_chunks(native(tier, 2), spec, qkv, [37, rows], table)
    twin = in_chunks(ReferenceBackend(), spec, qkv, [37, rows], table)
    torch.testing.assert_close(ours, twin, rtol=0, atol=3e-5)


@tiers
@shapes
def test_chunks_equal_the_whole(tier: str, shape: Shape) -> None:
    spec, backend = make_spec(shape), native(tier, 2)
    qkv = random_rows(spec, 150, 1)
    whole = in_chunks(backend, spec, qkv, [150], list(range(5)))
    for sizes in ([1] * 150, [40, 1, 2, 64, 3, 17, 23], [149, 1]):
        assert torch.equal(in_chunks(backend, spec, qkv, sizes, list(range(5))), whole)


@tiers
@shapes
def test_a_sequence_alone_equals_itself_among_others(tier: str, shape: Shape) -> None:
    spec, backend = make_spec(shape), native(tier, 2)
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
def test_neither_threads_nor_blocks_change_a_bit(tier: str, shape: Shape) -> None:
    spec = make_spec(shape)
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
    tier: str, shape: Shape, rows: int
) -> None:
    """Few rows and a long context are shared among threads by slots and by dimensions."""
    context, table = 3001, list(range(99, 0, -1))
    spec = make_spec(shape, positions=context + rows)
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
def test_a_tree_without_branches_is_the_chain(tier: str, shape: Shape, nodes: int) -> None:
    spec, backend = make_spec(shape), native(tier, 2)
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
    tier: str, shape: Shape, seed: int, context: int
) -> None:
    """Also once the rest of the tree is dropped by `move` and decoding goes on."""
    spec, backend, table = make_spec(shape), native(tier, 2), [5, 2, 0, 3, 1]
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
@pytest.mark.parametrize("window", [0, 1025])
def test_a_long_context_agrees_with_the_twin(tier: str, window: int) -> None:
    """Longer than a block's scores, with large scores: the maximum must come first."""
    spec, table = make_spec(Shape(4, 2, 64, window), positions=3000), list(range(79))
    qkv = random_rows(spec, 2500, 9) * 4
    ours = in_chunks(native(tier, 2), spec, qkv, [2490, 10], table)
    twin = ReferenceBackend()
    cache, blocks = new_cache(twin, spec, 79), torch.tensor(table, dtype=torch.int32)
    for row in range(2490):  # only its K and V matter here
        k, v = qkv[row, spec.heads * spec.head_dim :].view(2, spec.kv_heads, spec.head_dim)
        k = rotate(k, spec.cos[row], spec.sin[row])
        twin._store(spec, cache, blocks, row, torch.stack((k, v)))
    last = run(twin, spec, cache, [Part(2490, qkv[2490:], table)])
    torch.testing.assert_close(ours[2490:], last, rtol=0, atol=2e-4)


@tiers
def test_a_window_of_one_is_the_value(tier: str) -> None:
    spec = make_spec(Shape(4, 2, 64, window=1))
    qkv = random_rows(spec, 70, 12)
    v = qkv.view(70, -1, 64)[:, -2:].bfloat16().float().repeat_interleave(2, dim=1)
    outs = in_chunks(native(tier, 2), spec, qkv, [60, 1, 9], [0, 1])
    assert torch.equal(outs, v.flatten(1))


@tiers
@shapes
def test_a_window_that_holds_all_changes_no_bit(tier: str, shape: Shape) -> None:
    qkv, table = random_rows(make_spec(shape), 109, 13), [0, 1]
    outs = [
        in_chunks(native(tier, 2), make_spec(shape._replace(window=window)), qkv, [100, 9], table)
        for window in (0, 109, 2**31 - 1)
    ]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@tiers
@pytest.mark.parametrize("window", [1, 5, 64, 70])
@pytest.mark.parametrize("parents", [None, random_tree(9, 3)], ids=["chain", "tree"])
@pytest.mark.parametrize("threads", [1, 4])
def test_what_lies_before_the_window_is_not_read(
    tier: str, window: int, parents: list[int] | None, threads: int
) -> None:
    """Blocks that lie before the windows of all rows may hold anything."""
    context, table = 700, list(range(12))
    spec = make_spec(Shape(6, 2, 64, window), positions=800)
    backend = native(tier, threads)
    cache = backend.new_cache(spec, 12)
    cache.tensor.normal_(generator=torch.Generator().manual_seed(2))
    part = Part(context, random_rows(spec, 9, 14), table, parents)
    whole = run(backend, spec, cache, [part])
    cache.tensor[: (context + 1 - window) // backend.block_size] = math.nan
    assert torch.equal(run(backend, spec, cache, [part]), whole)
    assert whole.isfinite().all()


@tiers
def test_bad_batches_are_refused(tier: str) -> None:
    spec, backend = make_spec(Shape(2, 1, 8), positions=80), native(tier, 1)
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 7}, "2 / 1 heads of 7 cannot be grouped or rotated"),
        ({"head_dim": 1026}, "2 / 1 heads of 1026 cannot"),
        ({"heads": 3, "kv_heads": 2}, "3 / 2 heads of 8 cannot"),
        ({"kv_heads": 0}, "2 / 0 heads of 8 cannot"),
        ({"window": -1}, "window must be .* not -1"),
        ({"window": 2**31}, "window must be"),
        ({"cos": torch.zeros(4, 5)}, "cos must be .*4, 4.* not .*4, 5"),
        ({"cos": torch.zeros(4)}, "cos must be"),
        ({"sin": torch.zeros(4, 3)}, "sin must be .*4, 4.* not .*4, 3"),
        ({"sin": torch.zeros(4, 4).double()}, "sin must be torch.float32"),
        ({"q_norm": torch.ones(8)}, "q_norm and k_norm must both be given"),
        ({"k_norm": torch.ones(8)}, "q_norm and k_norm must both be given"),
        ({"q_norm": torch.ones(8), "k_norm": torch.ones(4)}, "k_norm must be .*8.* not .*4"),
        ({"q_norm": torch.ones(16)[::2], "k_norm": torch.ones(8)}, "q_norm must be contiguous"),
        ({"norm_eps": -1e-6}, "norm_eps must be .* not -1e-06"),
        ({"norm_eps": math.nan}, "norm_eps must be .* not nan"),
    ],
    ids=str,
)
def test_bad_specs_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    table = torch.zeros(4, 4)
    spec = replace(AttentionSpec(2, 1, 8, 1.0, table, table), **changes)
    with pytest.raises(ValueError, match=message):
        native(TIERS_HERE[0], 1).new_cache(spec, 1)
