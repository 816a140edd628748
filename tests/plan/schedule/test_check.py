"""Validator of slice schedules: it accepts a thousand valid schedules and refuses every invalid schedule."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.schedule.actions import Action, SliceSchedule, seq1f1b_schedule, slice_group_size
from bytescale_ext.plan.schedule.check import check_slice_schedule
from bytescale_ext.plan.schedule.messages import check_messages, received_actions
from bytescale_ext.plan.schedule.simulate import peak_in_flight, simulate_slices
from bytescale_ext.plan.schedule.slices import PARTITIONS, slice_costs, slice_lengths
from bytescale_ext.plan.step.sizes import Slicing
from tests.sample import seeds

NUM_RANDOM = 300


def random_schedule(rng: random.Random) -> SliceSchedule:
    """Draw any sizes and orders without virtual stages; with virtual stages, whole groups and half-full last groups."""
    while True:
        p, m, k = rng.randint(1, 6), rng.randint(1, 5), rng.randint(1, 8)
        v = rng.choice((1, 1, 2, 3)) if p > 2 and m * k < 24 else 1
        group = slice_group_size(p, k) + k * rng.choice((0, 0, 1))
        rest = m * k % group
        if v == 1 or (m * k >= group and (not rest or rest >= p)):
            return seq1f1b_schedule(p, m, Slicing(k, eager=v == 1 and rng.random() < 0.5), v, group)


def random_lengths(rng: random.Random, num_slices: int) -> tuple[int, ...]:
    partition = rng.choice((*PARTITIONS, "explicit"))
    if partition == "explicit":
        return tuple(rng.randint(1, 50) for _ in range(num_slices))
    return slice_lengths(rng.randint(num_slices, 500), num_slices, partition, CostModel(0.1, 1.0))


@pytest.mark.slow
@pytest.mark.parametrize("part", seeds(10))
def test_random_schedules_are_sound_and_run(part: int) -> None:
    rng = random.Random(part)
    for _ in range(NUM_RANDOM // 10):
        schedule = random_schedule(rng)
        check_slice_schedule(schedule)
        p, m, v = schedule.num_stages, schedule.num_micro_batches, schedule.num_chunks
        costs = slice_costs(random_lengths(rng, schedule.num_slices), CostModel(0.1, 1.0))
        result = simulate_slices(schedule, lambda stage, action, costs=costs: costs[action.slice_index])
        assert result.makespan >= max(result.busy)
        assert 0 <= result.bubble < 1
        assert max(result.busy) == pytest.approx(2 * m * v * sum(costs))
        assert [peak_in_flight(schedule, stage) for stage in range(p)] == sorted(
            (peak_in_flight(schedule, stage) for stage in range(p)), reverse=True
        )


def with_stage(schedule: SliceSchedule, stage: int, actions: list[Action]) -> SliceSchedule:
    stages = list(schedule.stages)
    stages[stage] = tuple(actions)
    return replace(schedule, stages=tuple(stages))


@pytest.mark.parametrize(
    "sizes",
    [
        (2, 2, Slicing(2), 1),
        (3, 2, Slicing(3), 1),
        (1, 2, Slicing(3), 1),
        (3, 2, Slicing(3), 2),
        (3, 3, Slicing(3, eager=True), 1),
    ],
)
def test_every_swap_of_neighbours_is_refused(sizes: tuple[Any, ...]) -> None:
    """Swapping any two neighbouring actions of a stage is refused, because Megatron runs only this order."""
    schedule = seq1f1b_schedule(*sizes)
    check_slice_schedule(schedule)
    for stage in range(schedule.num_stages):
        for index in range(len(schedule.stages[stage]) - 1):
            actions = list(schedule.stages[stage])
            actions[index : index + 2] = reversed(actions[index : index + 2])
            if actions[index].micro_batch != actions[index + 1].micro_batch and sizes[0] == 1:
                continue  # a single stage may run its micro-batches in any order
            with pytest.raises(PlanError):
                check_slice_schedule(with_stage(schedule, stage, actions))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a[:-1], "B1.0 is missing"),
        (lambda a: [*a, a[0]], "F0.0 runs more than once"),
        (lambda a: [*a, Action("F", 7, 0)], "F7.0 does not belong to this schedule"),
        (lambda a: [a[1], a[0], *a[2:]], "F0.1 runs before F0.0"),
        (lambda a: sorted(a, key=lambda x: x.kind == "B"), "B0.1 is where|has a"),
        (lambda a: sorted(a, key=lambda x: x.kind == "F"), "B0.1 runs before F0.1"),
    ],
)
def test_broken_rows_are_marked(change, message: str) -> None:
    schedule = seq1f1b_schedule(2, 2, Slicing(2))
    with pytest.raises(PlanError, match=message) as error:
        check_slice_schedule(with_stage(schedule, 1, list(change(list(schedule.stages[1])))))
    marked = [line for line in str(error.value).splitlines() if line.endswith("<-- here")]
    assert len(marked) == 1
    assert marked[0].startswith("stage 1 ")


def test_neighbours_with_other_orders_are_refused() -> None:
    """Both rows are valid separately, but one side sends a slice when the other expects another slice."""
    schedule = seq1f1b_schedule(2, 2)
    other = [a._replace(micro_batch=1 - a.micro_batch) for a in schedule.stages[1]]
    with pytest.raises(PlanError, match=r"it expects B0.0, but its neighbour sends B1.0"):
        check_slice_schedule(with_stage(schedule, 1, other))


def test_a_group_that_cuts_micro_batches_is_refused() -> None:
    """Megatron's order for 4 stages, 3 slices and its own group of 4 is refused: backward passes get wrong slices."""
    uncut = seq1f1b_schedule(4, 12, num_chunks=2)  # groups of 4 units
    stages = tuple(
        tuple(
            Action(a.kind, a.micro_batch // 3, a.micro_batch % 3 if a.kind == "F" else 2 - a.micro_batch % 3, a.chunk)
            for a in stage
        )
        for stage in uncut.stages
    )
    broken = SliceSchedule(4, 4, Slicing(3), 2, 4, stages)
    with pytest.raises(PlanError):
        check_slice_schedule(broken)


def test_a_circle_of_waiting_stages_is_found() -> None:
    schedule = seq1f1b_schedule(2, 2)
    backward_first = [schedule.stages[0][i] for i in (0, 3, 1, 2)]  # stage 0 wants a gradient of a later micro-batch
    with pytest.raises(PlanError, match="wait for each other forever"):
        simulate_slices(with_stage(schedule, 0, backward_first), lambda stage, action: 1.0)


def test_messages_that_block_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group smaller than the pipeline works with buffered messages, but not with blocking messages."""
    monkeypatch.setattr("bytescale_ext.plan.schedule.actions.check_groups", lambda *sizes: None)
    schedule = seq1f1b_schedule(3, 4, num_chunks=2, group_size=2)
    simulate_slices(schedule, lambda stage, action: 1.0)
    with pytest.raises(PlanError, match="messages wait for each other forever: stage 0 at"):
        check_messages(schedule)


@pytest.mark.parametrize("sizes", [(3, 2, 3, 1), (4, 4, 3, 2)])
def test_receivers_know_every_slice(sizes: tuple[int, int, int, int]) -> None:
    p, m, k, v = sizes
    schedule = seq1f1b_schedule(p, m, Slicing(k), v)
    for stage in range(p):
        forward, backward = received_actions(schedule, stage)
        assert len(forward) == m * k * (v - (stage == 0))
        assert len(backward) == m * k * (v - (stage == p - 1))
        assert len(set(forward)) == len(forward)
        assert {action.kind for action in backward} <= {"B"}
    first, last = seq1f1b_schedule(2, 2, Slicing(2)).stages
    assert received_actions(seq1f1b_schedule(2, 2, Slicing(2)), 1)[0] == tuple(
        action for action in last if action.kind == "F"
    )
    assert received_actions(seq1f1b_schedule(2, 2, Slicing(2)), 0)[1] == tuple(
        action for action in first if action.kind == "B"
    )
    assert received_actions(seq1f1b_schedule(1, 2, Slicing(2)), 0) == ((), ())
