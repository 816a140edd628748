"""Deferred weight gradients: their positions, and the memory of stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.schedule.actions import Action, SliceSchedule, parse_schedule, seq1f1b_schedule
from bytescale_ext.plan.schedule.check import check_slice_schedule
from bytescale_ext.plan.schedule.messages import received_actions
from bytescale_ext.plan.schedule.simulate import peak_in_flight, simulate_slices
from bytescale_ext.plan.step.sizes import Slicing

WHOLE = Slicing(zero_bubble=True)
SIZES = [(p, m, k, eager) for p in (2, 3, 4, 7) for m in (1, 2, 5, 9) for k in (1, 3, 4) for eager in (False, True)]


def makespan(schedule: SliceSchedule, backward: float = 1.0) -> float:
    return simulate_slices(schedule, lambda _, action: backward if action.kind == "B" else 1.0).makespan


def test_the_order_of_two_stages() -> None:
    schedule = seq1f1b_schedule(2, 3, WHOLE)
    assert str(schedule).splitlines() == [
        "num_stages 2 num_micro_batches 3 num_slices 1 num_chunks 1 group_size 1 eager 0 zero_bubble 1",
        "stage 0   F0.0 F1.0 B0.0 W0.0 F2.0 B1.0 W1.0 B2.0 W2.0",
        "stage 1   F0.0 B0.0 F1.0 B1.0 W0.0 F2.0 B2.0 W1.0 W2.0",
    ]
    assert parse_schedule(str(schedule)) == schedule


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 8)])
def test_whole_micro_batches_of_equal_times_are_zb_h1(p: int, m: int) -> None:
    """The idle time is (p - 1)(F + B - W), a third of 1F1B's idle time (Qi et al. 2023, Table 2)."""
    assert makespan(seq1f1b_schedule(p, m, WHOLE)) == 3 * m + p - 1
    assert makespan(seq1f1b_schedule(p, m), backward=2.0) == 3 * (m + p - 1)


@pytest.mark.parametrize(("p", "m", "k", "eager"), SIZES)
def test_no_stage_holds_more_than_the_first_without(p: int, m: int, k: int, eager: bool) -> None:
    """The peak is not exceeded slice by slice, so it holds for any tokens of slices. The schedule is never slower."""
    slicing = Slicing(k, eager=eager)
    plain, split = (seq1f1b_schedule(p, m, replace(slicing, zero_bubble=on)) for on in (False, True))
    check_slice_schedule(split)
    weights = [float(2**index) for index in range(k)]
    most = peak_in_flight(plain, 0, weights)
    assert all(peak_in_flight(split, stage, weights) <= most for stage in range(p))
    assert makespan(split) <= makespan(plain, backward=2.0)
    for stage in range(p):
        assert [one for one in split.stages[stage] if one.kind != "W"] == list(plain.stages[stage])
        assert received_actions(split, stage) == received_actions(plain, stage)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: [one for one in a if one != Action("W", 1, 0)], "W1.0 is missing"),
        (lambda a: [*a, Action("W", 1, 0)], "W1.0 runs more than once"),
        (lambda a: [Action("W", 0, 0), *(one for one in a if one != Action("W", 0, 0))], "W0.0 runs before B0.0"),
        (lambda a: [one._replace(micro_batch=1 - one.micro_batch) if one.kind == "W" else one for one in a],
         "W1.0 runs (before B1.0|instead of the weight gradients of B0.0)"),
        (lambda a: sorted(a, key=lambda one: one.kind == "W"), "of 3 slices at the same time, but at most 2"),
    ],
)  # fmt: skip
def test_broken_rows_are_refused(change, message: str) -> None:  # type: ignore[no-untyped-def]
    schedule = seq1f1b_schedule(2, 3, WHOLE)
    first = list(schedule.stages[0])
    if "W1.0 runs (" in message:
        schedule, first = seq1f1b_schedule(2, 2, WHOLE), list(seq1f1b_schedule(2, 2, WHOLE).stages[0])
    broken = replace(schedule, stages=(tuple(change(first)), *schedule.stages[1:]))
    with pytest.raises(PlanError, match=message):
        check_slice_schedule(broken)


def test_weight_gradients_of_whole_backward_passes_do_not_belong() -> None:
    schedule = seq1f1b_schedule(2, 2)
    stages = ((*schedule.stages[0], Action("W", 0, 0)), schedule.stages[1])
    with pytest.raises(PlanError, match=r"W0.0 does not belong to this schedule"):
        check_slice_schedule(replace(schedule, stages=stages))
