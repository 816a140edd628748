"""Rows of tensors against lists of indices, and offsets of documents."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.attention.layouts.rows import CuSeqlens, PartRows, RowParts, Rows

CPU = torch.device("cpu")


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=6))
def test_rows_are_taken_put_and_added(gaps_and_sizes: list[tuple[int, int]]) -> None:
    intervals, stop = [], 0
    for gap, size in gaps_and_sizes:
        intervals.append((stop + gap, stop + gap + size))
        stop += gap + size
    rows = Rows.of(intervals)
    listed = [row for a, b in intervals for row in range(a, b)]
    assert rows.num_rows == len(listed)
    assert rows.is_view == (not listed or listed[-1] - listed[0] == len(listed) - 1)
    tensor = torch.arange(2.0 * (stop + 2)).view(2, -1)
    taken = rows.take(tensor, dim=1)
    assert torch.equal(taken, tensor[:, listed])
    assert (taken.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()) == rows.is_view
    expected = tensor.clone()
    expected[:, listed] *= 2
    values = taken.double().clone()
    rows.add_(tensor, values, dim=1)
    assert torch.equal(tensor, expected)
    rows.put_(tensor, values, dim=1)
    expected[:, listed] /= 2
    assert torch.equal(tensor, expected)


def intervals_of(numbers: set[int]) -> list[tuple[int, int]]:
    return [(number, number + 1) for number in sorted(numbers)]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.sets(st.integers(0, 23)))
def test_a_tensor_in_parts_is_the_tensor(part_of_row: list[int], wanted: set[int]) -> None:
    """For any rows of the parts, rows are read, written and added as in one tensor."""
    tensor = torch.arange(3.0 * len(part_of_row)).view(-1, 3)
    places = [Rows.of(intervals_of({row for row, one in enumerate(part_of_row) if one == part})) for part in range(4)]
    parts = RowParts(PartRows(tuple(places)), [rows.take(tensor).clone() for rows in places])
    rows = Rows.of(intervals_of({row for row in wanted if row < len(part_of_row)}))
    assert torch.equal(rows.take(parts), rows.take(tensor))
    values = torch.randn(rows.num_rows, 3)
    for held in (tensor, parts):
        rows.put_(held, values)
        rows.add_(held, 2 * values)
    assert torch.equal(rows.take(parts), rows.take(tensor))
    for place, part in zip(places, parts.parts, strict=True):
        assert torch.equal(part, place.take(tensor))


def test_rows_that_no_part_holds_are_an_error() -> None:
    parts = RowParts(PartRows((Rows.of([(0, 2)]), Rows.of([(4, 6)]))), [torch.zeros(2, 1), torch.ones(2, 1)])
    with pytest.raises(AssertionError, match="no part holds row 2"):
        Rows.of([(1, 5)]).take(parts)
    with pytest.raises(AssertionError, match="places"):
        PartRows((Rows.of([(0, 2)]), Rows.of([(1, 6)])))


@pytest.mark.parametrize("intervals", [((1, 4),), ((0, 1), (2, 4))], ids=["view", "gathered"])
def test_values_are_rounded_to_the_tensor(intervals: tuple[tuple[int, int], ...]) -> None:
    """Kernels compute in float32 or float64; outputs and gradients are stored in the dtype of the inputs."""
    rows = Rows.of(intervals)
    values = torch.full((rows.num_rows, 2), 1 + 2**-12, dtype=torch.float64)
    tensor = torch.zeros(4, 2, dtype=torch.bfloat16)
    rows.put_(tensor, values)
    rows.add_(tensor, values)
    assert torch.equal(rows.take(tensor), torch.full((rows.num_rows, 2), 2.0, dtype=torch.bfloat16))
    assert int(tensor.count_nonzero()) == 2 * rows.num_rows


@pytest.mark.parametrize("intervals", [[(3, 5), (0, 1)], [(0, 3), (2, 4)], [(4, 2)]])
def test_intervals_must_ascend_without_overlap(intervals: list[tuple[int, int]]) -> None:
    with pytest.raises(AssertionError, match="joined="):
        Rows.of(intervals)


@given(st.lists(st.integers(0, 9), max_size=6))
@settings(max_examples=30)
def test_offsets_of_lengths(lengths: list[int]) -> None:
    documents = CuSeqlens.of_lengths(lengths)
    assert documents.lengths == tuple(lengths)
    assert (documents.num_documents, documents.num_tokens) == (len(lengths), sum(lengths))
    assert documents.longest == max(lengths, default=0)
    tensor = documents.on(CPU)
    assert tensor.dtype == torch.int32
    assert tuple(tensor.tolist()) == documents.offsets
    assert documents.on(CPU) is tensor
    assert documents == CuSeqlens.of_lengths(lengths)


@pytest.mark.parametrize("offsets", [(), (1, 2), (0, 3, 2)])
def test_offsets_must_ascend_from_zero(offsets: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="start at 0"):
        CuSeqlens(offsets)
