from __future__ import annotations

from itertools import repeat

import numpy as np

from scripts.bench.states.ngram import documents, least_share, measure, text_of


def test_words_are_numbered_as_they_come() -> None:
    found = list(documents(iter([b"if a:\n  b", b"", b"b a", b"too late"]), 9))
    assert [one.tolist() for one in found] == [[0, 1, 2, 3, 4, 5], [5, 1, 2]]


def test_figures_of_a_text_that_repeats() -> None:
    text = b" ".join(b"%d" % (number % 97) for number in range(1, 700))
    figures = measure(repeat(text), 4 * 4096 * 4)
    assert figures["steps"] == 4
    words = sum(len(one) for one in documents(repeat(text), 4 * 4096 * 4))
    assert words // (4 * 4096) == figures["steps"]
    assert isinstance(figures["rows_touched"], int)
    assert 97 <= figures["rows_touched"] <= 2 * 700  # numbers, spaces and where a text begins
    assert figures["least_share"] == {5: None, 10: None, 100: None}
    saved = figures["saved"]
    assert isinstance(saved, dict)
    assert saved["lru 0.5 0"] <= saved["lru 0.5 10"]
    lines = text_of(figures).splitlines()
    assert len(lines) == 3 + 12 + 1
    assert lines[3].startswith("| lru | 5% | ")


def test_the_least_cache() -> None:
    steps = [[np.arange(100)]] * 40
    assert least_share(steps, 100, "lru", 100) == 0.9  # 90 rows of 100 in 40 batches are fetched once and never pushed
    assert least_share(steps, 100, "lru", 0) is None
