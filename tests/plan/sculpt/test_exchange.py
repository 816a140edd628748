"""Exchanges make windows more related, keep their rules, and separate topics almost as well as any packing could."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.data.corpus.embed import reduced, word_counts
from bytescale_ext.plan.sculpt import exchange
from bytescale_ext.plan.sculpt.check import check_windows
from bytescale_ext.plan.sculpt.exchange import exchanged
from bytescale_ext.plan.sculpt.pieces import Pieces
from bytescale_ext.plan.sculpt.quality import quality_of
from bytescale_ext.plan.sculpt.sculpt import SculptSettings, sculpt
from tests.plan.sculpt.topics import unit
from tests.sample import sampled, seeds

EAST, NORTH = (1.0, 0.0), (0.0, 1.0)
LETTERS = {"spaces": range(0x61, 0x7B), "Chinese": range(0x4E00, 0x5400), "Thai": range(0x0E01, 0x0E2F)}
NUM_TOPICS, WINDOW = 12, 8192


def better(window: list[int], lengths: list[int], vectors: list[tuple[float, float]]) -> list[int]:
    return exchanged(np.array(window), np.array(lengths), np.array(vectors, dtype=np.float32), 10).tolist()


def test_parts_of_equal_length_change_places() -> None:
    assert better([0, 0, 1, 1], [5, 5, 5, 5], [EAST, NORTH, NORTH, EAST]) in ([0, 1, 1, 0], [1, 0, 0, 1])


def test_a_part_moves_to_a_window_with_room() -> None:
    assert better([0, 0, 1, 1], [4, 3, 2, 2], [EAST, NORTH, NORTH, NORTH]) == [0, 1, 1, 1]


def test_no_window_becomes_too_long() -> None:
    assert better([0, 0, 1, 1], [6, 4, 5, 5], [EAST, NORTH, NORTH, EAST]) == [0, 0, 1, 1]


def test_a_lonely_part_stays() -> None:
    assert better([0, 1], [2, 2], [EAST, EAST]) == [0, 1]
    assert better([0], [2], [EAST]) == [0]


def test_parts_without_words_change_nothing() -> None:
    assert better([0, 0, 1, 1], [5, 5, 5, 5], [(0.0, 0.0)] * 4) == [0, 0, 1, 1]


def related(window: np.ndarray, vectors: np.ndarray) -> float:
    """Return the sum of lengths that exchanges raise."""
    return sum(float(np.linalg.norm(vectors[window == number].sum(axis=0))) for number in range(window.max() + 1))


@pytest.mark.parametrize("seed", seeds(40))
def test_random_windows_get_better_and_stay_valid(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_BLOCK", 7)
    random = np.random.RandomState(seed)
    num_windows, size = random.randint(1, 12), random.randint(1, 9)
    window = np.repeat(np.arange(num_windows), size)
    lengths = random.randint(1, 100 // size + 1, len(window))
    vectors = unit(random.standard_normal((len(window), 4))) * random.randint(0, 6, (len(window), 1)).clip(0, 1)
    vectors = vectors.astype(np.float32)
    made = exchanged(window, lengths, vectors, 100)
    assert np.bincount(made, weights=lengths).max() <= 100
    assert len(np.unique(made)) == num_windows
    assert related(made, vectors) >= related(window, vectors) - 1e-3
    assert np.array_equal(made, exchanged(window, lengths, vectors, 100))


def topic_texts(letters: range, seed: int) -> tuple[list[str], np.ndarray]:
    """Return texts of 100 to 320 words, half of them words of their topic, and the topic of each text."""
    random, blank = np.random.RandomState(seed), " " if letters is LETTERS["spaces"] else ""
    longest = 7 if blank else 4 if letters is LETTERS["Thai"] else 2
    sizes = random.randint(min(longest, 3), longest + 1, 400 + 60 * NUM_TOPICS)
    words = np.array(["".join(map(chr, random.choice(letters, size))) for size in sizes])
    topics = random.randint(0, NUM_TOPICS, 240)
    made = []
    for topic in topics.tolist():
        count = random.randint(100, 320)
        own = 400 + 60 * topic + random.randint(0, 60, count)
        made.append(blank.join(words[np.where(random.rand(count) < 0.5, own, random.randint(0, 400, count))]))
    return made, topics


def purity(window: np.ndarray, topics: np.ndarray) -> float:
    """Return the share of documents that have the most frequent topic of their window."""
    return sum(np.bincount(topics[window == number]).max() for number in range(window.max() + 1)) / len(topics)


def best_purity(lengths: np.ndarray, topics: np.ndarray, num_windows: int) -> float:
    """Return a bound of the purity: what windows could reach if only the tokens of their own topic counted.

    A topic with m windows places at most as many documents as fit in them, the shortest first. Each further
    window of a topic places fewer of them, so the best numbers of windows take the largest steps of all topics.
    """
    steps: list[int] = []
    for topic in np.unique(topics):
        ends = np.cumsum(np.sort(lengths[topics == topic]))
        most = -(-int(ends[-1]) // WINDOW)
        places = np.searchsorted(ends, WINDOW * np.arange(most + 1), side="right")
        steps += np.diff(places).tolist()
    return sum(sorted(steps, reverse=True)[:num_windows]) / len(topics)


def test_best_purity_of_topics_that_share_a_window() -> None:
    assert best_purity(np.full(4, WINDOW // 2), np.array([0, 0, 0, 1]), 2) == 0.75
    assert best_purity(np.full(4, WINDOW // 2), np.array([0, 0, 0, 1]), 3) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "seed"),
    sampled([(script, seed) for script in LETTERS for seed in range(8)], [("spaces", 0), ("Chinese", 0)]),
)
def test_windows_have_one_topic_with_and_without_spaces(
    script: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, topics = topic_texts(LETTERS[script], seed)
    lengths = np.array([len(text.encode()) + 1 for text in texts])
    pieces = Pieces(np.arange(240), np.zeros(240, np.int64), lengths, reduced(word_counts(texts), 1))
    table = sculpt(pieces, SculptSettings(WINDOW)).table
    check_windows(table, lengths, WINDOW, "none")
    made, bound = quality_of(table, pieces, WINDOW), best_purity(lengths, topics, int(table["window"][-1]) + 1)
    window = table["window"][np.argsort(table["document"])]
    monkeypatch.setattr(exchange, "_MOST_ROUNDS", 0)
    without = quality_of(sculpt(pieces, SculptSettings(WINDOW)).table, pieces, WINDOW)
    assert made.fill == without.fill
    assert made.relevance > without.relevance
    assert 0.9 <= purity(window, topics) <= bound


def test_parts_that_fill_a_window_ask_for_no_comparison() -> None:
    """Comparing them with all windows would take minutes."""
    window = np.arange(60_000)
    vectors = unit(np.random.RandomState(0).randn(len(window), 2))
    assert (exchanged(window, np.full(len(window), 10), vectors, 10) == window).all()
