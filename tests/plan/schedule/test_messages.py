"""Target of each slice's output, and messages that a stage receives, against the dependencies of the simulator."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.schedule.actions import SliceSchedule, seq1f1b_schedule
from bytescale_ext.plan.schedule.messages import (
    _batches,
    check_messages,
    incoming,
    outgoing,
    received_actions,
)
from bytescale_ext.plan.schedule.simulate import input_actions
from bytescale_ext.plan.step.sizes import Slicing

SIZES = [
    (p, m, Slicing(k, eager=eager), v)
    for p, m, k, v, eager in product((2, 3, 4), (4, 8), (1, 2, 4), (1, 2), (False, True))
    if v == 1 or (p > 2 and (m * k) % p == 0 and not eager)
]


@pytest.fixture(params=SIZES, ids=str)
def schedule(request: pytest.FixtureRequest) -> SliceSchedule:
    try:
        return seq1f1b_schedule(*request.param)
    except ValueError:
        pytest.skip("virtual stages do not run these sizes")


def all_messages(schedule: SliceSchedule) -> list:
    sent = (outgoing(schedule, stage, action) for stage, row in enumerate(schedule.stages) for action in row)
    return [message for message in sent if message is not None]


def test_messages_are_what_actions_need(schedule: SliceSchedule) -> None:
    """There is one message for each dependency on another stage's output, and no other message."""
    wanted = [
        (stage, action)
        for stage, row in enumerate(schedule.stages)
        for action in row
        for source, need in input_actions(schedule, stage, action)
        if need.kind == action.kind
    ]
    assert Counter((message.target, message.action) for message in all_messages(schedule)) == Counter(wanted)


def test_each_message_is_in_one_batch_of_both_sides(schedule: SliceSchedule) -> None:
    posted = Counter(
        (stage, message)
        for stage in range(schedule.num_stages)
        for batch in _batches(schedule, stage)
        for message in batch
    )
    ends = [(stage, one) for one in all_messages(schedule) for stage in (one.source, one.target)]
    assert posted == Counter(ends)
    check_messages(schedule)


def test_stages_receive_in_the_order_in_which_they_work(schedule: SliceSchedule) -> None:
    for stage, row in enumerate(schedule.stages):
        for kind, actions in zip("FB", received_actions(schedule, stage), strict=True):
            got = [message.action for message in incoming(schedule, stage, kind)]
            taken = [action for action in row if action.kind == kind and action in got]
            assert got == taken == list(actions)


def test_a_stage_that_stops_early_leaves_the_other_waiting() -> None:
    schedule = seq1f1b_schedule(2, 2, Slicing(2))
    assert [action.slice_index for action in received_actions(schedule, 0)[1]] == [1, 0, 1, 0]
    with pytest.raises(PlanError, match=r"messages wait for each other forever: stage 0 at 0->1 F1.0"):
        check_messages(replace(schedule, stages=(schedule.stages[0], schedule.stages[1][:3])))
