"""Masks of answers: written, read, and refused if they are damaged or of another data set."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.data.corpus.mask_file import HEADER, MASK, check_mask, open_mask, write_header
from tests.data.sources import write_data_set

MARKS = [0, 1, 1, 0, 1]


def masked(prefix: Path, marks: list[int] = MARKS) -> str:
    write_data_set(prefix, [[[1, 2, 3]], [[4, 5]]])
    Path(f"{prefix}{MASK}").write_bytes(bytes(marks))
    write_header(str(prefix))
    return str(prefix)


def test_a_mask_is_a_byte_for_each_token(tmp_path: Path) -> None:
    prefix = masked(tmp_path / "a")
    header = check_mask(prefix)
    assert (header.num_tokens, header.num_answer_tokens) == (5, 3)
    assert check_mask(prefix, whole=False) == header
    assert open_mask(prefix).tolist() == MARKS
    assert open_mask(prefix).dtype == np.uint8


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# damage of the files of prefix a (b is another data set with a mask), words of the refusal
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no header": (lambda f: (f / f"a{HEADER}").unlink(), "a.mask.json: no such file, so the answers are unknown"),
    "no mask": (lambda f: (f / f"a{MASK}").unlink(), "a.mask.bin: no such file"),
    "no data": (lambda f: (f / "a.idx").unlink(), "a.idx: no such file"),
    "header of words": (lambda f: (f / f"a{HEADER}").write_text("words"), "not the header of a mask"),
    "header of a list": (lambda f: (f / f"a{HEADER}").write_text("[1]"), "not the header of a mask"),
    "unknown entry": (lambda f: edit(f / f"a{HEADER}", more=1), "not the header of a mask .*more"),
    "version": (lambda f: edit(f / f"a{HEADER}", version=9), "version 9, only version 1 is supported"),
    "cut short": (lambda f: (f / f"a{MASK}").write_bytes(bytes(4)), "a.mask.bin does not match its header a.mask.json"),
    "of another data set": (
        lambda f: [(f / f"b{one}").replace(f / f"a{one}") for one in (MASK, HEADER)],
        "a.mask.bin: the mask belongs to another data set than .*a.idx: write",
    ),
    "another data set": (
        lambda f: write_data_set(f / "a", [[[9, 9]], [[9] * 3]]),
        "the mask belongs to another data set",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_masks_are_refused(name: str, tmp_path: Path) -> None:
    damage, message = DAMAGE[name]
    prefix = masked(tmp_path / "a")
    write_data_set(tmp_path / "b", [[[1, 2, 3, 4, 5]]])
    (tmp_path / f"b{MASK}").write_bytes(bytes(MARKS))
    write_header(str(tmp_path / "b"))
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        check_mask(prefix, whole=False)
    assert "\n" not in str(error.value)


def test_other_bytes_are_found_by_the_rank_that_reads_them(tmp_path: Path) -> None:
    prefix = masked(tmp_path / "a")
    Path(prefix + MASK).write_bytes(bytes([1, 1, 1, 0, 0]))
    check_mask(prefix, whole=False)
    with pytest.raises(ValueError, match="does not match its header a"):
        check_mask(prefix)
