"""Results as JSON that every parser takes and no terminal acts on."""

from __future__ import annotations

import json
import math
from typing import Any

C1_CONTROLS = {code: f"\\u{code:04x}" for code in range(127, 160)}
"""JSON escapes the other control characters by itself; these can only stand inside its strings."""


def json_text(content: Any, indent: int | None = None) -> str:
    """JSON of lists, objects and scalars. A figure that is not finite becomes null."""
    text = json.dumps(finite(content), indent=indent, ensure_ascii=False, allow_nan=False)
    return text.translate(C1_CONTROLS)


def finite(value: Any) -> Any:
    """The same with None for every NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
