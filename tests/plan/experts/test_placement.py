from __future__ import annotations

import numpy as np
import pytest

from bytescale_ext.plan.experts.placement import (
    EMPTY,
    PARTS,
    PlacementPlan,
    check_slots,
    home_parts,
    tokens_of_ranks,
)


def shared(rank: int, expert: int, parts: int) -> np.ndarray:
    """Return parts of 8 experts on 2 ranks; ``rank`` has parts of an expert with its home on the other rank."""
    found = home_parts(8, 2)
    found[rank, expert] = parts
    found[1 - rank, expert] -= parts
    return found


def test_a_static_plan_has_empty_slots() -> None:
    plan = PlacementPlan.static(4, 2, 3)
    assert plan.slots == ((0, 1, EMPTY), (2, 3, EMPTY))
    assert plan.quotas == ((PARTS, PARTS, 0), (PARTS, PARTS, 0))
    assert (plan.num_ranks, plan.num_slots, plan.num_replicas) == (2, 3, 0)


def test_a_replica_takes_an_empty_slot() -> None:
    plan = PlacementPlan.of(shared(0, 6, 256), 6)
    assert plan.slots == ((0, 1, 2, 3, 6, EMPTY), (4, 5, 6, 7, EMPTY, EMPTY))
    assert plan.quotas[0][4] == 256
    assert plan.quotas[1][2] == PARTS - 256
    assert plan.num_replicas == 1
    assert (plan.parts() == shared(0, 6, 256)).all()


def test_only_new_replicas_are_moves() -> None:
    static = PlacementPlan.static(8, 2, 6)
    first, second = PlacementPlan.of(shared(0, 6, 256), 6), PlacementPlan.of(shared(0, 5, 256), 6)
    assert first.changed_slots(static) == 1
    assert static.changed_slots(first) == 0
    assert second.changed_slots(first) == 1
    assert PlacementPlan.of(shared(0, 6, 100), 6).changed_slots(first) == 0


def test_the_printed_plan_names_shared_experts() -> None:
    lines = PlacementPlan.of(shared(0, 6, 256), 5).described().splitlines()
    assert lines == [
        "8 experts in 5 slots of each of 2 ranks",
        "rank 0: 0 1 2 3 6:256/1024",
        "rank 1: 4 5 6:768/1024 7 -",
    ]


@pytest.mark.parametrize("load", [0, 1, 2, 5, 1023, 1024, 10**9])
def test_no_token_is_lost(load: int) -> None:
    parts = np.array([[300, PARTS], [700, 0], [24, 0]])
    tokens = tokens_of_ranks(parts, [load, 7])
    assert tokens.sum(0).tolist() == [load, 7]
    assert tokens.min() >= 0
    assert np.abs(tokens[:, 0] - load * parts[:, 0] / PARTS).max() <= 1


@pytest.mark.parametrize("slots", [3, 9])
def test_slots_are_too_few_or_too_many(slots: int) -> None:
    check_slots("--slots", 4, 8, 2)
    check_slots("--slots", 8, 8, 2)
    with pytest.raises(
        ValueError, match=rf"--slots {slots}: a rank is the home of 4 of 8 experts: .* at least 4 .*most 8"
    ):
        check_slots("--slots", slots, 8, 2)
