"""Documents of ``bytescale corpus``, and checks before Megatron is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytescale_ext.data.samples.sources import (
    check_first_lines,
    checked_prefix,
    contents,
    source_entries,
)


def test_only_the_first_line_of_each_file_is_read_ahead(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\nbroken\n')
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n')
    entries = source_entries([str(tmp_path)], "*")
    assert [entry.line for entry in entries] == [1, 2, 1]
    check_first_lines(entries, "text")
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not JSON"):
        list(contents(entries, "text"))
    with pytest.raises(ValueError, match=r"a\.jsonl:1: no text under the key 'body'"):
        check_first_lines(entries, "body")


def test_checking_the_prefix_leaves_nothing(tmp_path: Path) -> None:
    checked_prefix(str(tmp_path / "new" / "out"))
    assert not list((tmp_path / "new").iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write to"):
        checked_prefix(str(tmp_path / "file" / "out"))
