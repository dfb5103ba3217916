"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Passes text through until the first stop string is complete, and drops it and the rest.

    What may be the start of a stop string is held back. "First" is the one that ends first (of
    those, the longest), so the result does not depend on how the text is cut into pushes.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Text that is safe to show; empty once stopped."""
        if self.stopped:
            return ""
        self._held += text
        start = self._first_match()
        if start is None:
            start = len(self._held) - self._undecided()
            safe, self._held = self._held[:start], self._held[start:]
            return safe
        self.stopped = True
        safe, self._held = self._held[:start], ""
        return safe

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        rest, self._held = self._held, ""
        return rest

    def _first_match(self) -> int | None:
        """Start of the stop string that ends first."""
        matches = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        return min(matches)[1] if matches else None

    def _undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if self._held.endswith(tuple(s[:length] for s in self._stops if len(s) > length)):
                return length
        return 0
