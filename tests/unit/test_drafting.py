"""Drafters: the n-gram index equals a scan, costs O(1) a token, and the registry finds files."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quasar.drafting import drafters, make_drafter
from quasar.errors import UsageError
from quasar.types import Draft


def scan(tokens, count):
    """The definition: the longest n <= 3 whose last n tokens occurred before, latest place."""
    for size in (3, 2, 1):
        tail = tokens[len(tokens) - size :]
        for start in range(len(tokens) - size - 1, -1, -1):
            if size <= len(tokens) and tokens[start : start + size] == tail:
                copy = list(tokens)
                for i in range(count):
                    copy.append(copy[start + size + i])
                return tuple(copy[len(tokens) :])
    return ()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 9), st.data())
def test_ngram_equals_a_scan_however_the_tokens_arrive(tokens, count, data):
    drafter = make_drafter("ngram", count)
    cut = data.draw(st.integers(0, len(tokens)))
    drafter.observe(tokens[:cut])
    drafter.observe(tokens[cut:])
    assert drafter.propose(100) == Draft.chain(scan(tokens, count))


def test_ngram_prefers_the_longest_then_the_latest_match():
    drafter = make_drafter("ngram", 2)
    drafter.observe([1, 2, 3, 7, 7, 9, 2, 3, 8, 8, 1, 2, 3])
    assert drafter.propose(5).tokens == (7, 7)
    drafter.observe([4, 2, 3])
    assert drafter.propose(5).tokens == (4, 2)


def test_ngram_without_a_match_and_a_repeated_token():
    drafter = make_drafter("ngram", 4)
    drafter.observe([1, 2, 3])
    assert drafter.propose(9) == Draft()
    drafter.observe([3])
    assert drafter.propose(9).tokens == (3, 3, 3, 3)


@pytest.mark.parametrize("name", sorted(drafters()))
def test_no_drafter_exceeds_its_limit(name):
    drafter = make_drafter(name, 5)
    drafter.observe([1, 2, 1, 2, 1, 2])
    for limit in (0, 1, 3, 50):
        assert len(drafter.propose(limit)) <= min(limit, 5)
    assert drafter.propose(-1) == Draft()
    assert drafter.seconds > 0


def test_the_registry_finds_files_and_refuses_by_name():
    assert {"none", "ngram"} <= set(drafters())
    with pytest.raises(UsageError, match="'banana' is unknown"):
        make_drafter("banana")
    for absurd in (0, -3, 65, 10**9):
        with pytest.raises(UsageError, match="draft_tokens"):
            make_drafter("ngram", absurd)
