"""Groups whose first part is computed once: attention in float64 equals each document with a copy of that part."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.cases import ALL, Case, assert_matches, run_virtual

EIGHT = tuple(range(8))
CASES = {
    "one rank": Case((30, 9, 12), (((0, (0,)), (1, (0,)), (2, (0,))),), 1, parts=((0, (10, 15, 1, 4)), (2, (1, 5, 6)))),
    "with documents in rings and packs": Case(
        (61, 5, 40, 33, 20),
        (((0, ALL), (2, ALL), (3, (1, 2)), (1, (0,)), (4, (3,))),),
        4,
        parts=((0, (20, 11, 1, 29)), (3, (2, 20, 11)), (4, (10, 5, 5))),
    ),
    "hierarchical": Case((90, 41), (((0, EIGHT), (1, EIGHT)),), 8, inner_width=4, parts=((0, (50, 20, 3, 17)),)),
    "uneven": Case((60, 41), (((0, ALL), (1, ALL)),), 4, uneven=True, parts=((0, (30, 25, 5)), (1, (3, 30, 8)))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_groups_are_exact_in_float64(name: str) -> None:
    results, _ = run_virtual(CASES[name], "reference", torch.float64)
    assert_matches(CASES[name], results, 1e-10)


@given(st.integers(1, 6), st.lists(st.integers(1, 20), min_size=2, max_size=6), st.booleans())
@settings(max_examples=30, deadline=None)
@pytest.mark.slow
def test_any_parts_in_any_ring(width: int, parts: list[int], uneven: bool) -> None:
    length, ring = max(sum(parts), width), tuple(range(width))
    of_group = (*parts[:-1], parts[-1] + length - sum(parts))
    case = Case((length,), (((0, ring),),), width, 2, 1, 4, uneven=uneven, parts=((0, of_group),))
    results, _ = run_virtual(case, "reference", torch.float64)
    assert_matches(case, results, 1e-10)
