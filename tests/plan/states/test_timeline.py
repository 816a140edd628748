"""Times of moves, by hand, if the processor or the link is the limit."""

from __future__ import annotations

import itertools

import pytest

from bytescale_ext.plan.states.moves import DISK_KINDS, Kind
from bytescale_ext.plan.states.pages import StateTensor, lay_out
from bytescale_ext.plan.states.timeline import ADAM_BYTES, Speeds, optimizer_step_seconds, time_moves
from tests.plan.states.tables import random_table
from tests.sample import seeds

FOUR_PAGES = lay_out([StateTensor("a", 32, 0, True)], 32)
FETCH_BYTES, RETURN_BYTES, UPDATE_BYTES = 8 * 4, 8 * 2, 8 * ADAM_BYTES


def times(kind: Kind, speeds: Speeds) -> list[tuple[float, float]]:
    return [(one.start, one.stop) for one in time_moves(FOUR_PAGES, 2, speeds) if one.move.kind is kind]


def test_copies_hide_behind_a_slow_processor() -> None:
    """A page takes 10 s to update, 1 s to fetch and half a second to return."""
    speeds = Speeds(FETCH_BYTES, UPDATE_BYTES / 10)
    assert times(Kind.UPDATE, speeds) == [(1, 11), (11, 21), (21, 31), (31, 41)]
    assert times(Kind.FETCH, speeds) == [(0, 1), (1, 2), (11, 12), (21, 22)]
    assert optimizer_step_seconds(time_moves(FOUR_PAGES, 2, speeds)) == 41.5


def test_a_slow_link_is_the_limit() -> None:
    """A page takes 1 s to update, 10 s to fetch and 5 s to return: fetches run one after another."""
    speeds = Speeds(FETCH_BYTES / 10, UPDATE_BYTES)
    assert times(Kind.FETCH, speeds) == [(0, 10), (10, 20), (20, 30), (30, 40)]
    assert optimizer_step_seconds(time_moves(FOUR_PAGES, 2, speeds)) == 40 + 1 + 5


def test_float32_parameters_wait_for_their_buffer() -> None:
    """With 1 s to fetch, 1 s to update and half a second to return, the third fetch comes after the first return."""
    table = lay_out([StateTensor("a", 24, 0, False)], 32)
    speeds = Speeds(2 * FETCH_BYTES, UPDATE_BYTES)
    found = [(one.move.kind, one.move.page, one.start) for one in time_moves(table, 4, speeds)]
    assert (Kind.RETURN, 0, 2.0) in found
    assert (Kind.FETCH, 2, 2.5) in found
    assert (Kind.UPDATE, 1, 2.5) in found


@pytest.mark.parametrize("seed", seeds(20))
def test_a_step_takes_at_least_what_each_part_takes(seed: int) -> None:
    table = random_table(seed)
    speeds = Speeds(3.0, 7.0)
    moves = time_moves(table, 2, speeds)
    totals = {kind: sum(one.stop - one.start for one in moves if one.move.kind is kind) for kind in Kind}
    assert max(totals.values()) <= optimizer_step_seconds(moves) <= sum(totals.values()) + 1e-9
    for kind in Kind:
        spans = [(one.start, one.stop) for one in moves if one.move.kind is kind]
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


def test_a_slow_disk_is_the_limit() -> None:
    """Six pages of three planes are on the disk. 96 bytes take 3 s to read and 6 s to write, other moves at most 1 s.

    Four are read before the step. Page 4 waits until page 0, and page 5 until page 1, is written.
    """
    table = lay_out([StateTensor("a", 48, 0, True)], 32)
    speeds = Speeds(FETCH_BYTES, UPDATE_BYTES, 96 / 3, 96 / 6)
    moves = time_moves(table, 2, speeds, range(6))
    disk = [(one.move.kind, one.move.page, one.start, one.stop) for one in moves if one.move.kind in DISK_KINDS]
    assert disk[:4] == [(Kind.READ, page, 3.0 * page - 12, 3.0 * page - 9) for page in range(4)]
    assert disk[4:8] == [
        (Kind.WRITE, 0, 2, 8), (Kind.READ, 4, 8, 11), (Kind.WRITE, 1, 11, 17), (Kind.READ, 5, 17, 20),
    ]  # fmt: skip
    updates = {one.move.page: one.start for one in moves if one.move.kind is Kind.UPDATE}
    assert (updates[3], updates[4], updates[5]) == (4, 11, 20)
    assert optimizer_step_seconds(moves) == 20 + 1 + 0.5  # the final writes end later


def test_a_fast_disk_hides_behind_the_processor() -> None:
    speeds = Speeds(FETCH_BYTES, UPDATE_BYTES / 10)
    beside = Speeds(FETCH_BYTES, UPDATE_BYTES / 10, 96 / 3, 96 / 6)
    table = lay_out([StateTensor("a", 80, 0, True)], 32)
    assert optimizer_step_seconds(time_moves(table, 2, beside, range(10))) == optimizer_step_seconds(
        time_moves(table, 2, speeds)
    )
    slower = Speeds(FETCH_BYTES, UPDATE_BYTES / 10, 96 / 30, 96 / 60)
    seconds = optimizer_step_seconds(time_moves(table, 2, slower, range(10)))
    assert seconds > 4 * optimizer_step_seconds(time_moves(table, 2, speeds))
    assert optimizer_step_seconds(time_moves(table, 2, slower, {3, 7})) == optimizer_step_seconds(
        time_moves(table, 2, speeds)
    )
