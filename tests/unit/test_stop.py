"""Stop strings: the same text comes out however it is cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from quasar.text.stop import StopMatcher

letters = st.text("abc", max_size=30)
stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """Read one character at a time: the first stop string that is complete cuts the text."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(letters, stops, st.lists(st.integers(0, 30), max_size=6))
def test_result_does_not_depend_on_the_cuts(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    bounds = [0, *sorted(cuts), len(text)]
    shown = ""
    for start, end in pairwise(bounds):
        shown += matcher.push(text[start:end])
        assert expected(text, stops)[0].startswith(shown)
    assert (shown + matcher.flush(), matcher.stopped) == expected(text, stops)


@given(letters, stops)
def test_no_more_is_held_back_than_could_still_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.push(text)
    if not matcher.stopped:
        held = text[len(shown) :]
        assert not held or any(s.startswith(held) and s != held for s in stops)


def test_text_after_a_stop_is_dropped() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("one EN") == "one "
    assert matcher.push("D two") == ""
    assert matcher.stopped
    assert matcher.push("three") == "" and matcher.flush() == ""


def test_without_stops_everything_passes_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.push("abc") == "abc"
    assert not matcher.stopped
