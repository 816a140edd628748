"""Traffic of caches on token ids."""

from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.data.samples.grams import GramRule
from bytescale_ext.states.cache import CacheSettings
from bytescale_ext.states.traffic import CacheTraffic, measure_traffic, step_rows

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
    assert traffic.hit_rate == traffic.saved == 0


def test_one_worker_with_room_for_all_fetches_each_row_once() -> None:
    steps = list(step_rows(RULE, iter(documents([600])), 1, 50))
    touched = len(np.unique(np.concatenate([step[0] for step in steps])))
    exact = measure_traffic(steps, RULE.num_rows, CacheSettings(1000))
    assert exact.num_fetched == touched
    assert exact.num_pushed == exact.num_read
    stale = measure_traffic(steps, RULE.num_rows, CacheSettings(1000, "lru", 0, 10**6))
    assert stale.num_pushed == 0


def test_more_lines_and_more_staleness_save_more() -> None:
    steps = list(step_rows(RULE, iter(documents([4000])), 4, 100))
    saved = [
        measure_traffic(steps, RULE.num_rows, CacheSettings(lines, "lru", bound, bound)).saved
        for lines, bound in ((20, 0), (20, 5), (200, 5), (200, 20))
    ]
    assert saved == sorted(saved)
    assert saved[0] < 0.1
    assert saved[-1] > 0.5


@pytest.mark.parametrize("policy", ["lfu", "lfuopt"])
def test_policies_that_count_uses_keep_what_is_used_often(policy: str) -> None:
    often, once = np.arange(10), np.arange(10, 1000)
    steps = [[np.concatenate([often, once[20 * number : 20 * number + 20]])] for number in range(40)]
    lru, other = (measure_traffic(steps, 1000, CacheSettings(12, one)) for one in ("lru", policy))
    assert lru.num_read == other.num_read == 40 * 30
    assert other.num_fetched <= lru.num_fetched
    assert other.hit_rate == pytest.approx(39 * 10 / (40 * 30))


def test_steps_need_not_end_with_a_document() -> None:
    some = documents([7, 7, 7])
    assert [len(step) for step in step_rows(RULE, iter(some), 3, 2)] == [3, 3, 3]
    assert list(step_rows(RULE, iter(some), 3, 8)) == []


@pytest.mark.parametrize(("bound", "num_fetched"), [(0, 80), (3, 32), (4, 16)])
def test_copies_lack_the_updates_of_other_workers(bound: int, num_fetched: int) -> None:
    rows = np.arange(8)
    traffic = measure_traffic([[rows, rows]] * 5, 8, CacheSettings(8, "lru", bound, 0))
    assert traffic.num_pushed == traffic.num_read == 80
    assert traffic.num_fetched == num_fetched


def test_bytes_of_a_step() -> None:
    traffic = CacheTraffic(num_steps=2, num_read=10, num_fetched=4, num_pushed=6)
    assert traffic.hit_rate == pytest.approx(0.6)
    assert traffic.saved == pytest.approx(0.5)
    assert traffic.step_bytes(3) == (10 * 4 * 4 + 16 * 16) / 2


def test_rows_of_the_next_step_come_ahead() -> None:
    """Rows that all steps read are copies after the first; those that change meanwhile are fetched again."""
    steps = [[np.array([0, step, 10 + step])] for step in range(1, 6)]
    alone = measure_traffic(steps, 20, CacheSettings(20), ahead=True)
    assert (alone.num_fetched, alone.num_staged) == (11, 8)  # all but the first three rows, and row 0 is a copy
    assert alone.waited == pytest.approx(3 / 15)
    both = measure_traffic([[one[0], one[0] + 1] for one in steps], 20, CacheSettings(0), ahead=True)
    assert both.num_fetched > both.num_read == 30
    assert both.num_staged > both.num_fetched - both.num_read
