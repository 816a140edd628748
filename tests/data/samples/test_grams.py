"""Rows of n-grams: their inputs, and equal rows in ring shards, slices and whole documents."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.data.samples.grams import GramRule
from bytescale_ext.data.samples.packed import pack_micro_batch, with_gram_rows
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from tests.data.sources import MemorySource

RULE = GramRule((2, 3), 2, 1 << 40, seed=5)  # enough rows that no two hashes are equal by chance


def tokens_of(length: int, vocab: int = 7) -> np.ndarray:
    return np.random.default_rng(length).integers(0, vocab, length)


def test_equal_grams_have_equal_rows_and_different_ones_do_not() -> None:
    tokens = tokens_of(3000)
    rows = RULE.rows_of(tokens)
    assert rows.shape == (3000, RULE.num_columns) == (3000, 4)
    for column, order in enumerate((2, 2, 3, 3)):
        grams = [tuple(tokens[end - order + 1 : end + 1]) for end in range(order - 1, 3000)]
        by_gram = dict(zip(grams, rows[order - 1 :, column].tolist(), strict=True))
        assert [by_gram[gram] for gram in grams] == rows[order - 1 :, column].tolist()
        assert len(set(by_gram.values())) == len(by_gram) > 40
    assert len(np.unique(rows)) == sum(len(np.unique(rows[:, column])) for column in range(4))


def test_the_first_tokens_of_a_document_have_rows_of_their_own() -> None:
    first, second = RULE.rows_of(np.array([4, 4, 4, 4])), RULE.rows_of(np.array([4]))
    assert first[0].tolist() == second[0].tolist()
    assert len(np.unique(first[:3, 2])) == 3
    assert first[3].tolist() == first[2].tolist()
    assert len(np.unique(first[:2, 0])) == 2


def test_rows_spread_evenly_over_the_table_and_change_with_the_seed() -> None:
    tokens = np.arange(20_000)
    rows = GramRule((1,), 1, 10).rows_of(tokens)[:, 0]
    assert np.bincount(rows, minlength=10) == pytest.approx(np.full(10, 2000), rel=0.1)
    others = GramRule((1,), 1, 10, seed=1).rows_of(tokens)[:, 0]
    assert np.mean(rows == others) == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("start", [0, 1, 2, 3, 7])
def test_a_part_of_a_document_has_the_rows_that_it_has_in_the_whole(start: int) -> None:
    tokens = tokens_of(12)
    whole = RULE.rows_of(tokens)
    for read_before in range(min(start, RULE.num_before), start + 1):
        part = RULE.rows_of(tokens[start - read_before :], read_before)
        assert part.tolist() == whole[start:].tolist()


def test_ring_shards_packs_and_slices_read_only_what_is_missing() -> None:
    source = MemorySource([40, 9, 1])
    front, back = zigzag_ranges(40, 2, 1)
    shards = (Shard(0, (front, back), (0, 1)), Shard(1, ((4, 9),), (0,)), Shard(2, ((0, 1),), (0,)))
    micro_batch = MicroBatch(shards)
    ranges = [(shard.seq, *one) for shard in shards for one in shard.ranges]
    packed = pack_micro_batch(micro_batch, source, (0, 1, 2), 5, (40, 9, 1))
    source.reads.clear()
    found = with_gram_rows(packed, RULE, source, (0, 1, 2)).gram_rows
    assert found is not None
    expected = [RULE.rows_of(source.documents[seq])[start:stop] for seq, start, stop in ranges]
    assert found[:26].tolist() == np.concatenate(expected).tolist()
    assert found.shape == (30, 4)
    assert not found[26:].any()
    assert source.reads == [(seq, max(0, start - 2), start) for seq, start, _ in ranges]
