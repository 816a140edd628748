"""Sidecars: written, read, and refused if they are damaged, not finite or of another data set or tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.data.corpus.sidecar import (
    GROUPS,
    WEIGHTS,
    Kind,
    check_sidecar,
    check_weights,
    group_bounds,
    groups_of,
    open_sidecar,
    weights_of,
    write_header,
)
from tests.data.sources import write_data_set

MARKS = [0, 1, 1, 0, 1]


MASK, HEADER = ".weights.bin", ".weights.json"


def masked(prefix: Path, marks: list[int] = MARKS) -> str:
    write_data_set(prefix, [[[1, 2, 3]], [[4, 5]]])
    Path(f"{prefix}{MASK}").write_bytes(bytes(marks))
    write_header(weights_of(str(prefix)), str(prefix), WEIGHTS, "uint8")
    return str(prefix)


def test_a_mask_is_a_byte_for_each_token(tmp_path: Path) -> None:
    prefix = masked(tmp_path / "a")
    header = check_weights(prefix)
    assert (header.num_values, header.num_nonzero) == (5, 3)
    assert check_weights(prefix, whole=False) == header
    assert open_sidecar(weights_of(prefix)).tolist() == MARKS
    assert open_sidecar(weights_of(prefix)).dtype == np.uint8


def test_weights_are_numbers(tmp_path: Path) -> None:
    prefix, path = masked(tmp_path / "a"), weights_of(str(tmp_path / "a"))
    numbers = np.array([0.0, -1.5, 2.0, 0.25, 0.0], dtype=np.float32)
    numbers.tofile(path + ".bin")
    assert write_header(path, prefix, WEIGHTS, "float32") == check_weights(prefix)
    assert open_sidecar(path).tolist() == numbers.tolist()
    assert check_weights(prefix).num_nonzero == 3


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_must_be_finite(number: float, tmp_path: Path) -> None:
    prefix, path = masked(tmp_path / "a"), weights_of(str(tmp_path / "a"))
    np.array([0, 1, 1, number, 0], dtype=np.float32).tofile(path + ".bin")
    with pytest.raises(ValueError, match=r"token 3 has the number (nan|inf), and weights must be finite"):
        write_header(path, prefix, WEIGHTS, "float32")


def test_weights_of_zero_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no token has a weight"):
        check_weights(masked(tmp_path / "a", [0] * 5))


def test_another_kind_is_refused(tmp_path: Path) -> None:
    prefix = masked(tmp_path / "a")
    with pytest.raises(ValueError, match="the numbers are 'weights', not log-probabilities"):
        check_sidecar(weights_of(prefix), prefix, Kind("logprobs", "log-probabilities", "again"))


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# damage of the files of prefix a (b is another data set with a mask), words of the refusal
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no header": (lambda f: (f / f"a{HEADER}").unlink(), "a.weights.json: no such file, so the weights are unknown"),
    "no mask": (lambda f: (f / f"a{MASK}").unlink(), "a.weights.bin: no such file"),
    "no data": (lambda f: (f / "a.idx").unlink(), "a.idx: no such file"),
    "header of words": (lambda f: (f / f"a{HEADER}").write_text("words"), "not the header of a sidecar"),
    "header of a list": (lambda f: (f / f"a{HEADER}").write_text("[1]"), "not the header of a sidecar"),
    "unknown entry": (lambda f: edit(f / f"a{HEADER}", more=1), "not the header of a sidecar .*more"),
    "version": (lambda f: edit(f / f"a{HEADER}", version=9), "version 9, only version 3 is supported"),
    "cut short": (
        lambda f: (f / f"a{MASK}").write_bytes(bytes(4)),
        "a.weights.bin does not match its header a.weights.json",
    ),
    "of another data set": (
        lambda f: [(f / f"b{one}").replace(f / f"a{one}") for one in (MASK, HEADER)],
        "a.weights.bin: the weights belong to another data set than .*a.idx, or to another",
    ),
    "another data set": (
        lambda f: write_data_set(f / "a", [[[9, 9]], [[9] * 3]]),
        "the weights belong to another data set",
    ),
    "another tokenizer": (
        lambda f: write_data_set(f / "a", [[[1, 2, 3]], [[9, 5]]]),
        "the weights belong to another data set than .*a.idx, or to another tokenizer",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_masks_are_refused(name: str, tmp_path: Path) -> None:
    damage, message = DAMAGE[name]
    prefix = masked(tmp_path / "a")
    write_data_set(tmp_path / "b", [[[1, 2, 3, 4, 5]]])
    (tmp_path / f"b{MASK}").write_bytes(bytes(MARKS))
    write_header(weights_of(str(tmp_path / "b")), str(tmp_path / "b"), WEIGHTS, "uint8")
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        check_weights(prefix, whole=False)
    assert "\n" not in str(error.value)


def test_other_bytes_are_found_by_the_rank_that_reads_them(tmp_path: Path) -> None:
    prefix = masked(tmp_path / "a")
    Path(prefix + MASK).write_bytes(bytes([1, 1, 1, 0, 0]))
    check_weights(prefix, whole=False)
    with pytest.raises(ValueError, match="does not match its header a"):
        check_weights(prefix)


def grouped(prefix: Path, groups: list[int]) -> str:
    """Write five documents and their groups."""
    write_data_set(prefix, [[[1, 2]], [[3]], [[4, 5]], [[6]], [[7]]])
    np.array(groups, dtype=np.int32).tofile(f"{prefix}.groups.bin")
    write_header(groups_of(str(prefix)), str(prefix), GROUPS, "int32")
    return str(prefix)


def test_groups_are_neighbouring_documents(tmp_path: Path) -> None:
    assert group_bounds(grouped(tmp_path / "a", [0, 0, 1, 2, 2])).tolist() == [0, 2, 3, 5]
    assert group_bounds(grouped(tmp_path / "a", [0] * 5)).tolist() == [0, 5]


BAD_GROUPS = {
    "a group without its members": ([0, 0, 2, 2, 2], "document 2 is of group 2, after group 0, so a group has no doc"),
    "no first group": ([1, 1, 1, 1, 1], "document 0 is of group 1, after no other"),
    "a divided group": ([0, 0, 1, 1, 0], "document 4 is of group 0, after group 1, so a group has no documents or is"),
    "of fewer documents": ([0, 0, 1, 1], "the groups belong to another data set"),
}


@pytest.mark.parametrize("name", BAD_GROUPS)
def test_bad_groups_are_refused(name: str, tmp_path: Path) -> None:
    groups, message = BAD_GROUPS[name]
    with pytest.raises(ValueError, match=message) as error:
        group_bounds(grouped(tmp_path / "a", groups))
    assert "\n" not in str(error.value)
