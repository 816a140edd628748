"""Types of options, and checks of output paths."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megatron.bytescale.cli.shared.inputs import (
    MOST_RANKS,
    MOST_TOKENS,
    OneLineParser,
    UsageError,
    check_picture,
    check_writable,
    count,
    size,
)


def test_sizes_and_counts() -> None:
    assert [size(text) for text in ("1", "8192", "8K", "2M", "3G", "1024G")] == [
        1, 8192, 8192, 2 << 20, 3 << 30, MOST_TOKENS,
    ]  # fmt: skip
    assert [count(text) for text in ("1", str(MOST_RANKS))] == [1, MOST_RANKS]
    for bad in ("0", "-1", "8k", "1025G", "", "K", "1.5K", "x"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
            size(bad)
    for bad in ("0", str(MOST_RANKS + 1), "8K", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number"):
            count(bad)


def test_an_error_names_the_command() -> None:
    parser = OneLineParser(prog="top")
    parser.add_subparsers(dest="command").add_parser("sub").add_argument("--ranks", type=count)
    with pytest.raises(UsageError, match="argument --ranks: 'x' is not a whole number") as found:
        parser.parse_args(["sub", "--ranks", "x"])
    assert found.value.prog == "top sub"


def test_a_check_leaves_no_file_and_keeps_what_is_there(tmp_path: Path) -> None:
    check_writable("--output", tmp_path / "new")
    (tmp_path / "old.png").write_text("kept")
    check_picture("--plot", tmp_path / "old.png")
    check_picture("--plot", None)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"old.png": "kept"}
    for path, words in (
        (tmp_path / "none" / "a.png", "there is no folder"),
        (tmp_path / "a.gif", "ends with .png, .svg or .pdf"),
    ):
        with pytest.raises(ValueError, match=f"--plot .*{words}"):
            check_picture("--plot", path)
    with pytest.raises(ValueError, match=r"--output .* cannot be written \(Is a directory\)"):
        check_writable("--output", tmp_path)
