"""Validator of memory plans: valid plans pass, and a violation of each rule is refused with its name."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.memory.check import check_memory_plan, check_two_level_plan
from bytescale_ext.plan.memory.placement import plan_memory
from bytescale_ext.plan.memory.plan import MemoryPlan, Request, TwoLevelPlan
from tests.plan.memory.traces import layer_trace, random_requests

PLAN = plan_memory([replace(request, num_bytes=512 * request.num_bytes) for request in layer_trace(2)])
LEVEL = plan_memory([Request("a", 40, 0, 3), Request("b", 8, 1, 2)])
MODEL = plan_memory(
    [Request("layer 0 forward", 48, 0, 4), Request("kept", 8, 1, 9), Request("layer 0 backward", 48, 5, 8)]
)
TWO = TwoLevelPlan({"forward": LEVEL, "backward": LEVEL}, MODEL)


def moved(plan: MemoryPlan, index: int, address: int) -> MemoryPlan:
    """Return the plan with one address changed."""
    return replace(plan, addresses=(*plan.addresses[:index], address, *plan.addresses[index + 1 :]))


def changed(plan: MemoryPlan, index: int, **changes: Any) -> MemoryPlan:
    """Return the plan with one request changed."""
    requests = (*plan.requests[:index], replace(plan.requests[index], **changes), *plan.requests[index + 1 :])
    return replace(plan, requests=requests)


@pytest.mark.parametrize(
    ("damaged", "law"),
    [
        (replace(PLAN, addresses=PLAN.addresses[1:]), ">> 14 requests have 13 addresses"),
        (moved(PLAN, 0, -512), "saved is at -512"),
        (moved(PLAN, 1, PLAN.addresses[1] + 8), "not a multiple of 5120"),
        (moved(PLAN, 1, PLAN.addresses[0]), "saved and a share memory at"),
        (changed(PLAN, 2, num_bytes=0), "b has no size or no life"),
        (changed(PLAN, 2, stop=2), "b has no size or no life"),
        (changed(PLAN, 0, stop=99, num_bytes=512 * 400), "share memory at"),
        (replace(PLAN, bound=PLAN.bound - 1), f"the liveness bound is {PLAN.bound}, not {PLAN.bound - 1}"),
        (replace(PLAN, bound=PLAN.bound + 512), f"the liveness bound is {PLAN.bound}, not"),
        (replace(PLAN, is_optimal=False), "the plan is not marked as optimal"),
    ],
)
def test_a_damaged_plan_breaks_its_law(damaged: MemoryPlan, law: str) -> None:
    check_memory_plan(PLAN)
    with pytest.raises(PlanError) as caught:
        check_memory_plan(damaged)
    assert law in str(caught.value)
    assert ">>" in str(caught.value)


def test_bad_rows_are_marked_and_long_plans_are_cut() -> None:
    plan = plan_memory([Request(f"t{i}", 4, i, i + 2) for i in range(100)])
    with pytest.raises(PlanError) as caught:
        check_memory_plan(moved(plan, 90, plan.addresses[89]))
    lines = str(caught.value).splitlines()
    assert [line.split()[1] for line in lines if line.startswith(">>")] == ["t89", "t90"]
    assert lines[-1] == "   and 58 more"


@pytest.mark.slow
def test_any_block_moved_onto_a_neighbour_is_noticed() -> None:
    """Against a comparison of all pairs, byte by byte."""
    dice = random.Random(3)
    found = {True: 0, False: 0}
    for _ in range(300):
        plan = plan_memory(random_requests(dice, dice.randint(2, 12)))
        index = dice.randrange(len(plan.requests))
        unit = math.gcd(*(request.num_bytes for request in plan.requests))
        one = moved(plan, index, dice.randrange(0, plan.peak, unit))
        cells = [
            (time, byte)
            for request, address in zip(one.requests, one.addresses, strict=True)
            for time in range(request.start, request.stop)
            for byte in range(address, address + request.num_bytes)
        ]
        shares = len(set(cells)) < len(cells)
        found[shares] += 1
        if shares:
            with pytest.raises(PlanError, match="share memory"):
                check_memory_plan(one)
        else:
            check_memory_plan(replace(one, is_optimal=one.peak == one.bound))
    assert min(found.values()) > 30


@pytest.mark.parametrize(
    ("damaged", "law"),
    [
        (replace(TWO, levels={"forward": LEVEL}), "layer 0 backward is the block of a pass without a plan"),
        (replace(TWO, levels={**TWO.levels, "backward": replace(LEVEL, bound=1)}), "the liveness bound"),
        (replace(TWO, model=replace(MODEL, bound=1)), "the liveness bound"),
        (
            replace(TWO, model=plan_memory([Request("layer 3 forward", 40, 0, 4)])),
            "has 40 bytes, but its pass needs 48",
        ),
        (
            replace(TWO, model=plan_memory([Request("layer 3 forward", 56, 0, 4)])),
            "has 56 bytes, but its pass needs 48",
        ),
        (
            replace(TWO, model=plan_memory([Request("layer 3 forward", 48, 2, 4)])),
            "exists for 2 events, but its pass takes 3",
        ),
    ],
)
def test_each_pass_fits_in_its_block(damaged: TwoLevelPlan, law: str) -> None:
    check_two_level_plan(TWO)
    with pytest.raises(PlanError) as caught:
        check_two_level_plan(damaged)
    assert law in str(caught.value)
