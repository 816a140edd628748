"""Short documents of manuals, windows of them, and probes that ask for a name from another document."""

from __future__ import annotations

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from bytescale_ext.data.samples.texts import BYTE_LEVEL_EOD
from bytescale_ext.plan.sculpt.pieces import Table, window_bounds

_PARAGRAPHS: Final = re.compile(rb"\n[ \t]*\n")
_HEADING: Final = re.compile(rb"^[^\n]+\n([=~^\"'*+#.-])\1{2,}\s*(\n|$)")
_NAME: Final = re.compile(rb"\b[A-Za-z]\w*_\w*[A-Za-z0-9]\b")
_SHORTEST_NAME: Final = 8
CUE: Final = 3
"""First bytes of a name that a probe does not count: without them nobody could know which name comes."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text and the file that it is from."""

    text: bytes
    file: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Two windows of equal length that end with the same document.

    Attributes:
        found: tokens [n] of the window that begins with another document which has the name.
        absent: the same [n] with an unrelated document instead.
        begin: first token of the name that counts, in both.
        end: the token after its last.
    """

    found: np.ndarray
    absent: np.ndarray
    begin: int
    end: int


def documents_of(text: bytes, least: int, most: int) -> list[bytes]:
    """Return the documents of a file: runs of paragraphs under a heading, of ``least`` to ``most`` bytes.

    Shorter ones take in what follows; paragraphs longer than a document are left out.
    """
    found: list[bytes] = []
    open_one = b""
    for paragraph in _PARAGRAPHS.split(text):
        if not 0 < len(paragraph) <= most:
            continue
        joined = open_one + b"\n\n" + paragraph if open_one else paragraph
        begins = len(joined) > most or (len(open_one) >= least and _HEADING.match(paragraph))
        if begins:
            found.append(open_one)
        open_one = paragraph if begins else joined
    return [one for one in [*found, open_one] if len(one) >= least]


def share_of(file: str, shares: int = 20) -> int:
    """Return the number of the share that a file belongs to: the same on every machine."""
    return zlib.crc32(file.encode()) % shares


def tokens_of(text: bytes) -> np.ndarray:
    """Return the tokens of a document and its end: uint16 [n + 1]."""
    return np.append(np.frombuffer(text, np.uint8).astype(np.uint16), np.uint16(BYTE_LEVEL_EOD))


def windows_of(table: Table, documents: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the tokens of each window, uint16 [n], of a table [rows] and the tokens of documents [n] each.

    The end of a document that another window began comes first, a document that goes on in another window last.
    """
    windows = []
    bounds = window_bounds(table)
    for begin, end in pairwise(bounds):
        parts = []
        for _, number, start, length in table[begin:end].tolist():
            goes_on = start + length < len(documents[number])
            parts.append((start == 0, goes_on, number, documents[number][start : start + length]))
        windows.append(np.concatenate([part for *_, part in sorted(parts, key=lambda one: one[:3])]))
    return windows


def names_of(text: bytes) -> set[bytes]:
    """Return the names with an underscore that stand in a text."""
    return {name for name in _NAME.findall(text) if len(name) >= _SHORTEST_NAME}


def probes_of(held_out: Sequence[Document], known: Iterable[bytes], context: int, seed: int, most: int) -> list[Probe]:
    """Return probes of names that stand in 2 to 6 held-out documents and in no text of the training.

    Args:
        held_out: documents that no model was trained on.
        known: names of the training.
        context: the most tokens of a window.
        seed: of all choices.
        most: probes.
    """
    places: dict[bytes, list[int]] = defaultdict(list)
    for number, document in enumerate(held_out):
        for name in sorted(names_of(document.text)):
            places[name].append(number)
    known = set(known)
    names = sorted(name for name, where in places.items() if 2 <= len(where) <= 6 and name not in known)
    random = np.random.RandomState(seed)
    tokens = [tokens_of(document.text) for document in held_out]
    probes: list[Probe] = []
    used: Counter[int] = Counter()
    for i in random.permutation(len(names)).tolist():
        name = names[i]
        source, asks = random.permutation(places[name])[:2].tolist()
        at = held_out[asks].text.find(name)
        if used[asks] or held_out[source].text == held_out[asks].text:
            continue
        others = [n for n in random.permutation(len(held_out)).tolist() if _unrelated(held_out, n, source, name)]
        chosen = _filled(tokens, source, asks, others, context)
        if chosen is None:
            continue
        used[asks] += 1
        between, instead = chosen
        middle = [tokens[n] for n in between]
        swapped = np.append(tokens[instead][: len(tokens[source]) - 1], np.uint16(BYTE_LEVEL_EOD))
        begin = len(tokens[source]) + sum(map(len, middle)) + at
        rest = [*middle, tokens[asks]]
        found, absent = (np.concatenate([first, *rest]) for first in (tokens[source], swapped))
        probes.append(Probe(found, absent, begin + CUE, begin + len(name)))
        if len(probes) == most:
            break
    return probes


def _unrelated(held_out: Sequence[Document], number: int, source: int, name: bytes) -> bool:
    return held_out[number].file != held_out[source].file and name not in held_out[number].text


def _filled(
    tokens: Sequence[np.ndarray], source: int, asks: int, others: Sequence[int], context: int
) -> tuple[list[int], int] | None:
    """Return documents to stand between two, and one to stand for the first; None where there are none."""
    room = context - len(tokens[source]) - len(tokens[asks])
    instead = next((n for n in others if len(tokens[n]) >= len(tokens[source])), None)
    if room < 0 or instead is None:
        return None
    between = []
    for number in others[:200]:
        if number != instead and len(tokens[number]) <= room:
            between.append(number)
            room -= len(tokens[number])
    return between, instead
