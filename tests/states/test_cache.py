"""Caches of four workers over one table: clocks, bounds, evictions, and exact training without staleness."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.states.cache import POLICIES, CacheSettings, RowCache
from bytescale_ext.states.rows import Answer, RowTable, as_steps
from tests.sample import sampled
from tests.states.plain_cache import PlainCache

NUM_ROWS, DIM, WORKERS, RATE = 30, 3, 4, 0.1


def batches(seed: int, num_steps: int, most: int = 12) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    """Yield the rows [n] and gradients [n, dim] of each worker in each step. Low rows are used more often."""
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        sizes = rng.integers(0, most, WORKERS)
        rows = [np.unique(np.minimum(rng.zipf(1.3, size) - 1, NUM_ROWS - 1)) for size in sizes]
        yield [(one, rng.standard_normal((len(one), DIM)).astype(np.float32)) for one in rows]


class CheckedTable(RowTable):
    """Table that checks the clock of every row that a worker reads."""

    def answer(self, rows: np.ndarray, versions: np.ndarray, read_bound: int) -> Answer:
        answer = super().answer(rows, versions, read_bound)
        used = versions.copy()
        used[answer.asked] = answer.versions
        assert (used >= 0).all()
        assert (self.versions[rows] - used <= read_bound).all()
        return answer


def drawn() -> RowTable:
    table = RowTable.random(range(NUM_ROWS), DIM, 1.0, 0)
    return CheckedTable(table.values, table.squares, table.versions)


def run(
    options: CacheSettings, seed: int, num_steps: int = 40, ahead: bool = False
) -> tuple[RowTable, list[np.ndarray], list[RowCache]]:
    """Train, check the invariants in each step, flush; return the table, the values read and the caches.

    ``ahead``: the rows of the next step are staged in each step.
    """
    table, read = drawn(), []
    caches = [RowCache(options, NUM_ROWS, DIM) for _ in range(WORKERS)]
    made = np.zeros(NUM_ROWS, np.int64)
    steps = list(batches(seed, num_steps))
    for number, step in enumerate(steps):
        read += [cache.lookup(rows, table, RATE) for cache, (rows, _) in zip(caches, step, strict=True)]
        if ahead and number + 1 < num_steps:
            for cache, (rows, _) in zip(caches, steps[number + 1], strict=True):
                cache.stage(rows, table)
        pushes = [cache.update(*given, RATE) for cache, given in zip(caches, step, strict=True)]
        for rows, _ in step:
            made[rows] += 1
        for push in pushes:
            assert len(np.unique(push.rows)) == len(push.rows)
        table.apply(pushes, RATE)
        for cache in caches:
            check_lines(cache)
            assert (cache.updates <= options.write_bound).all()
        waiting = sum(sent_of(cache) for cache in caches)
        assert (table.versions + waiting == made).all()
    table.apply([cache.flush(RATE) for cache in caches], RATE)
    assert (table.versions == made).all()
    assert not any(cache.updates.any() or cache.pending.any() for cache in caches)
    return table, read, caches


def sent_of(cache: RowCache) -> np.ndarray:
    """Return the number of pending updates of each row in a cache: [rows]."""
    waiting = np.zeros(NUM_ROWS, np.int64)
    waiting[cache.row[cache.row >= 0]] = cache.updates[cache.row >= 0]
    return waiting


def check_lines(cache: RowCache) -> None:
    """Check that lines and rows refer to each other."""
    used = np.flatnonzero(cache.row >= 0)
    assert (cache.line[cache.row[used]] == used).all()
    assert (cache.line >= 0).sum() == len(used)
    assert not cache.pending[cache.updates == 0].any()


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.integers(0, 40), st.sampled_from(POLICIES), st.integers(0, 8), st.integers(0, 5), st.integers(0, 10**6),
    st.booleans(),
)  # fmt: skip
def test_invariants(num_lines: int, policy: str, read_bound: int, write_bound: int, seed: int, ahead: bool) -> None:
    run(CacheSettings(num_lines, policy, read_bound, write_bound), seed, num_steps=15, ahead=ahead)


@settings(max_examples=30)
@given(st.integers(0, 20), st.sampled_from(POLICIES), st.integers(0, 9), st.integers(0, 10**6), st.booleans())
@pytest.mark.slow
def test_a_worker_alone_reads_all_its_updates_however_stale_it_may_be(
    num_lines: int, policy: str, write_bound: int, seed: int, flushes: bool
) -> None:
    cache, table = RowCache(CacheSettings(num_lines, policy, 100, write_bound), NUM_ROWS, DIM), drawn()
    steps = [step[0] for step in batches(seed, 15)]
    for (rows, gradients), (next_rows, _) in itertools.pairwise(steps):
        expected, slots = table.values[rows], cache.line[rows]
        held, squares = slots >= 0, table.squares[rows]
        waiting = (of[slots[held]] for of in (cache.pending, cache.updates))
        expected[held] -= np.float32(RATE) * as_steps(*waiting, squares[held], cache.added[slots[held]])
        assert (cache.lookup(rows, table, RATE) == expected).all()
        cache.stage(next_rows, table)
        table.apply([cache.update(rows, gradients, RATE)], RATE)
        if flushes:
            table.apply([cache.flush(RATE)], RATE)


@pytest.mark.parametrize("bound", [0, 10])
def test_staged_rows_come_before_the_batch_that_reads_them(bound: int) -> None:
    expected, read, without = run(CacheSettings(12, "lru", bound, 0), seed=4)
    table, found, caches = run(CacheSettings(12, "lru", bound, 0), seed=4, ahead=True)
    staged = sum(cache.traffic.num_staged for cache in caches)
    assert all(0 < cache.traffic.num_missed <= cache.traffic.num_read for cache in caches)
    at_lookup = sum(cache.traffic.num_fetched for cache in caches) - staged
    assert 0 < at_lookup < sum(cache.traffic.num_fetched for cache in without)
    if not bound:
        assert all((one == other).all() for one, other in zip(found, read, strict=True))
        assert (table.values == expected.values).all()


@pytest.mark.slow
@settings(max_examples=30)
@given(st.integers(0, 20), st.sampled_from(POLICIES), st.integers(0, 6), st.integers(0, 4), st.integers(0, 10**6))
def test_as_a_cache_written_row_by_row(
    num_lines: int, policy: str, read_bound: int, write_bound: int, seed: int
) -> None:
    options = CacheSettings(num_lines, policy, read_bound, write_bound)
    caches, plain = [RowCache(options, NUM_ROWS, DIM) for _ in range(WORKERS)], [PlainCache(options) for _ in range(4)]
    for cache in caches:
        go_in_order_of_rows(cache)
    table = drawn()
    for step in batches(seed, 12):
        pushes = []
        for cache, other, (rows, _) in zip(caches, plain, step, strict=True):
            values = cache.lookup(rows, table, RATE)
            expected = other.lookup(rows.tolist(), table, RATE)
            assert [expected[row].tolist() for row in rows.tolist()] == values.tolist()
            assert set(cache.row[cache.row >= 0].tolist()) == other.lines.keys()
        for cache, other, given_rows in zip(caches, plain, step, strict=True):
            pushes.append(cache.update(*given_rows, RATE))
            sent = other.update(given_rows[0].tolist(), given_rows[1], RATE)
            assert dict(zip(pushes[-1].rows.tolist(), pushes[-1].updates.tolist(), strict=True)) == {
                row: updates for row, (updates, _) in sent.items()
            }
            assert all(
                (sent[row][1] == gradient).all()
                for row, gradient in zip(pushes[-1].rows.tolist(), pushes[-1].gradients, strict=True)
            )
        table.apply(pushes, RATE)
    for cache, other in zip(caches, plain, strict=True):
        assert (cache.traffic.num_fetched, cache.traffic.num_pushed) == (other.num_fetched, other.num_pushed)


def go_in_order_of_rows(cache: RowCache) -> None:
    """Evict lines with equal rank in the order of their rows, as in ``PlainCache``."""
    priority = cache._priority
    cache._priority = lambda slots: priority(slots) * NUM_ROWS + cache.row[slots]  # type: ignore[method-assign]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_lines", sampled([0, 1, 5, 12, 40], [0, 5, 40]))
def test_without_staleness_training_is_that_without_a_cache(num_lines: int, policy: str) -> None:
    expected, read, _ = run(CacheSettings(0), seed=1)
    table, found, caches = run(CacheSettings(num_lines, policy), seed=1)
    for one, other in zip(found, read, strict=True):
        assert (one == other).all()
    assert (table.values == expected.values).all()
    assert (table.squares == expected.squares).all()
    fetched = sum(cache.traffic.num_fetched for cache in caches)
    total = sum(cache.traffic.num_read for cache in caches)
    assert fetched == total if num_lines == 0 else fetched < total if num_lines > 1 else fetched <= total
    assert sum(cache.traffic.num_pushed for cache in caches) == total


def test_a_run_without_a_cache_is_plain_adagrad() -> None:
    table, _, _ = run(CacheSettings(0), seed=2)
    values, squares = RowTable.random(range(NUM_ROWS), DIM, 1.0, 0).values.astype(np.float64), np.zeros(NUM_ROWS)
    for step in batches(2, 40):
        total = np.zeros((NUM_ROWS, DIM))
        for rows, gradients in step:
            total[rows] += gradients
        squares += (total**2).mean(axis=1)
        values -= RATE * total / np.maximum(np.sqrt(squares), 1e-10)[:, None]
    assert table.values == pytest.approx(values, abs=1e-5)


@pytest.mark.slow
def test_staleness_sends_less_and_stays_close() -> None:
    exact, _, caches = run(CacheSettings(30), seed=3, num_steps=100)
    stale, _, with_bounds = run(CacheSettings(30, "lru", 10, 10), seed=3, num_steps=100)
    rows = [sum(one.traffic.num_fetched + one.traffic.num_pushed for one in some) for some in (caches, with_bounds)]
    assert rows[1] < 0.4 * rows[0]
    assert 0 < np.abs(stale.values - exact.values).max() < 2.0
