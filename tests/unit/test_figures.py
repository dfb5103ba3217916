"""JSON of results."""

from __future__ import annotations

import json
import math

from quasar.figures import json_text


def test_figures_that_are_not_finite_become_null():
    content = {"a": math.nan, "b": [math.inf, 1.5, (-math.inf,)], "c": {"d": True, "e": 3}}
    found = json.loads(json_text(content), parse_constant=lambda name: 1 / 0)
    assert found == {"a": None, "b": [None, 1.5, [None]], "c": {"d": True, "e": 3}}


def test_no_control_character_is_written_as_it_is():
    text = "".join(map(chr, range(160))) + "\u00e9\U0001f600"
    shown = json_text([text])
    assert json.loads(shown) == [text] and "\u00e9" in shown
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in shown)
