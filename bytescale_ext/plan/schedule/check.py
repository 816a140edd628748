"""The validator of pipeline schedules.

It shares no code with ``seq1f1b_schedule`` and reads only the actions. A simulation checks the data dependencies, and
``check_messages`` the messages.
"""

from __future__ import annotations

from functools import cache

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.schedule.actions import KINDS, Action, SliceSchedule, seq1f1b_schedule
from bytescale_ext.plan.schedule.messages import check_messages, incoming
from bytescale_ext.plan.schedule.simulate import peak_in_flight, simulate_slices
from bytescale_ext.plan.step.sizes import Slicing


@cache
def checked_schedule(num_stages: int, num_micro_batches: int, slicing: Slicing, num_chunks: int = 1) -> SliceSchedule:
    """Return the Seq1F1B schedule of these sizes after checking it. Raises as ``seq1f1b_schedule``."""
    schedule = seq1f1b_schedule(num_stages, num_micro_batches, slicing, num_chunks)
    check_slice_schedule(schedule)
    return schedule


def check_slice_schedule(schedule: SliceSchedule) -> None:
    """Raise PlanError unless the schedule satisfies every rule. The message marks the row of the violation.

    1. Each stage runs every (micro-batch, slice, chunk) forward once, and backward once after it.
    2. In a micro-batch and chunk, forwards run by ascending slice and backwards by descending slice: a slice needs the
       keys and values of earlier slices, and their gradients from later slices.
    3. Forwards come first, then forwards and backwards alternate, then backwards remain. Megatron's functions run no
       other order.
    4. Both ends of a connection see the same slices in the same order, so they agree on every shape.
    5. No stage waits forever, whether messages are buffered or block both ends.
    6. No stage holds more slices than ``SliceSchedule.peak_slices``.
    7. With zero bubble, the weight gradients of each slice run after its backward pass on the same stage, in the order
       of the backward passes.
    """
    if len(schedule.stages) != schedule.num_stages:
        raise PlanError(f"{len(schedule.stages)} rows for {schedule.num_stages} stages\n{schedule}")
    for stage in range(schedule.num_stages):
        _check_complete(schedule, stage)
        _check_stage_order(schedule, stage)
    for stage in range(schedule.num_stages):
        _check_connections(schedule, stage)
    simulate_slices(schedule, lambda stage, action: 1.0)
    check_messages(schedule)
    for stage in range(schedule.num_stages):
        peak, allowed = peak_in_flight(schedule, stage), schedule.peak_slices(stage)
        if peak > allowed:
            text = f"it stores the activations of {peak:.0f} slices at the same time, but at most {allowed} are allowed"
            raise _broken(schedule, stage, text)


def _broken(schedule: SliceSchedule, stage: int, law: str) -> PlanError:
    """Return the error of a stage that violates a rule, with the printed schedule."""
    rows = str(schedule).splitlines()
    rows[stage + 1] += "   <-- here"
    return PlanError("\n".join((f"stage {stage}: {law}", *rows)))


def _check_complete(schedule: SliceSchedule, stage: int) -> None:
    expected = {
        Action(kind, micro_batch, index, chunk)
        for kind in KINDS[: 2 + schedule.slicing.zero_bubble]
        for micro_batch in range(schedule.num_micro_batches)
        for index in range(schedule.num_slices)
        for chunk in range(schedule.num_chunks)
    }
    actions = schedule.stages[stage]
    if missing := expected - set(actions):
        raise _broken(schedule, stage, f"{min(missing)} is missing")
    if unknown := set(actions) - expected:
        raise _broken(schedule, stage, f"{min(unknown)} does not belong to this schedule")
    if len(actions) > len(expected):
        raise _broken(schedule, stage, f"{next(a for a in actions if actions.count(a) > 1)} runs more than once")


def _check_stage_order(schedule: SliceSchedule, stage: int) -> None:
    done: set[Action] = set()
    for action in schedule.stages[stage]:
        required = []
        if action.kind == "F" and action.slice_index:
            required = [action._replace(slice_index=action.slice_index - 1)]
        if action.kind == "B":
            required = [action._replace(kind="F")]
            if action.slice_index < schedule.num_slices - 1:
                required.append(action._replace(slice_index=action.slice_index + 1))
        if action.kind == "W":
            required = [action._replace(kind="B")]
        for other in required:
            if other not in done:
                raise _broken(schedule, stage, f"{action} runs before {other}")
        done.add(action)
    num_first, num_forwards = schedule.num_first_forwards(stage), schedule.num_forwards
    kinds = "F" * num_first + "FB" * (num_forwards - num_first) + "B" * num_first
    passes = [action for action in schedule.stages[stage] if action.kind != "W"]
    for action, kind in zip(passes, kinds, strict=True):
        if action.kind != kind:
            raise _broken(schedule, stage, f"Megatron's schedule has a {kind} in the place of {action}")
    backwards = [action for action in passes if action.kind == "B"]
    weights = [action for action in schedule.stages[stage] if action.kind == "W"]
    for action, backward in zip(weights, backwards, strict=False):
        if action._replace(kind="B") != backward:
            raise _broken(schedule, stage, f"{action} runs instead of the weight gradients of {backward}")


def _check_connections(schedule: SliceSchedule, stage: int) -> None:
    for kind in ("F", "B"):
        sent = [message.action for message in incoming(schedule, stage, kind)]
        receivers = set(sent)
        received = [action for action in schedule.stages[stage] if action.kind == kind and action in receivers]
        if sent != received:
            wrong = next(pair for pair in zip(sent, received, strict=True) if pair[0] != pair[1])
            raise _broken(schedule, stage, f"it expects {wrong[1]}, but its neighbour sends {wrong[0]}")
