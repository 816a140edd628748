"""JSON and lines that users give."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from bytescale_ext.data.samples.texts import json_text
from bytescale_ext.json_input import (
    check_characters,
    check_stored,
    json_value,
    lines_of_text,
    real,
    stored_bytes,
    stored_text,
    whole,
)

ROOT = Path(__file__).resolve().parents[1]
DEEP = '{"text": ' + "[" * 200_000 + "]" * 200_000 + "}"


def test_deep_nesting_is_an_error_of_the_text() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        json_value(DEEP)
    with pytest.raises(ValueError, match=r"^deep\.jsonl:3: not JSON \(nested too deeply\)"):
        json_text(DEEP.encode(), "text", "deep.jsonl:3")


@pytest.mark.parametrize(
    ("line", "half"),
    [
        (rb'{"text": "a\ud83d\ude00"}', None),
        (rb'{"text": "a\uD800b"}', r"\ud800"),
        (rb'{"text": "a", "more": [{"\udc00": 1}]}', r"\udc00"),
        (b'{"text": "a\xed\xa0\x80"}', r"\ud800"),
        (rb'{"text": "a\\ud800"}', None),  # a backslash, and no escape sequence
    ],
)
def test_half_of_a_surrogate_pair_is_no_character(line: bytes, half: str | None) -> None:
    value = json_value(line)
    if half is None:
        check_characters(line, value)
        return
    with pytest.raises(ValueError, match=re.escape(f"'{half}' is half of a surrogate pair")):
        check_characters(line, value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("one\ntwo\n", ["one", "two"]),
        ("one\r\n\ntwo", ["one", "", "two"]),
        ("a\u2028b\x85c\x0cd\x1ee\n", ["a\u2028b\x85c\x0cd\x1ee"]),  # separators of Unicode that are no newlines
    ],
)
def test_lines_end_at_newlines_alone(text: str, expected: list[str]) -> None:
    assert lines_of_text(text) == expected


def test_pipes_and_holes_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "holes").write_text("{}")
    os.truncate(tmp_path / "holes", 1 << 40)
    for name, reason in (("pipe", "it is a pipe"), ("holes", "has 1,099,511,627,776 bytes, of which not all")):
        for read in (check_stored, stored_text, stored_bytes):
            with pytest.raises(OSError, match=reason):
                read(tmp_path / name)
    (tmp_path / "whole").write_bytes(b"[1]" + b" " * (17 << 20))
    assert stored_text(tmp_path / "whole").strip() == "[1]"


@pytest.mark.parametrize("value", [True, "1", None, [1], 1.5])
def test_whole_numbers_are_no_other_values(value: object) -> None:
    with pytest.raises(TypeError, match="is not a whole number"):
        whole(value)
    if value != 1.5:
        with pytest.raises(TypeError, match="is not a number"):
            real(value)
    assert (whole(3), real(3), real(0.5)) == (3, 3.0, 0.5)


def test_files_of_users_are_read_through_these_functions() -> None:
    """``json.loads`` fails with RecursionError, and ``splitlines`` ends lines at other separators."""
    own = {"bytescale_ext/json_input.py", "bytescale_ext/data/clean/shelf.py"}
    for folder in ("bytescale_ext", "megatron"):
        for path in (ROOT / folder).rglob("*.py"):
            text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
            assert name in own or "json.loads(" not in text, name
            assert not any("read_text" in line and "splitlines" in line for line in text.splitlines()), name
