"""A table distributed over ranks has the values and updates of a single table."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist

from bytescale_ext.states.cache import CacheSettings, RowCache
from bytescale_ext.states.rows import RowTable
from bytescale_ext.states.sharded import ShardedRows
from tests.harness import run_ranks
from tests.states.test_cache import DIM, NUM_ROWS, RATE, WORKERS, batches

pytestmark = pytest.mark.ranks

STALE = CacheSettings(6, "lfu", 2, 3)


def train(
    rank: int, world: int, options: CacheSettings, num_steps: int, ahead: bool
) -> tuple[list[np.ndarray], np.ndarray, int]:
    """Return the values that this rank reads in each step, its own rows, and the number of fetched rows."""
    group = dist.group.WORLD
    assert group is not None
    own = -(-NUM_ROWS // world)
    table = ShardedRows(RowTable.random(range(rank * own, (rank + 1) * own), DIM, 1.0, 0), group)
    cache, read = RowCache(options, NUM_ROWS, DIM), []
    other = dist.new_group(backend="gloo")
    steps = [step[rank] for step in batches(7, num_steps)]
    for (rows, gradients), (next_rows, _) in zip(steps, [*steps[1:], steps[0]], strict=True):
        read.append(cache.lookup(rows, table, RATE))
        if ahead:
            cache.stage(next_rows, replace(table, group=other))
        table.apply(cache.update(rows, gradients, RATE), RATE)
    table.apply(cache.flush(RATE), RATE)
    return read, table.shard.values, cache.traffic.num_fetched


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        pytest.param(CacheSettings(0), False, marks=pytest.mark.full),
        (CacheSettings(12, "lfuopt"), True),
        pytest.param(STALE, False, marks=pytest.mark.full),
        pytest.param(STALE, True, marks=pytest.mark.full),
    ],
    ids=["none", "exact", "stale", "ahead"],
)
def test_four_ranks_as_four_workers_of_one_table(options: CacheSettings, ahead: bool) -> None:
    found = run_ranks(train, WORKERS, options, 12, ahead)
    table = RowTable.random(range(NUM_ROWS), DIM, 1.0, 0)
    caches = [RowCache(options, NUM_ROWS, DIM) for _ in range(WORKERS)]
    steps = list(batches(7, 12))
    for number, step in enumerate(steps):
        for rank, (cache, (rows, _)) in enumerate(zip(caches, step, strict=True)):
            assert (cache.lookup(rows, table, RATE) == found[rank][0][number]).all()
        if ahead:
            for cache, (rows, _) in zip(caches, steps[(number + 1) % len(steps)], strict=True):
                cache.stage(rows, table)
        table.apply([cache.update(*given, RATE) for cache, given in zip(caches, step, strict=True)], RATE)
    table.apply([cache.flush(RATE) for cache in caches], RATE)
    whole = np.concatenate([values for _, values, _ in found])
    assert len(whole) == 32  # the last two belong to no rank
    assert (whole[:NUM_ROWS] == table.values).all()
    assert [fetched for *_, fetched in found] == [cache.traffic.num_fetched for cache in caches]
