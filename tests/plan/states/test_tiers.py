"""Choice of pages on a disk, and their places in its file."""

from __future__ import annotations

import itertools

import pytest

from bytescale_ext.plan.states.pages import StateTensor, lay_out
from bytescale_ext.plan.states.tiers import (
    BLOCK_BYTES,
    NUM_VERSIONS,
    FileLayout,
    least_host_bytes,
    pages_on_disk,
    tiered_host_bytes,
)
from tests.plan.states.tables import random_table
from tests.sample import seeds

TWENTY = lay_out([StateTensor("a", 160, 0, True)], 32)


@pytest.mark.parametrize("seed", seeds(30))
def test_the_fewest_pages_lie_on_the_disk(seed: int) -> None:
    table = random_table(seed)
    for budget in range(0, 2 * table.host_bytes, table.page_bytes):
        chosen = pages_on_disk(table, budget)
        assert chosen <= set(range(len(table.pages)))
        if tiered_host_bytes(table, chosen) > budget:
            assert len(chosen) == len(table.pages)
            assert budget < least_host_bytes(table.page_bytes, table.num_copies > 0)
        assert bool(chosen) == (budget < table.host_bytes)


@pytest.mark.parametrize("num_host_pages", range(1, 16))
def test_they_are_spread_evenly(num_host_pages: int) -> None:
    chosen = sorted(pages_on_disk(TWENTY, least_host_bytes(32, True) + 3 * 32 * num_host_pages))
    assert 20 - len(chosen) == num_host_pages
    distances = {after - before for before, after in itertools.pairwise(chosen)}
    assert max(distances, default=0) - min(distances, default=0) <= 1


def test_nothing_of_a_file_overlaps() -> None:
    layout = FileLayout.of(lay_out([StateTensor("a", 5000, 0, True), StateTensor("b", 1500, 0, False)], BLOCK_BYTES))
    assert (layout.num_pages, layout.num_copies, layout.num_planes, layout.version_pages) == (7, 5, 3, 19)
    places = [
        layout.offset(version, plane, page)
        for version in range(NUM_VERSIONS)
        for plane, count in enumerate((7, 7, 5))
        for page in range(count)
    ]
    begin = NUM_VERSIONS * layout.record_bytes
    assert places == list(range(begin, layout.num_bytes, BLOCK_BYTES))
    assert begin % BLOCK_BYTES == 0
    assert layout.record_bytes >= 64 + 4 * 19
    assert [layout.index(plane, 0) for plane in range(3)] == [0, 7, 14]
