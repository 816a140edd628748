"""The table of tried points, and the checks of a point."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.jobs import Ended, flags_of_fault
from tests.faults.points import FAULTS, NUM_RANKS, NUM_STEPS, point_of
from tests.faults.table import BEGIN, END, table, with_table
from tests.faults.trials import Tried, Undisturbed, problems_of_runs

KILLED = [
    Tried("killed-0", "killed", 0.5, 2, ["PeerLost: ..."], []),
    Tried("killed-1", "killed", 1.5, 4, ["PeerLost: ..."], ["loss of step 5: 2 and not 1"]),
    Tried("slow-0", "slow", None, None, [], []),
]


def test_a_row_counts_points_and_points_without_problems() -> None:
    rows = table(KILLED).splitlines()
    assert len(rows) == 2 + len(FAULTS)
    assert "| SIGKILL of a rank | 2 | 1 | 1.0, 1.5 | 2, 4 |" in rows
    assert "| a node 3 times slower | 1 | 1 | continues | - |" in rows
    assert "| link of a rank cut | not tried | | | |" in rows


def test_a_fault_with_pages_has_a_folder_for_them(tmp_path: Path) -> None:
    assert flags_of_fault(point_of("killed", 0), tmp_path) == ()
    assert not list(tmp_path.iterdir())
    flags = flags_of_fault(point_of("killed-paged", 0), tmp_path)
    assert flags[-2:] == ("--state-nvme", str(tmp_path / "pages"))
    assert (tmp_path / "pages").is_dir()


@pytest.mark.parametrize(("tolerance", "count"), [(1e-5, 0), (0.0, 1)])
def test_the_tolerance_of_losses(tolerance: float, count: int, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "lm loss": 2.0000001}\n')
    ended = Ended([0] * NUM_RANKS, [], tmp_path)
    problems = problems_of_runs([ended], Undisturbed({1: 2.0}, {}, 0), tmp_path, tolerance)
    assert len(problems) == count


def test_only_the_table_of_a_page_changes() -> None:
    page = f"a\n{BEGIN}\nold\n{END}\nb\n"
    first = with_table(page, KILLED)
    assert first == f"a\n{BEGIN}\n{table(KILLED)}\n{END}\nb\n"
    again = with_table(first, KILLED[2:])
    assert again == first, "faults that were not tried again keep their rows"
    assert with_table(first, KILLED[:1]) == first.replace("| 2 | 1 | 1.0, 1.5 | 2, 4 |", "| 1 | 1 | 0.5, 0.5 | 2 |")


def test_a_number_always_gives_the_same_point_within_a_run() -> None:
    for fault in FAULTS:
        points = [point_of(fault, number) for number in range(20)]
        assert points == [point_of(fault, number) for number in range(20)]
        assert all(1 <= point.step <= NUM_STEPS for point in points)
        assert len({(point.step, point.rank, point.mark) for point in points}) > 5
