"""Sampling parameters refuse what makes no sense; the statistics count as documented."""

import math

import pytest

from quasar.errors import UsageError
from quasar.types import Draft, GenerationStats, SamplingParams


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e-38),
        ("top_k", -1),
        ("top_k", 2**63),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", -1.0),
        ("min_p", 2.0),
        ("seed", -1),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("stop", ("",)),
        ("stop", "ab"),
        ("stop", (1,)),
        ("seed", 1.5),
        ("max_tokens", 2.0),
        ("max_tokens", True),
    ],
)
def test_absurd_values_are_refused_by_name(option, value):
    with pytest.raises(UsageError, match=option):
        SamplingParams(**{option: value})


def test_a_chain_is_a_tree_whose_parents_precede():
    assert Draft.chain((5, 6, 7)).parents == (-1, 0, 1)
    assert Draft.chain((5, 6, 7)).is_chain
    assert Draft().is_chain
    assert not Draft((5, 6), (-1, -1)).is_chain


def test_statistics():
    stats = GenerationStats(
        completion_tokens=21,
        decode_seconds=2.0,
        verify_passes=8,
        drafted_passes=5,
        draft_tokens=24,
        accepted_tokens=12,
    )
    assert stats.decode_tokens_per_second == 10.0
    assert stats.mean_acceptance_length == 20 / 8
    assert stats.mean_acceptance_length_drafted == 1 + 12 / 5
    assert stats.draft_acceptance_rate == 0.5
    assert GenerationStats().decode_tokens_per_second == 0.0
    assert GenerationStats().mean_acceptance_length == 0.0
