"""The table of tried points, and the points that it counts."""

from __future__ import annotations

from tests.faults.points import FAULTS, NUM_STEPS, point_of
from tests.faults.table import BEGIN, END, table, with_table
from tests.faults.trials import Tried

KILLED = [
    Tried("killed-0", "killed", 0.5, 2, ["PeerLost: ..."], []),
    Tried("killed-1", "killed", 1.5, 4, ["PeerLost: ..."], ["loss of step 5: 2 and not 1"]),
    Tried("slow-0", "slow", None, None, [], []),
]


def test_a_row_counts_points_and_those_without_problems() -> None:
    rows = table(KILLED).splitlines()
    assert len(rows) == 2 + len(FAULTS)
    assert "| SIGKILL of a rank | 2 | 1 | 1.0, 1.5 | 2, 4 |" in rows
    assert "| a node 3 times slower | 1 | 1 | goes on | - |" in rows
    assert "| link of a rank cut | not tried | | | |" in rows


def test_only_the_table_of_a_page_changes() -> None:
    page = f"a\n{BEGIN}\nold\n{END}\nb\n"
    assert with_table(page, KILLED) == f"a\n{BEGIN}\n{table(KILLED)}\n{END}\nb\n"


def test_points_are_the_same_for_the_same_number_and_lie_within_a_run() -> None:
    for fault in FAULTS:
        points = [point_of(fault, number) for number in range(20)]
        assert points == [point_of(fault, number) for number in range(20)]
        assert all(1 <= point.step <= NUM_STEPS for point in points)
        assert len({(point.step, point.rank, point.mark) for point in points}) > 5
