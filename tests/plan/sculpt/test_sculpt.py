"""Windows pass the check in every mode, are related, and depend only on the seed."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.plan.sculpt.baselines import concatenated
from bytescale_ext.plan.sculpt.check import check_windows
from bytescale_ext.plan.sculpt.clusters import ClusterSettings
from bytescale_ext.plan.sculpt.pieces import OVERFLOWS
from bytescale_ext.plan.sculpt.quality import quality_of
from bytescale_ext.plan.sculpt.sculpt import SculptSettings, sculpt
from tests.plan.sculpt.topics import CONTEXT, corpus, pieces_of
from tests.sample import seeds


@pytest.mark.slow
@pytest.mark.parametrize("overflow", OVERFLOWS)
def test_windows_keep_every_law(overflow: str) -> None:
    pieces, lengths, _ = corpus()
    made = sculpt(pieces, SculptSettings(CONTEXT, overflow))
    check_windows(made.table, lengths, CONTEXT, overflow)
    assert len(made.cluster) == len(pieces)


@pytest.mark.slow
def test_each_mode_does_what_it_says() -> None:
    pieces, *_ = corpus()
    quality = {
        overflow: quality_of(sculpt(pieces, SculptSettings(CONTEXT, overflow)).table, pieces, CONTEXT)
        for overflow in OVERFLOWS
    }
    assert quality["none"].cut == 0
    assert quality["none"].tokens_kept == quality["split"].tokens_kept == 1
    assert 0.8 < quality["truncate"].tokens_kept < 1
    assert quality["split"].cut > 0
    assert all(one.fill > 0.9 for one in quality.values())


@pytest.mark.slow
def test_windows_are_more_related_than_concatenated_ones() -> None:
    pieces, *_ = corpus(800)
    ours = quality_of(sculpt(pieces, SculptSettings(CONTEXT)).table, pieces, CONTEXT)
    theirs = quality_of(concatenated(pieces, CONTEXT, 1), pieces, CONTEXT)
    assert ours.relevance > 2 * theirs.relevance
    assert ours.relevance > 2 * ours.random_relevance


@pytest.mark.slow
def test_equal_seeds_give_equal_windows() -> None:
    pieces, *_ = corpus()
    once, again, other = (sculpt(pieces, SculptSettings(CONTEXT, seed=seed)).table for seed in (7, 7, 8))
    assert np.array_equal(once, again)
    assert not np.array_equal(once, other)


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("lengths", [[1], [100], [101], [1000], [3, 0, 4], [99, 99, 99], [250, 1]])
def test_small_corpora(lengths: list[int], overflow: str) -> None:
    pieces = pieces_of(lengths, list(range(len(lengths))))
    made = sculpt(pieces, SculptSettings(CONTEXT, overflow))
    check_windows(made.table, np.array(lengths), CONTEXT, overflow)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(4))
def test_many_kinds_of_clusters(seed: int) -> None:
    pieces, lengths, _ = corpus(200, num_topics=1 + 3 * seed)
    settings = ClusterSettings(windows=[0.1, 1, 3, 100][seed], percentile=[0, 5, 20, 50][seed])
    for overflow in OVERFLOWS:
        made = sculpt(pieces, SculptSettings(CONTEXT, overflow, seed, settings))
        check_windows(made.table, lengths, CONTEXT, overflow)


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="a context of 0 tokens: give 1 or more"):
        SculptSettings(0)
    with pytest.raises(ValueError, match="overflow 'cut' is unknown: give none, truncate, split"):
        SculptSettings(8, "cut")
