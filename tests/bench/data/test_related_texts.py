"""Short documents, windows of their tokens, and probes."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.plan.sculpt.pieces import ROW
from scripts.bench.data.related_texts import (
    CUE,
    Document,
    documents_of,
    names_of,
    probes_of,
    share_of,
    tokens_of,
    windows_of,
)

PAGE = b"""Title
=====

Some words of the first part.

More words of it.

Second
------

%s

Third
-----

Its words."""


def test_a_document_begins_with_a_heading() -> None:
    found = documents_of(PAGE % b"The second part.", 20, 200)
    assert found == [
        b"Title\n=====\n\nSome words of the first part.\n\nMore words of it.",
        b"Second\n------\n\nThe second part.",
        b"Third\n-----\n\nIts words.",
    ]


def test_short_parts_take_in_what_follows_and_long_ones_are_cut() -> None:
    first, rest = documents_of(PAGE % b"The second part.", 40, 200)
    assert first.endswith(b"More words of it.")
    assert rest.startswith(b"Second\n")
    assert rest.endswith(b"Third\n-----\n\nIts words.")
    parts = documents_of(b"\n\n".join(b"word " * 5 for _ in range(20)), 20, 100)
    assert parts
    assert all(20 <= len(part) <= 100 for part in parts)


def test_long_paragraphs_and_short_rests_are_left_out() -> None:
    assert documents_of(PAGE % (b"x" * 300), 20, 200)[1] == b"Second\n------\n\nThird\n-----\n\nIts words."
    assert documents_of(b"short", 20, 200) == documents_of(b"", 20, 200) == []


def test_shares_of_files() -> None:
    shares = [share_of(f"{number}.rst") for number in range(2000)]
    assert shares[:4] == [share_of(f"{number}.rst") for number in range(4)]
    assert set(shares) == set(range(20))


def test_names() -> None:
    assert names_of(b"call get_the_name() of a_b, CONFIG_NET_X or _private.my_own_thing_") == {
        b"get_the_name", b"CONFIG_NET_X",
    }  # fmt: skip


def table(rows: list[tuple[int, int, int, int]]) -> np.ndarray:
    return np.array(rows, ROW)


def test_windows_begin_with_what_another_one_began() -> None:
    documents = [tokens_of(text) for text in (b"abcd", b"ef", b"ghi")]
    rows = [(0, 0, 0, 5), (0, 2, 0, 2), (1, 1, 0, 3), (1, 2, 2, 2)]
    first, second = windows_of(table(rows), documents)
    assert first.tolist() == [*b"abcd", 256, *b"gh"]
    assert second.tolist() == [*b"i", 256, *b"ef", 256]
    turned = windows_of(table([(0, 0, 0, 2), (0, 1, 0, 3)]), documents)[0]
    assert turned.tolist() == [*b"ef", 256, *b"ab"]


def held_out() -> list[Document]:
    named = [
        Document(b"Here find_the_answer is defined. " + b"a" * 30, "a"),
        Document(b"We call find_the_answer.", "b"),
    ]
    others = [
        Document(f"Number {number}: nothing but the same old words here.".encode() * 2, f"o{number}")
        for number in range(9)
    ]
    return [*named, *others]


def test_a_probe_has_two_windows_that_differ_in_one_document() -> None:
    (probe,) = probes_of(held_out(), [], 300, 0, 10)
    assert len(probe.found) == len(probe.absent) <= 300
    assert bytes(probe.found[probe.begin - CUE : probe.end].astype(np.uint8)) == b"find_the_answer"
    assert np.array_equal(probe.found[probe.begin - 10 :], probe.absent[probe.begin - 10 :])
    texts = [bytes(np.minimum(one[: probe.begin - CUE], 255).astype(np.uint8)) for one in (probe.found, probe.absent)]
    assert b"find_the_answer" in texts[0]
    assert b"find_the_answer" not in texts[1]
    first = int(np.flatnonzero(probe.found == 256)[0])
    assert np.flatnonzero(probe.absent == 256)[0] == first
    assert np.array_equal(probe.found[first:], probe.absent[first:])
    assert np.count_nonzero(probe.found == 256) >= 3  # others stand between


@pytest.mark.parametrize(("known", "context", "most"), [([b"find_the_answer"], 300, 10), ([], 50, 10)])
def test_no_probe_of_known_names_or_without_room(known: list[bytes], context: int, most: int) -> None:
    assert probes_of(held_out(), known, context, 0, most) == []


def test_equal_seeds_give_equal_probes() -> None:
    one, other = (probes_of(held_out(), [], 300, seed, 1) for seed in (3, 3))
    assert np.array_equal(one[0].found, other[0].found)
    assert np.array_equal(one[0].absent, other[0].absent)
