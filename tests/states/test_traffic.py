"""Traffic of caches on token ids."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.data.samples.grams import GramRule
from bytescale_ext.states.cache import CacheSettings
from bytescale_ext.states.traffic import measure_traffic, step_rows

RULE = GramRule((2,), 1, 1000)


def documents(lengths: list[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [np.minimum(rng.zipf(1.2, length), 50) for length in lengths]


def test_steps_are_packs_of_documents_in_order() -> None:
    some = documents([5, 30, 1, 20, 9])
    steps = list(step_rows(RULE, iter(some), 2, 10))
    whole = np.concatenate([RULE.rows_of(one) for one in some])[:60].reshape(3, 2, 10)
    assert len(steps) == 3
    for step, expected in zip(steps, whole, strict=True):
        assert [one.tolist() for one in step] == [np.unique(one).tolist() for one in expected]


def test_without_a_cache_every_row_moves_twice() -> None:
    steps = list(step_rows(RULE, iter(documents([400])), 2, 50))
    traffic = measure_traffic(steps, RULE.num_rows, CacheSettings(0))
    assert traffic.num_steps == 4
    assert traffic.num_read == sum(len(rows) for step in steps for rows in step)
    assert traffic.num_fetched == traffic.num_pushed == traffic.num_read
    assert traffic.hit_rate == traffic.saving == 0


@pytest.mark.parametrize("policy", ["lfu", "lfuopt"])
def test_policies_that_count_uses_keep_what_is_used_often(policy: str) -> None:
    often, once = np.arange(10), np.arange(10, 1000)
    steps = [[np.concatenate([often, once[20 * number : 20 * number + 20]])] for number in range(40)]
    lru, other = (measure_traffic(steps, 1000, CacheSettings(12, one)) for one in ("lru", policy))
    assert lru.num_read == other.num_read == 40 * 30
    assert other.num_fetched <= lru.num_fetched
    assert other.hit_rate == pytest.approx(39 * 10 / (40 * 30))


@pytest.mark.parametrize(("bound", "num_fetched"), [(0, 80), (3, 32), (4, 16)])
def test_copies_lack_the_updates_of_other_workers(bound: int, num_fetched: int) -> None:
    rows = np.arange(8)
    traffic = measure_traffic([[rows, rows]] * 5, 8, CacheSettings(8, "lru", bound, 0))
    assert traffic.num_pushed == traffic.num_read == 80
    assert traffic.num_fetched == num_fetched


def test_rows_of_the_next_step_come_ahead() -> None:
    """Rows that all steps read are cached after the first step. Rows that have changed are fetched again."""
    steps = [[np.array([0, step, 10 + step])] for step in range(1, 6)]
    alone = measure_traffic(steps, 20, CacheSettings(20), ahead=True)
    assert (alone.num_fetched, alone.num_staged) == (11, 8)  # all except the first three rows, and row 0 is cached
    assert alone.wait_rate == pytest.approx(3 / 15)
    both = measure_traffic([[one[0], one[0] + 1] for one in steps], 20, CacheSettings(0), ahead=True)
    assert both.num_fetched > both.num_read == 30
    assert both.num_staged > both.num_fetched - both.num_read
