"""Ranks detect that their plans differ, or that the planner of some rank ran out of time."""

from __future__ import annotations

import pytest
import torch

from bytescale_ext.parallel.agreement import Agreement, compare_plans, digests_by_rank
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

SAME, OTHER, LARGEST = "00ff00ff00ff00ff", "00ff00ff00fe00ff", "f" * 16


def compare(rank: int, world: int, digests: list[str], late: list[bool]) -> tuple[Agreement, dict[str, list[int]]]:
    agreement = compare_plans(digests[rank], late[rank], None, torch.device("cpu"))
    return agreement, digests_by_rank(digests[rank], None)


@pytest.mark.parametrize(
    ("digests", "late", "expected"),
    [
        ([SAME, SAME, SAME], [False] * 3, Agreement(same_plan=True, fell_back=False)),
        ([SAME, OTHER, SAME], [False] * 3, Agreement(same_plan=False, fell_back=False)),
        ([SAME, SAME, OTHER], [False, False, True], Agreement(same_plan=False, fell_back=True)),
        ([LARGEST, LARGEST, LARGEST], [True, False, False], Agreement(same_plan=True, fell_back=True)),
    ],
)
def test_every_rank_gets_the_same_answer(digests: list[str], late: list[bool], expected: Agreement) -> None:
    answers = run_ranks(compare, 3, digests, late)
    assert [answer for answer, _ in answers] == [expected] * 3
    for _, by_rank in answers:
        assert by_rank == {
            digest: [rank for rank, own in enumerate(digests) if own == digest] for digest in set(digests)
        }
