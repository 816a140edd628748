"""A folder is complete under its final name, or does not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.bytescale.inference.new_folder import new_folder


def test_a_folder_gets_its_name_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    with new_folder(target) as part:
        (part / "file").write_text("a")
        assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["out"]
    assert (target / "file").read_text() == "a"
    with pytest.raises(ValueError, match="out: it exists already"), new_folder(target):
        pytest.fail("the folder exists")


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def fill() -> None:
        with new_folder(tmp_path / "a" / "b" / "out") as part:
            (part / "file").write_text("a")
            raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"):
        fill()
    assert not list(tmp_path.iterdir())
