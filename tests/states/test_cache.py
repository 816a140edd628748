"""Caches of four workers over one table: clocks, bounds, evictions, and exact training without staleness."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.states.cache import PERMANENT_USES, POLICIES, CacheSettings, RowCache
from bytescale_ext.states.rows import Answer, Push, RowTable, as_steps
from tests.states.plain_cache import PlainCache

NUM_ROWS, DIM, WORKERS, RATE = 30, 3, 4, 0.1


def batches(seed: int, num_steps: int, most: int = 12) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    """Yield for each step the rows [n] and gradients [n, dim] of each worker; low rows are used more often."""
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        sizes = rng.integers(0, most, WORKERS)
        rows = [np.unique(np.minimum(rng.zipf(1.3, size) - 1, NUM_ROWS - 1)) for size in sizes]
        yield [(one, rng.standard_normal((len(one), DIM)).astype(np.float32)) for one in rows]


class CheckedTable(RowTable):
    """A table that checks the clock of every row that a worker reads."""

    def answer(self, rows: np.ndarray, versions: np.ndarray, read_bound: int) -> Answer:
        answer = super().answer(rows, versions, read_bound)
        used = versions.copy()
        used[answer.asked] = answer.versions
        assert (used >= 0).all()
        assert (self.versions[rows] - used <= read_bound).all()
        return answer


def drawn() -> RowTable:
    table = RowTable.drawn(range(NUM_ROWS), DIM, 1.0, 0)
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
    """Return the updates [rows] that wait in a cache."""
    waiting = np.zeros(NUM_ROWS, np.int64)
    waiting[cache.row[cache.row >= 0]] = cache.updates[cache.row >= 0]
    return waiting


def check_lines(cache: RowCache) -> None:
    """Check that lines and rows name each other."""
    used = np.flatnonzero(cache.row >= 0)
    assert (cache.slot_of[cache.row[used]] == used).all()
    assert (cache.slot_of >= 0).sum() == len(used)
    assert not cache.pending[cache.updates == 0].any()


@settings(max_examples=40)
@given(
    st.integers(0, 40), st.sampled_from(POLICIES), st.integers(0, 8), st.integers(0, 5), st.integers(0, 10**6),
    st.booleans(),
)  # fmt: skip
def test_invariants(num_lines: int, policy: str, read_bound: int, write_bound: int, seed: int, ahead: bool) -> None:
    run(CacheSettings(num_lines, policy, read_bound, write_bound), seed, num_steps=15, ahead=ahead)


@settings(max_examples=30)
@given(st.integers(0, 20), st.sampled_from(POLICIES), st.integers(0, 9), st.integers(0, 10**6), st.booleans())
def test_a_worker_alone_reads_all_its_updates_however_stale_it_may_be(
    num_lines: int, policy: str, write_bound: int, seed: int, flushes: bool
) -> None:
    cache, table = RowCache(CacheSettings(num_lines, policy, 100, write_bound), NUM_ROWS, DIM), drawn()
    steps = [step[0] for step in batches(seed, 15)]
    for (rows, gradients), (next_rows, _) in itertools.pairwise(steps):
        expected, slots = table.values[rows], cache.slot_of[rows]
        held, squares = slots >= 0, table.squares[rows]
        waiting = (of[slots[held]] for of in (cache.pending, cache.updates))
        expected[held] -= np.float32(RATE) * as_steps(*waiting, squares[held], cache.added[slots[held]])
        assert (cache.lookup(rows, table, RATE) == expected).all()
        cache.stage(next_rows, table)
        table.apply([cache.update(rows, gradients, RATE)], RATE)
        if flushes:
            table.apply([cache.flush(RATE)], RATE)


@settings(max_examples=30)
@given(st.integers(0, 20), st.sampled_from(POLICIES), st.integers(1, 9), st.integers(0, 10**6))
def test_a_worker_alone_trains_the_same_whether_its_updates_wait_or_not(
    num_lines: int, policy: str, write_bound: int, seed: int
) -> None:
    tables = [drawn(), drawn()]
    caches = [RowCache(CacheSettings(num_lines, policy, 0, bound), NUM_ROWS, DIM) for bound in (0, write_bound)]
    for step in batches(seed, 30):
        rows, gradients = step[0]
        read = [cache.lookup(rows, table, RATE) for cache, table in zip(caches, tables, strict=True)]
        assert read[1] == pytest.approx(read[0], rel=1e-4, abs=1e-5)
        for cache, table in zip(caches, tables, strict=True):
            table.apply([cache.update(rows, gradients, RATE)], RATE)
    tables[1].apply([caches[1].flush(RATE)], RATE)
    assert tables[1].values == pytest.approx(tables[0].values, rel=1e-4, abs=1e-5)
    assert tables[1].squares == pytest.approx(tables[0].squares, rel=1e-4)


@pytest.mark.parametrize("bound", [0, 10])
def test_staged_rows_come_before_the_batch_that_reads_them(bound: int) -> None:
    expected, read, without = run(CacheSettings(12, "lru", bound, 0), seed=4)
    table, found, caches = run(CacheSettings(12, "lru", bound, 0), seed=4, ahead=True)
    staged = sum(cache.traffic.num_staged for cache in caches)
    at_lookup = sum(cache.traffic.num_fetched for cache in caches) - staged
    assert 0 < at_lookup < sum(cache.traffic.num_fetched for cache in without)
    if not bound:
        assert all((one == other).all() for one, other in zip(found, read, strict=True))
        assert (table.values == expected.values).all()


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
    """Let lines that a policy ranks alike go in the order of their rows, as in ``PlainCache``."""
    priority = cache._priority
    cache._priority = lambda slots: priority(slots) * NUM_ROWS + cache.row[slots]  # type: ignore[method-assign]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_lines", [0, 1, 5, 12, 40])
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
    values, squares = RowTable.drawn(range(NUM_ROWS), DIM, 1.0, 0).values.astype(np.float64), np.zeros(NUM_ROWS)
    for step in batches(2, 40):
        total = np.zeros((NUM_ROWS, DIM))
        for rows, gradients in step:
            total[rows] += gradients
        squares += (total**2).mean(axis=1)
        values -= RATE * total / np.maximum(np.sqrt(squares), 1e-10)[:, None]
    assert table.values == pytest.approx(values, abs=1e-5)


def test_staleness_sends_less_and_stays_close() -> None:
    exact, _, caches = run(CacheSettings(30), seed=3, num_steps=100)
    stale, _, with_bounds = run(CacheSettings(30, "lru", 10, 10), seed=3, num_steps=100)
    rows = [sum(one.traffic.num_fetched + one.traffic.num_pushed for one in some) for some in (caches, with_bounds)]
    assert rows[1] < 0.4 * rows[0]
    assert 0 < np.abs(stale.values - exact.values).max() < 2.0


def test_a_worker_reads_its_own_updates_at_once() -> None:
    table = drawn()
    cache, rows = RowCache(CacheSettings(2, "lru", 100, 100), NUM_ROWS, DIM), np.array([7])
    before = cache.lookup(rows, table, RATE)
    push = cache.update(rows, np.ones((1, DIM), np.float32), RATE)
    assert len(push.rows) == 0
    after = cache.lookup(rows, table, RATE)
    assert (after < before).all()
    table.apply([cache.flush(RATE)], RATE)
    assert (table.values[rows] == after).all()
    assert (cache.lookup(rows, table, RATE) == after).all()
    assert cache.traffic.num_fetched == 1


def test_a_copy_that_is_fetched_again_keeps_what_waits_in_it() -> None:
    table, rows = drawn(), np.array([7])
    cache, other = (RowCache(CacheSettings(2, "lru", 0, 100), NUM_ROWS, DIM) for _ in range(2))
    ones = np.ones((1, DIM), np.float32)
    for one in (cache, other):
        one.lookup(rows, table, RATE)
        one.update(rows, ones, RATE)
    table.apply([other.flush(RATE)], RATE)
    read = cache.lookup(rows, table, RATE)
    assert (read < table.values[rows]).all()
    assert cache.traffic.num_fetched == 2
    table.apply([cache.flush(RATE)], RATE)
    assert (read == table.values[rows]).all()
    assert table.squares[7] == 2
    assert table.versions[7] == 2


def test_waiting_updates_are_applied_at_the_rate_of_their_push() -> None:
    table, rows = drawn(), np.array([7])
    cache, before = RowCache(CacheSettings(1, "lru", 0, 1), NUM_ROWS, DIM), table.values[7].copy()
    for rate in (0.1, 0.3):
        cache.lookup(rows, table, rate)
        push = cache.update(rows, np.ones((1, DIM), np.float32), rate)
    assert push.updates.tolist() == [2]
    table.apply([push], 0.3)
    assert table.values[7] == pytest.approx(before - 0.3 * (1 + 1 / 2**0.5))  # the second over the root of both


def test_an_evicted_line_takes_its_updates_along() -> None:
    table = drawn()
    cache = RowCache(CacheSettings(1, "lru", 0, 100), NUM_ROWS, DIM)
    for row in (3, 4):
        cache.lookup(np.array([row]), table, RATE)
        push = cache.update(np.array([row]), np.full((1, DIM), row, np.float32), RATE)
    assert push.rows.tolist() == [3]
    assert (push.gradients == 3).all()
    assert cache.flush(RATE).rows.tolist() == [4]


def lines_after(policy: str, uses: list[list[int]], num_lines: int) -> list[int]:
    """Return the rows that a cache holds after batches of these rows."""
    table, cache = drawn(), RowCache(CacheSettings(num_lines, policy), NUM_ROWS, DIM)
    for rows in uses:
        cache.lookup(np.array(rows), table, RATE)
        table.apply([cache.update(np.array(rows), np.zeros((len(rows), DIM), np.float32), RATE)], RATE)
    return sorted(cache.row.tolist())


def test_policies() -> None:
    uses = [[1], [1], [2], [3]]
    assert lines_after("lru", uses, 2) == [2, 3]
    assert lines_after("lfu", uses, 2) == [1, 3]
    often = [[1]] * PERMANENT_USES + [[2]] * (2 * PERMANENT_USES)
    assert lines_after("lfu", [*often, [3], [4]], 2) == [2, 4]  # 1 is used less often than 2
    assert lines_after("lfuopt", [*often, [3], [4]], 2) == [1, 2]  # both stay for good, so 3 and 4 get no line
    assert lines_after("lfuopt", [[1]] * (PERMANENT_USES - 1) + [[2]] * 12 + [[3]], 2) == [2, 3]


def test_rows_of_one_batch_do_not_displace_each_other() -> None:
    assert lines_after("lru", [[1, 2], [2, 3, 4, 5]], 3) == [2, 3, 4]


def test_a_push_names_each_row_once_even_where_rows_have_no_line() -> None:
    cache = RowCache(CacheSettings(2), NUM_ROWS, DIM)
    rows = np.arange(6)
    cache.lookup(rows, drawn(), RATE)
    push: Push = cache.update(rows, np.ones((6, DIM), np.float32), RATE)
    assert sorted(push.rows.tolist()) == rows.tolist()
    assert push.updates.tolist() == [1] * 6
