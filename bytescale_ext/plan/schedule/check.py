"""A validator of pipeline schedules.

It shares no code with ``seq1f1b_schedule`` and reads nothing but the actions. Data dependencies are checked by a
simulation, messages by ``check_messages``.
"""

from __future__ import annotations

from functools import cache

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.schedule.actions import KINDS, Action, SliceSchedule, seq1f1b_schedule
from bytescale_ext.plan.schedule.messages import check_messages, incoming
from bytescale_ext.plan.schedule.simulate import peak_held, simulate_slices
from bytescale_ext.plan.step.sizes import Slicing


@cache
def checked_schedule(num_stages: int, num_micro_batches: int, slicing: Slicing, num_chunks: int = 1) -> SliceSchedule:
    """Return the checked Seq1F1B schedule of these sizes, made once. Raises as ``seq1f1b_schedule``."""
    schedule = seq1f1b_schedule(num_stages, num_micro_batches, slicing, num_chunks)
    check_slice_schedule(schedule)
    return schedule


def check_slice_schedule(schedule: SliceSchedule) -> None:
    """Check a schedule, or raise PlanError with the printed table and the bad row marked.

    1. Each stage runs every (micro-batch, slice, chunk) forward once and backward once, the backward later.
    2. Within a micro-batch and chunk, forwards run by ascending slice and backwards by descending slice: a slice needs
       the keys and values of earlier slices, and their gradients from later slices.
    3. Forwards come first, then forwards and backwards alternate, then backwards remain: Megatron's functions run no
       other order.
    4. Both ends of a connection see the same slices in the same order, so they agree on every shape.
    5. No stage waits for ever, whether messages wait in a buffer or block both ends.
    6. No stage holds more slices than ``SliceSchedule.peak_slices``.
    7. Where backward passes are split, their weight gradients run later on the same stage, in the order of the
       backward passes.
    """
    if len(schedule.stages) != schedule.num_stages:
        raise PlanError(f"{len(schedule.stages)} rows for {schedule.num_stages} stages\n{schedule}")
    for stage in range(schedule.num_stages):
        _check_complete(schedule, stage)
        _check_order(schedule, stage)
    for stage in range(schedule.num_stages):
        _check_connections(schedule, stage)
    simulate_slices(schedule, lambda stage, action: 1.0)
    check_messages(schedule)
    for stage in range(schedule.num_stages):
        held, allowed = peak_held(schedule, stage), schedule.peak_slices(stage)
        if held > allowed:
            raise _broken(schedule, stage, f"it holds the activations of {held:.0f} slices at once, not {allowed}")


def _broken(schedule: SliceSchedule, stage: int, what: str) -> PlanError:
    rows = str(schedule).splitlines()
    rows[stage + 1] += "   <-- here"
    return PlanError("\n".join((f"stage {stage}: {what}", *rows)))


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


def _check_order(schedule: SliceSchedule, stage: int) -> None:
    done: set[Action] = set()
    for action in schedule.stages[stage]:
        before = []
        if action.kind == "F" and action.slice_index:
            before = [action._replace(slice_index=action.slice_index - 1)]
        if action.kind == "B":
            before = [action._replace(kind="F")]
            if action.slice_index < schedule.num_slices - 1:
                before.append(action._replace(slice_index=action.slice_index + 1))
        if action.kind == "W":
            before = [action._replace(kind="B")]
        for need in before:
            if need not in done:
                raise _broken(schedule, stage, f"{action} runs before {need}")
        done.add(action)
    num_first, num_forwards = schedule.num_first_forwards(stage), schedule.num_forwards
    kinds = "F" * num_first + "FB" * (num_forwards - num_first) + "B" * num_first
    passes = [action for action in schedule.stages[stage] if action.kind != "W"]
    for action, kind in zip(passes, kinds, strict=True):
        if action.kind != kind:
            raise _broken(schedule, stage, f"Megatron's schedule has a {kind} where {action} is")
    backwards = [action for action in passes if action.kind == "B"]
    weights = [action for action in schedule.stages[stage] if action.kind == "W"]
    for action, backward in zip(weights, backwards, strict=False):
        if action._replace(kind="B") != backward:
            raise _broken(schedule, stage, f"{action} runs where the weight gradients of {backward} are due")


def _check_connections(schedule: SliceSchedule, stage: int) -> None:
    for kind in ("F", "B"):
        sent = [message.action for message in incoming(schedule, stage, kind)]
        of_others = set(sent)
        taken = [action for action in schedule.stages[stage] if action.kind == kind and action in of_others]
        if sent != taken:
            wrong = next(pair for pair in zip(sent, taken, strict=True) if pair[0] != pair[1])
            raise _broken(schedule, stage, f"it takes {wrong[1]} where its neighbour sends {wrong[0]}")
