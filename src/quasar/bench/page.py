"""The benchmark as one self-contained page: no script, no request, everything escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from quasar.figures import json_text

HTML_IN_JSON = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}
"""JSON stays JSON, and nothing in it can close the script tag that holds it."""


def render(content: dict[str, Any]) -> str:
    """The page of a report as `quasar bench --json` writes it."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    raw = Markup(json_text(content, indent=1).translate(HTML_IN_JSON))
    entries = content["configurations"]
    fastest = max(entry["decode_tokens_per_second"] for entry in entries)
    template = environment.get_template("page.html")
    return template.render(report=content, entries=entries, fastest=fastest or 1.0, raw=raw)
