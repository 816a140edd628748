"""Files that match a pattern such as ``corpora/*/*.jsonl``, found in bounded time.

Links to folders further up make a small folder endless: ``*/*/*`` and ``**`` list it again below each link. So a folder
is listed once for each part of a pattern, and what is found behind links is counted.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from fnmatch import translate
from pathlib import Path
from typing import Final

MOST_LINKED: Final = 2_000_000
"""Entries of folders that a pattern may reach through links."""
_ANY_DEPTH: Final = "**"


def paths_matching(pattern: str) -> list[Path]:
    """Return the paths that match a pattern, sorted, without hidden ones. Raises ValueError behind endless links."""
    path = Path(pattern)
    parts = path.parts[1:] if path.anchor else path.parts
    return _Search(pattern, shows_hidden=False, follows_links=True).matches(path.anchor, parts)


def paths_below(root: Path, pattern: str) -> list[Path]:
    """Return the paths at any depth below a folder that match a pattern, sorted.

    Raises:
        ValueError: the pattern is absolute or empty, or leads through links without end.
    """
    path = Path(pattern)
    if path.anchor or not path.parts:
        raise ValueError(f"{pattern!r} is no pattern for the files below a folder")
    return _Search(pattern, shows_hidden=True, follows_links=False).matches(str(root), (_ANY_DEPTH, *path.parts))


class _Search:
    """Expands a pattern part by part. A place is a path, and whether a link of the pattern leads to it."""

    def __init__(self, pattern: str, *, shows_hidden: bool, follows_links: bool) -> None:
        self._pattern, self._shows_hidden, self._follows_links = pattern, shows_hidden, follows_links
        self._num_linked = 0

    def matches(self, root: str, parts: tuple[str, ...]) -> list[Path]:
        places = {root: False}
        for part in parts:
            if part == _ANY_DEPTH:
                places = self._all_below(places)
            elif glob.has_magic(part):
                is_match = re.compile(translate(part)).match
                shows_hidden = self._shows_hidden or part.startswith(".")
                places = {
                    path: is_linked
                    for place, is_behind in places.items()
                    for name, path, is_linked in self._entries(place, is_behind)
                    if is_match(name) and (shows_hidden or not name.startswith("."))
                }
            else:
                joined = {os.path.join(place, part): is_linked for place, is_linked in places.items()}
                places = {path: is_linked for path, is_linked in joined.items() if os.path.lexists(path)}
        return sorted(Path(place) for place in places if place)

    def _all_below(self, places: dict[str, bool]) -> dict[str, bool]:
        """Return the places and everything below them."""
        found, left = dict(places), list(places.items())
        while left:
            for name, path, is_linked in self._entries(*left.pop()):
                if path in found or not (self._shows_hidden or not name.startswith(".")):
                    continue
                found[path] = is_linked
                if self._follows_links or not os.path.islink(path):
                    left.append((path, is_linked))
        return found

    def _entries(self, place: str, is_behind: bool) -> Iterator[tuple[str, str, bool]]:
        """Yield the name, the path and the kind of each entry of a folder; nothing for a file."""
        try:
            with os.scandir(place or ".") as entries:
                listed = [(entry.name, entry.is_symlink()) for entry in entries]
        except OSError:  # no folder, or not readable
            return
        self._num_linked += len(listed) * is_behind
        if self._num_linked > MOST_LINKED:
            raise ValueError(f"{self._pattern!r} leads to more than {MOST_LINKED:,} files behind links: name a folder")
        for name, is_link in listed:
            yield name, os.path.join(place, name), is_behind or is_link
