"""Plans of whole steps: repeated passes are planned once, and every request has its address in the replay."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.memory.check import check_covers, check_two_level_plan
from bytescale_ext.plan.memory.passes import Pass, StepPlans, plan_step
from bytescale_ext.plan.memory.placement import liveness_bound, place_online, plan_memory
from bytescale_ext.plan.memory.plan import Request, TwoLevelPlan
from tests.plan.memory.traces import random_requests


def pipeline_trace(num_warm_up: int = 2, num_micro_batches: int = 4) -> tuple[list[Request], list[Pass]]:
    """Return the requests and passes of two layers of a stage that runs 1F1B.

    A forward pass has two transient requests and leaves one, which the backward pass of its micro-batch frees.
    """
    alive: dict[tuple[int, int], int] = {}
    requests, passes, now = [], [], 0
    order = [("forward", i) for i in range(num_warm_up)]
    for i in range(num_micro_batches):
        order += [("forward", num_warm_up + i)] * (num_warm_up + i < num_micro_batches) + [("backward", i)]
    for kind, micro_batch in order:
        for layer in (0, 1) if kind == "forward" else (1, 0):
            begun, now = now, now + 1
            for size, life in ((512, 3), (1024 + 512 * (micro_batch % 2), 2)):
                requests.append(Request(f"t{now}", size, now, now + life))
                now += 1
            if kind == "forward":
                alive[layer, micro_batch] = len(requests)
                requests.append(Request(f"saved{now}", 2048, now, now + 1))
                now += 2
            else:
                saved = alive.pop((layer, micro_batch))
                requests[saved] = replace(requests[saved], stop=now + 1)
                now += 2
            now += 1
            passes.append(Pass(kind, layer, begun, now))
    assert not alive
    return requests, passes


def test_a_pipeline_with_several_micro_batches_in_flight() -> None:
    requests, passes = pipeline_trace()
    plans = plan_step(requests, passes)
    assert sorted(plans.two.levels) == ["backward", "backward-2", "forward", "forward-2"]
    for plan in (plans.two, TwoLevelPlan({}, plans.one), plans.best):
        check_two_level_plan(plan)
        check_covers(plan, requests)
    assert plans.one.peak == liveness_bound(requests) == plans.one.bound
    assert plans.best.model.peak == min(plans.two.model.peak, plans.one.peak)
    blocks = [request for request in plans.two.model.requests if request.name.startswith("layer ")]
    assert len(blocks) == len(passes) == 16
    assert len(plans.two.model.requests) == 16 + 8


def test_the_lower_peak_wins() -> None:
    low, high = plan_memory([Request("a", 4, 0, 1)]), plan_memory([Request("a", 8, 0, 1)])
    assert StepPlans(TwoLevelPlan({"forward": low}, low), high).best == TwoLevelPlan({"forward": low}, low)
    assert StepPlans(TwoLevelPlan({"forward": low}, high), low).best == TwoLevelPlan({}, low)


def damaged(**changes: Any) -> tuple[TwoLevelPlan, list[Request]]:
    """Return a plan and its step after one change to the requests of the step."""
    requests, passes = pipeline_trace()
    index = changes.pop("index")
    changed = [replace(one, **changes) if i == index else one for i, one in enumerate(requests)]
    return plan_step(requests, passes).two, changed


@pytest.mark.parametrize(
    ("changes", "law"),
    [
        ({"index": 0, "num_bytes": 1024}, "is not in the step, or has another size or life"),
        ({"index": 0, "stop": 5}, "is not in the step, or has another size or life"),
        ({"index": 2, "num_bytes": 4096}, "is not in the step, or has another size or life"),
    ],
)
def test_a_plan_of_another_step_is_noticed(changes: dict[str, Any], law: str) -> None:
    plan, requests = damaged(**changes)
    with pytest.raises(PlanError) as caught:
        check_covers(plan, requests)
    assert law in str(caught.value)
    assert ">>" in str(caught.value)


def test_each_request_has_one_address() -> None:
    requests, passes = pipeline_trace()
    plan = plan_step(requests, passes).two
    more = [*requests, Request("late", 512, 10_000, 10_001)]
    with pytest.raises(PlanError, match=">> late of the step has no address"):
        check_covers(plan, more)
    with pytest.raises(PlanError, match="two requests of the step begin at the same time"):
        check_covers(plan, [*requests, requests[0]])
    missing = [request for request in requests if request.name != "t1"]
    with pytest.raises(PlanError, match="t1 of layer 0 forward is not in the step"):
        check_covers(plan, missing)


def test_addresses_that_share_memory_and_peaks_that_are_not_reached_are_noticed() -> None:
    requests, passes = pipeline_trace()
    two = plan_step(requests, passes).two
    kept = next(i for i, request in enumerate(two.model.requests) if request.name.startswith("saved"))
    block = next(i for i, request in enumerate(two.model.requests) if request.overlaps(two.model.requests[kept])
                 and request.name.startswith("layer"))  # fmt: skip
    addresses = list(two.model.addresses)
    addresses[kept] = addresses[block]
    moved = replace(two, model=replace(two.model, addresses=tuple(addresses)))
    with pytest.raises(PlanError, match="share memory at"):
        check_covers(moved, requests)
    high = replace(two, model=replace(two.model, requests=(*two.model.requests, Request("layer 9 forward", 4, 0, 9)),
                                      addresses=(*two.model.addresses, 1 << 20)))  # fmt: skip
    with pytest.raises(PlanError, match="is not in the step"):
        check_covers(high, requests)
    level = two.levels["forward"]
    taller = replace(level, requests=(*level.requests, Request("unused", 512, 90, 91)), addresses=(0, 512, 1 << 20))
    with pytest.raises(PlanError, match="is not in the step"):
        check_covers(replace(two, levels={**two.levels, "forward": taller}), requests)


def test_the_replay_reaches_the_planned_peak() -> None:
    """A block that is larger than its pass reserves memory that the replay never uses."""
    requests = [Request("a", 512, 1, 2), Request("b", 512, 6, 7)]
    level = plan_memory([Request("a", 512, 1, 2)])
    blocks = [Request("layer 0 forward", 1024, 0, 4), Request("layer 1 forward", 1024, 5, 9)]
    with pytest.raises(PlanError, match=">> the step needs 512 bytes at its addresses, but 1024 are planned"):
        check_covers(TwoLevelPlan({"forward": level}, plan_memory(blocks)), requests)


@pytest.mark.slow
def test_a_plan_is_no_worse_than_an_allocator_that_does_not_know_the_future() -> None:
    dice = random.Random(5)
    better = 0
    for _ in range(200):
        requests = random_requests(dice, dice.randint(1, 30))
        addresses = place_online(requests)
        online = max(a + r.num_bytes for a, r in zip(addresses, requests, strict=True))
        for i, one in enumerate(requests):  # requests that exist together share no memory
            for j in range(i):
                other, first, second = requests[j], addresses[i], addresses[j]
                assert not one.overlaps(other) or first + one.num_bytes <= second or second + other.num_bytes <= first
        peak = plan_memory(requests).peak
        assert liveness_bound(requests) <= peak <= online
        better += peak < online
    assert better > 20


def test_the_smallest_free_part_is_taken_and_neighbours_are_joined() -> None:
    requests = [
        Request("a", 4, 0, 4), Request("b", 1, 1, 99), Request("c", 2, 2, 4), Request("d", 1, 3, 99),
        Request("e", 2, 5, 99),  # fits in the place of c
        Request("f", 3, 6, 8), Request("g", 4, 9, 99),  # in the place of a
        Request("h", 5, 10, 99),  # on top
    ]  # fmt: skip
    assert place_online(requests) == (0, 4, 5, 7, 5, 0, 0, 8)
