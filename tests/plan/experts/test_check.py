"""Validator of placements: valid placements pass, and a violation of each rule is refused with its name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.experts.check import check_placement
from bytescale_ext.plan.experts.placement import EMPTY, PARTS, PlacementPlan

# 6 experts on 3 ranks: rank 0 has a replica of expert 5, rank 2 has replicas of 0 and 1.
PLAN = PlacementPlan(
    6,
    ((0, 1, 5, EMPTY), (2, 3, EMPTY, EMPTY), (4, 5, 0, 1)),
    ((512, 1000, 24, 0), (PARTS, PARTS, 0, 0), (PARTS, 1000, 512, 24)),
)


def with_rank(rank: int, slots: tuple[int, ...] | None = None, quotas: tuple[int, ...] | None = None) -> PlacementPlan:
    rows, parts = list(PLAN.slots), list(PLAN.quotas)
    rows[rank], parts[rank] = slots or rows[rank], quotas or parts[rank]
    return replace(PLAN, slots=tuple(rows), quotas=tuple(parts))


DAMAGES: dict[str, tuple[PlacementPlan, str]] = {
    "of another model": (replace(PLAN, num_experts=9), "the plan has 9 experts instead of 6"),
    "a rank without quotas": (replace(PLAN, quotas=PLAN.quotas[:2]), "3 ranks have 2 rows of quotas"),
    "too few slots": (with_rank(1, (2, 3, EMPTY), (PARTS, PARTS, 0)), "3 slots and 3 quotas instead of 4"),
    "too few quotas": (with_rank(1, quotas=(PARTS, PARTS, 0)), "4 slots and 3 quotas instead of 4"),
    "an expert away from home": (with_rank(1, (2, 4, 3, EMPTY), (PARTS, 1, PARTS, 0)), "an expert is not in its home"),
    "homes in another order": (with_rank(1, (3, 2, EMPTY, EMPTY)), "an expert is not in its home"),
    "a gap": (with_rank(0, (0, 1, EMPTY, 5), (512, 1000, 0, 24)), "an empty slot comes before a replica"),
    "held twice": (with_rank(2, (4, 5, 0, 0), (PARTS, 1000, 256, 256)), "an expert is in two slots"),
    "its own replica": (with_rank(2, (4, 5, 5, 1)), "an expert is in two slots"),
    "no such expert": (with_rank(0, (0, 1, 6, EMPTY)), "an expert in a slot does not exist"),
    "below nothing": (with_rank(0, quotas=(536, 1000, -24, 0)), "a quota is negative"),
    "tokens for nobody": (with_rank(0, quotas=(512, 1000, 23, 1)), "an empty slot has a quota"),
    "an idle replica": (with_rank(2, quotas=(PARTS, 1000, 0, 24)), "a replica has no quota"),
    "tokens are lost": (with_rank(0, quotas=(511, 1000, 24, 0)), "the quotas of expert 0 sum to 1023 instead of 1024"),
    "tokens twice": (with_rank(1, quotas=(PARTS, PARTS + 1, 0, 0)), "the quotas of expert 3 sum to 1025"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_plan_breaks_its_law(damage: str) -> None:
    check_placement(PLAN, 6, 4)
    plan, law = DAMAGES[damage]
    with pytest.raises(PlanError, match=law):
        check_placement(plan, 6, 4)


def test_the_bad_rank_is_marked() -> None:
    with pytest.raises(PlanError) as caught:
        check_placement(with_rank(1, (2, 4, EMPTY, EMPTY)), 6, 4)
    assert [line for line in str(caught.value).splitlines() if line.startswith(">>")] == [">> rank 1: (2, 4, -1, -1)"]
    with pytest.raises(PlanError, match=">> 9 experts on 3 ranks"):
        check_placement(replace(PLAN, num_experts=9), 6, 4)
