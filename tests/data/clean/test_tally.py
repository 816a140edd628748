"""Counts of tasks and their sum."""

from __future__ import annotations

from pathlib import Path

from bytescale_ext.data.clean.tally import EXAMPLES, Tally, merged, write_whole


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


def test_few_examples_stay_and_are_short(tmp_path: Path) -> None:
    for rank in range(3):
        tally = Tally()
        for number in range(5):
            tally.example("near", f"{rank}.{number}", "long  text\n" * 100, kept="x")
        assert len(tally.examples["near"]) == EXAMPLES
        tally.save(tmp_path / f"{rank}.json")
    examples = merged(tmp_path.glob("*.json")).examples["near"]
    assert [one["document"] for one in examples] == ["0.0", "0.1", "0.2"]
    assert all(len(str(one["text"])) <= 120 and one["kept"] == "x" for one in examples)


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    write_whole(tmp_path / "new" / "a.json", "one")
    write_whole(tmp_path / "new" / "a.json", "two")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]
    assert (tmp_path / "new" / "a.json").read_text() == "two"
