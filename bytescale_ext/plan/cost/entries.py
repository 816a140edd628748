"""Builds dataclasses from the entries of a JSON object."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def entries_of(value: object) -> Mapping[str, object]:
    """Return a JSON object as it is. Raises TypeError for another JSON value."""
    if not isinstance(value, Mapping):
        raise TypeError(f"a {type(value).__name__} where entries are expected")
    return value


def from_entries[Kind](kind: Callable[..., Kind], value: object) -> Kind:
    """Return a ``kind`` whose fields are the entries of a JSON object.

    Raises TypeError for another JSON value, and, naming it, for an entry that is missing or unknown.
    """
    return kind(**entries_of(value))
