"""Windows in a file: round trip, and refusals of damaged or mixed files in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.data.corpus import windows_file
from bytescale_ext.data.corpus.windows_file import WindowsHeader, header_path, load_windows, save_windows, sha256_of
from bytescale_ext.plan.sculpt.pieces import ROW

HEADER = WindowsHeader(context=8, overflow="none", seed=3, idx_sha256="ab")


def table(count: int = 4) -> np.ndarray:
    made = np.zeros(count, dtype=ROW)
    made["window"] = made["document"] = np.arange(count)
    made["length"] = 5
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_windows(tmp_path / "a.windows.npy", table(), HEADER)
    return tmp_path / "a.windows.npy"


def test_what_was_saved_comes_back(path: Path) -> None:
    found, header = load_windows(path)
    assert np.array_equal(found, table())
    assert (header.context, header.overflow, header.seed, header.idx_sha256) == (8, "none", 3, "ab")
    assert header.table_sha256 == sha256_of(path)
    assert sorted(one.name for one in path.parent.iterdir()) == ["a.windows.json", "a.windows.npy"]


def test_a_save_that_fails_leaves_the_old_files(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [path.read_bytes(), header_path(path).read_bytes()]

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(windows_file, "sha256_of", fail)
    with pytest.raises(KeyboardInterrupt):
        save_windows(path, table(9), HEADER)
    assert [path.read_bytes(), header_path(path).read_bytes()] == before
    assert not list(path.parent.glob(".*"))


def test_a_killed_save_never_leaves_a_table_beside_another_header(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, calls = windows_file.os.replace, []

    def killed_at_the_second(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(windows_file.os, "replace", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        save_windows(path, table(9), HEADER)
    with pytest.raises(ValueError, match=r"a\.windows\.npy: No such file"):
        load_windows(path)


def test_damage_is_refused(path: Path) -> None:
    described = header_path(path)
    text = described.read_text()
    for bad, message in (
        ("{", "not the header of windows"),
        ("[1]", "not the header of windows"),
        ('{"context": 8}', "not the header of windows"),
        (json.dumps({**json.loads(text), "version": 2}), "version 2, only version 1 is supported"),
        (json.dumps({**json.loads(text), "table_sha256": "0"}), "does not match its header a.windows.json"),
    ):
        described.write_text(bad)
        with pytest.raises(ValueError, match=message):
            load_windows(path)
    described.unlink()
    with pytest.raises(ValueError, match=r"a\.windows\.json: No such file"):
        load_windows(path)
