"""JSON that users give. Python's parser fails with another error for deep nesting than for other bad text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Pairs = Callable[[list[tuple[str, object]]], object]
"""Makes the value of a JSON object from its (name, value) pairs."""


def json_value(text: str | bytes, object_pairs_hook: Pairs | None = None) -> Any:
    """Return a JSON value. Raises ValueError for text that is not JSON, not UTF-8, or nested too deeply."""
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def lines_of_text(text: str) -> list[str]:
    """Return the lines of a text, which end at newlines alone: other separators of Unicode are part of a line."""
    lines = text.split("\n")
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]
