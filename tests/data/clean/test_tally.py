"""Counts of tasks and their sum."""

from __future__ import annotations

from pathlib import Path

from bytescale_ext.data.clean.tally import Tally, merged


def test_counts_of_tasks_are_summed(tmp_path: Path) -> None:
    for rank in range(2):
        tally = Tally()
        tally.add("docs", "read", num_bytes=10)
        tally.add("docs", "read", 2, 5)
        tally.add(f"only{rank}", "kept")
        tally.save(tmp_path / f"{rank}.json")
    total = merged(tmp_path.glob("*.json"))
    assert total.counts == {"docs": {"read": 6}, "only0": {"kept": 1}, "only1": {"kept": 1}}
    assert total.num_bytes["docs"] == {"read": 30}
