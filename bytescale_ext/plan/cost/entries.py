"""Build dataclasses from JSON objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def entries_of(value: object) -> Mapping[str, object]:
    """Return a JSON object unchanged. Raises TypeError for any other JSON value."""
    if not isinstance(value, Mapping):
        raise TypeError(f"a {type(value).__name__} instead of an object with entries")
    return value


def from_entries[Kind](kind: Callable[..., Kind], value: object) -> Kind:
    """Return a ``kind`` whose fields are the entries of a JSON object.

    Raises TypeError for any other JSON value, and for an entry that is missing or unknown, which the message names.
    """
    return kind(**entries_of(value))
