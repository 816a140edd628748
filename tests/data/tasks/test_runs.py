"""Ranges of runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bytescale_ext.data.tasks.runs import hash_range, joined, new_mapped, rows_between, save_array

ROW = np.dtype([("key", "<u8"), ("value", "<u4")])


def test_tasks_share_all_hashes() -> None:
    for tasks in (1, 3, 7):
        ranges = [hash_range(task, tasks) for task in range(tasks)]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == 1 << 64
        assert [end for _, end in ranges[:-1]] == [begin for begin, _ in ranges[1:]]


def test_a_range_of_each_run(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.npy", "b.npy", "empty.npy")]
    keys = [1, 5, 5, 9, (1 << 64) - 1], [0, 5, 6], []
    for path, values in zip(paths, keys, strict=True):
        save_array(path, np.array([(key, place) for place, key in enumerate(values)], ROW))
    found = rows_between(paths, "key", 5, 9)
    assert [part["key"].tolist() for part in found] == [[5, 5], [5, 6], []]
    assert joined(rows_between(paths, "key", 7, 1 << 64), ROW)["key"].tolist() == [9, (1 << 64) - 1]
    assert len(joined([], ROW)) == 0


def test_a_mapped_file_replaces_a_planted_link(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "table.npy"
    target.write_text("kept")
    path.symlink_to(target)
    values = new_mapped(path, ROW, 3)
    values["key"] = 5
    values.flush()
    assert target.read_text() == "kept"
    assert np.load(path)["key"].tolist() == [5, 5, 5]
    assert len(new_mapped(path, ROW, 0)) == 0
