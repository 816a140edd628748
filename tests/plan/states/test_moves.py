"""Moves of a step: while a page is updated, the next page is fetched."""

from __future__ import annotations

import random

import pytest

from bytescale_ext.plan.states.check import check_moves
from bytescale_ext.plan.states.moves import DISK_KINDS, Kind, StateTraffic, disk_bytes, step_moves, traffic
from bytescale_ext.plan.states.pages import StateTensor, lay_out
from tests.plan.states.tables import TABLE, random_table
from tests.sample import seeds


def test_the_next_page_is_fetched_before_one_is_updated() -> None:
    moves = [(move.kind, move.page, move.buffer) for move in step_moves(TABLE)]
    assert moves[:5] == [
        (Kind.FETCH, 0, 0), (Kind.FETCH, 1, 1), (Kind.UPDATE, 0, 0), (Kind.RETURN, 0, 0), (Kind.FETCH, 2, 0),
    ]  # fmt: skip
    assert moves[-2:] == [(Kind.UPDATE, 6, 0), (Kind.RETURN, 6, 0)]


@pytest.mark.parametrize("seed", seeds(30))
def test_moves_keep_the_laws(seed: int) -> None:
    table = random_table(seed)
    check_moves(table, step_moves(table))


@pytest.mark.parametrize("seed", seeds(30))
def test_moves_with_a_disk_keep_the_laws(seed: int) -> None:
    table = random_table(seed)
    draw = random.Random(seed)
    on_disk = {page for page in range(len(table.pages)) if draw.random() < draw.choice((0.2, 0.5, 1.0))}
    check_moves(table, step_moves(table, on_disk), on_disk)


def test_a_slot_is_read_again_as_soon_as_it_is_written() -> None:
    moves = step_moves(TABLE, {0, 1, 3, 4, 6})
    disk = [(move.kind, move.page, move.buffer) for move in moves if move.kind in DISK_KINDS]
    ahead = [(Kind.READ, page, slot) for slot, page in enumerate((0, 1, 3, 4))]
    assert disk[:6] == [*ahead, (Kind.WRITE, 0, 0), (Kind.READ, 6, 0)]
    assert [move.kind for move in moves[:5]] == [Kind.READ] * 4 + [Kind.FETCH]
    assert [move for move in moves if move.kind not in DISK_KINDS] == list(step_moves(TABLE))


def test_bytes_of_a_step() -> None:
    """For 16-bit parameters, gradients are fetched and results returned.

    Other parameters are copied both ways in float32.
    """
    half, single = (lay_out([StateTensor("a", 100, 0, has_copy)], 32) for has_copy in (True, False))
    assert traffic(half, 2) == StateTraffic(fetched=400, returned=200)
    assert traffic(single, 4) == StateTraffic(fetched=800, returned=400)
    assert traffic(TABLE, 2, {0, 6}).on_disk == (3 + 2) * 32 == disk_bytes(TABLE, 0) + disk_bytes(TABLE, 6)
    assert traffic(TABLE, 2) == StateTraffic(fetched=36 * 4 + 8 * 8, returned=36 * 2 + 8 * 4)
