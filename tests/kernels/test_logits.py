"""argmax, top-k and Gumbel sampling against the twin and against their law."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import TIERS_HERE, native
from torch import Tensor

from quasar.kernels.base import Buffer, NoiseKey
from quasar.kernels.reference import ReferenceBackend, philox4x32

VOCABULARIES = (1, 2, 15, 16, 17, 63, 64, 65, 1000, 4095, 4097, 32003, 151936)

pytestmark = pytest.mark.skipif(not TIERS_HERE, reason="no native tier runs here")
tiers = pytest.mark.parametrize("tier", TIERS_HERE)
threads_1_and_2 = pytest.mark.parametrize("threads", [1, 2])


def random_logits(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 4


@tiers
@threads_1_and_2
@pytest.mark.parametrize("columns", VOCABULARIES)
def test_argmax_agrees_with_the_twin(tier: str, threads: int, columns: int) -> None:
    rows = 40 if columns < 5000 else 3
    logits = Buffer.of(random_logits(rows, columns))
    assert native(tier, threads).argmax(rows, logits) == ReferenceBackend().argmax(rows, logits)


@tiers
@threads_1_and_2
@given(
    values=st.lists(
        st.sampled_from([math.nan, -math.inf, math.inf, -0.0, 0.0, 1.0, 2.0, -3e38]),
        min_size=1,
        max_size=300,
    ),
    stretch=st.sampled_from([1, 50]),
)
@settings(max_examples=60)
def test_ties_and_strange_values(
    tier: str, threads: int, values: list[float], stretch: int
) -> None:
    """The lowest index wins a tie; a NaN is less than any number."""
    backend, twin = native(tier, threads), ReferenceBackend()
    logits = Buffer.of(torch.tensor(values).repeat_interleave(stretch)[None].contiguous())
    numbers = [-math.inf if math.isnan(v) else v for v in logits.tensor[0].tolist()]
    if any(v == v for v in values):
        best = next(i for i, v in enumerate(logits.tensor[0].tolist()) if v == max(numbers))
        assert backend.argmax(1, logits) == [best]
    else:
        assert backend.argmax(1, logits) == [0]
    if not any(math.isnan(v) for v in values):
        ours, theirs = backend.top_k(logits, 0, 20), twin.top_k(logits, 0, 20)
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@tiers
@pytest.mark.parametrize("columns", VOCABULARIES)
def test_top_k_agrees_with_the_twin(tier: str, columns: int) -> None:
    backend, twin = native(tier, 2), ReferenceBackend()
    logits = Buffer.of((random_logits(3, columns) * 8).round() / 8)  # many ties
    for k in sorted({1, min(2, columns), min(50, columns), columns // 2 or 1, columns}):
        for row in range(3):
            values, ids = backend.top_k(logits, row, k)
            expected, expected_ids = twin.top_k(logits, row, k)
            assert torch.equal(values, expected)
            assert torch.equal(ids, expected_ids)


@tiers
@pytest.mark.parametrize("order", ["rising", "falling"])
def test_top_k_of_a_sorted_row(tier: str, order: str) -> None:
    row = torch.arange(20000.0)
    logits = Buffer.of((row if order == "rising" else row.flip(0))[None].contiguous())
    values, _ = native(tier, 1).top_k(logits, 0, 300)
    assert torch.equal(values, row.flip(0)[:300])


@tiers
def test_top_k_puts_nan_last(tier: str) -> None:
    row = torch.full((1, 3000), math.nan)
    row[0, 2999], row[0, 5] = 1.0, -math.inf
    values, ids = native(tier, 1).top_k(Buffer.of(row), 0, 4)
    assert ids.tolist() == [2999, 5, 0, 1]
    assert values[:2].tolist() == [1.0, -math.inf] and values[2:].isnan().all()


def test_philox_known_answers() -> None:
    """Random123's known-answer vectors for philox4x32-10."""
    ones = 0xFFFFFFFF
    counters = torch.tensor([[0] * 4, [ones] * 4])
    zero = philox4x32(counters[:1], (0, 0))[0].tolist()
    full = philox4x32(counters[1:], (ones, ones))[0].tolist()
    assert zero == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert full == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@tiers
@threads_1_and_2
@pytest.mark.parametrize("columns", VOCABULARIES)
def test_gumbel_argmax_agrees_with_the_twin(tier: str, threads: int, columns: int) -> None:
    """Flat, usual and steep rows, so that many, some and few groups are passed over."""
    backend, twin = native(tier, threads), ReferenceBackend()
    for case, (scale, cut) in enumerate([(0.0, 0.0), (1.0, 0.3), (1.0, 0.999), (9.0, 0.0)]):
        logits = Buffer.of(random_logits(1, columns, seed=case) * scale)
        threshold = float(logits.tensor[0].sort().values[int(cut * columns)])
        noise = NoiseKey(seed=0x1234567890ABCDE + case, sample=case, position=1000 * case)
        for temperature in (0.3, 0.8, 30.0):
            arguments = (logits, 0, temperature, threshold, noise)
            assert backend.gumbel_argmax(*arguments) == twin.gumbel_argmax(*arguments)


@tiers
def test_every_part_of_the_key_changes_the_noise(tier: str) -> None:
    backend, logits = native(tier, 2), Buffer.of(torch.zeros(1, 100000))
    keys = [NoiseKey(*key) for key in ((0, 0, 0), (1, 0, 0), (1 << 40, 0, 0), (0, 1, 0), (0, 0, 1))]
    drawn = {backend.gumbel_argmax(logits, 0, 1.0, -math.inf, key) for key in keys}
    assert len(drawn) == len(keys)


@tiers
def test_only_candidates_are_drawn(tier: str) -> None:
    backend = native(tier, 2)
    logits = random_logits(1, 500)
    logits[0, 7] = math.nan
    threshold = float(logits[0, logits[0].isfinite()].sort().values[-3])
    kept = {i for i, v in enumerate(logits[0].tolist()) if v >= threshold}
    drawn = {
        backend.gumbel_argmax(Buffer.of(logits), 0, 50.0, threshold, NoiseKey(3, 0, position))
        for position in range(200)
    }
    assert drawn == kept and len(kept) == 3


@tiers
def test_gumbel_argmax_has_the_law_of_softmax(tier: str) -> None:
    """Chi-square over 20,000 draws: 23 degrees of freedom, 49.7 is passed once in 1,000."""
    backend, draws, temperature = native(tier, 1), 20000, 1.3
    row = torch.linspace(2.0, -1.0, 24)[torch.randperm(24, generator=torch.manual_seed(0))]
    logits, counts = Buffer.of(row[None].contiguous()), torch.zeros(24)
    for position in range(draws):
        noise = NoiseKey(seed=99, sample=2, position=position)
        counts[backend.gumbel_argmax(logits, 0, temperature, -math.inf, noise)] += 1
    expected = torch.softmax(row / temperature, dim=0) * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 49.7
