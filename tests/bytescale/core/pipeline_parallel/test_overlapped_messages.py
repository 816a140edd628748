"""Messages of virtual stages in slices, overlapped with passes, in Megatron's own schedule function.

Traces of all stages are replayed with the strictest rules. A message completes only when both ends have posted it. An
end posts on a link only when the previous message on that link is complete, as in a single queue of a GPU. Then
processes exchange real messages with random delays.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from bytescale_ext.plan.schedule.actions import Action, SliceSchedule
from bytescale_ext.plan.schedule.check import checked_schedule
from bytescale_ext.plan.schedule.messages import received_actions
from bytescale_ext.plan.step.sizes import Slicing
from tests.harness import run_ranks
from tests.sample import sampled

pytestmark = pytest.mark.ranks

LINKS = ("outputs_in", "outputs_out", "gradients_in", "gradients_out")
HIDDEN = 64


class Case(NamedTuple):
    """Numbers of stages, micro-batches, slices and virtual stages."""

    num_stages: int
    num_micro_batches: int
    num_slices: int
    num_chunks: int = 2

    @property
    def schedule(self) -> SliceSchedule:
        return checked_schedule(self.num_stages, self.num_micro_batches, Slicing(self.num_slices), self.num_chunks)


CASES = [
    Case(2, 2, 2), Case(2, 4, 3, 3), Case(3, 3, 3), Case(3, 2, 2), Case(3, 4, 8), Case(4, 4, 3), Case(4, 2, 2, 4),
    Case(4, 8, 4), Case(5, 2, 3), Case(8, 4, 2, 2), Case(8, 2, 8),
]  # fmt: skip


class Event(NamedTuple):
    """Action of a stage: a pass, or "post" or "wait" for the ``number``-th message of a link."""

    what: str
    link: str = ""
    number: int = 0


def expected_of(schedule: SliceSchedule, stage: int) -> Any:
    from megatron.bytescale.core.pipeline_parallel.p2p_communication import ExpectedTensors

    rows = [tuple(action.slice_index + 1 for action in actions) for actions in received_actions(schedule, stage)]
    return ExpectedTensors(rows[0], rows[1], 1, schedule.num_first_forwards(stage))


def trace(case: Case, stage: int, is_overlapped: bool, forward_only: bool) -> list[Event]:
    """Return the actions of a stage, with Megatron's batches of messages or with overlapped messages."""
    from megatron.core.pipeline_parallel import utils

    from megatron.bytescale.core.pipeline_parallel import p2p_communication as p2p
    from tests.bytescale.core.pipeline_parallel.fake_stage import run_stage, stage_config

    utils.get_pg_rank, utils.get_pg_size = lambda group: group.rank(), lambda group: group.size()
    events: list[Event] = []
    counts: dict[str, int] = defaultdict(int)
    kind = p2p.OverlappedP2PCommunicator if is_overlapped else p2p.ShapedP2PCommunicator

    def post(link: str, rows: int | None = None) -> Any:
        number = counts[link]
        counts[link] += 1
        events.append(Event("post", link, number))
        received = None if rows is None else torch.empty(rows)
        waits = []  # a second wait for a message does nothing
        wait = lambda: waits or (waits.append(1), events.append(Event("wait", link, number)))  # noqa: E731
        return SimpleNamespace(received=received, wait=wait)

    class Recorder(kind):  # type: ignore[misc, valid-type]
        def _start(self, group: str, peer: int, sent: Any, rows: int | None) -> Any:
            return post(group, rows)

        def _communicate_in_line(self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool,
                                 tensor_shape: Any, **_: Any) -> Any:  # fmt: skip
            made = {"outputs_out": tensor_send_next is not None, "gradients_out": tensor_send_prev is not None,
                    "outputs_in": recv_prev, "gradients_in": recv_next}  # fmt: skip
            posted = {link: post(link, 1 if link.endswith("in") else None) for link, is_made in made.items() if is_made}
            for message in posted.values():
                message.wait()
            for side, is_received in ((self._from_previous, recv_prev), (self._from_next, recv_next)):
                if is_received:
                    next(side)
            return *(posted[link].received if link in posted else None for link in ("outputs_in", "gradients_in")), None

    if not is_overlapped:
        Recorder._communicate = Recorder._communicate_in_line
    communicator = object.__new__(Recorder)
    expected = expected_of(case.schedule, stage)
    communicator.config = stage_config(case.schedule, is_overlapped, HIDDEN)
    communicator.pp_group = SimpleNamespace(size=lambda: case.num_stages, rank=lambda: stage)
    communicator.virtual_pipeline_model_parallel_size = case.num_chunks
    communicator._from_previous, communicator._from_next = iter(expected.from_previous), iter(expected.from_next)
    communicator._links, communicator._clock = SimpleNamespace(**{link: link for link in LINKS}), None
    communicator._received, communicator._sent = {}, {}
    communicator.next_rank = communicator.prev_rank = 0

    def passes(action: Action, _: Any) -> torch.Tensor:
        events.append(Event(str(action)))
        return torch.zeros(1)

    run_stage(case.schedule, stage, communicator, passes, forward_only)
    return events


Traces = dict[tuple[Case, bool, bool], list[list[Event]]]


def trace_all(rank: int, world: int) -> Traces:
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])
    ways = [(case, is_overlapped, forward_only) for case in CASES for is_overlapped in (False, True)
            for forward_only in (False, True)]  # fmt: skip
    return {way: [trace(way[0], stage, *way[1:]) for stage in range(way[0].num_stages)] for way in ways}


@pytest.fixture(scope="module")
def traces() -> Traces:
    return run_ranks(trace_all, 1, init_group=False)[0]  # type: ignore[no-any-return]


def other_end(stage: int, link: str, num_stages: int) -> tuple[int, str]:
    """Return the stage at the other end of a link, and its name of the link."""
    to_next = link in ("outputs_out", "gradients_in")
    name, way = link.rsplit("_", 1)
    return (stage + (1 if to_next else -1)) % num_stages, f"{name}_{'in' if way == 'out' else 'out'}"


def finishes(rows: list[list[Event]]) -> bool:
    """Replay the stages together. Returns False for a deadlock."""
    at, posted, moved = [0] * len(rows), [defaultdict(int) for _ in rows], True

    def is_done(stage: int, link: str, number: int) -> bool:
        other, name = other_end(stage, link, len(rows))
        return bool(posted[other][name] > number)

    while moved:
        moved = False
        for stage, row in enumerate(rows):
            while at[stage] < len(row):
                event = row[at[stage]]
                due = event.number - (event.what == "post")
                if event.link and due >= 0 and not is_done(stage, event.link, due):
                    break
                posted[stage][event.link] += event.what == "post"
                at[stage] += 1
                moved = True
    return all(done == len(row) for done, row in zip(at, rows, strict=True))


def test_no_stage_waits_for_ever(traces: Traces) -> None:
    assert all(finishes(rows) for rows in traces.values())


def test_the_replay_finds_what_hangs(traces: Traces) -> None:
    """A stage waits for a gradient before it posts the output of that gradient."""
    case = CASES[2]
    rows = [list(row) for row in traces[case, True, False]]
    wait = next(n for n, event in enumerate(rows[0]) if event[:2] == ("wait", "gradients_in"))
    output = max(n for n, event in enumerate(rows[0][:wait]) if event[:2] == ("post", "outputs_out"))
    assert finishes(rows)
    rows[0].insert(output - case.num_slices * len(rows), rows[0].pop(wait))
    assert not finishes(rows)


def places(row: list[Event]) -> dict[Event, int]:
    """Return the number of passes that a stage has begun at each post and wait."""
    found, num_passes = {}, 0
    for event in row:
        num_passes += not event.link
        found.setdefault(event, num_passes)
    return found


@pytest.mark.parametrize("forward_only", [False, True])
def test_messages_are_posted_no_later_and_waited_for_no_earlier_than_in_line(
    traces: Traces, forward_only: bool
) -> None:
    """So a schedule without deadlock in batches, which each step checks, has none with overlapped messages."""
    earlier = later = 0
    for case in CASES:
        for in_line, overlapped in zip(
            traces[case, False, forward_only], traces[case, True, forward_only], strict=True
        ):
            before, after = places(in_line), places(overlapped)
            assert before.keys() == after.keys()
            assert [event for event in in_line if not event.link] == [event for event in overlapped if not event.link]
            for event, place in before.items():
                assert after[event] <= place if event.what == "post" else after[event] >= place, (case, event)
                earlier += event.what == "post" and after[event] < place
                later += event.what == "wait" and after[event] > place
    assert later > 100
    assert forward_only or earlier > 100


def value_of(case: Case, stage: int, action: Action) -> float:
    """Return a number that identifies an output or gradient by the part of the model that makes it."""
    unit = action.micro_batch * case.num_slices + action.slice_index
    part = action.chunk * case.num_stages + stage
    return float(1 + 2 * (unit * case.num_stages * case.num_chunks + part) + (action.kind == "B"))


def exchange(rank: int, world: int, seeds: list[int]) -> int:
    """Run random schedules over real messages; every pass checks what it received. Returns the messages received."""
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])
    from megatron.bytescale.core.pipeline_parallel.p2p_communication import OverlappedP2PCommunicator
    from tests.bytescale.core.pipeline_parallel.fake_stage import join_stages, run_stage, stage_config

    links, num_received = join_stages(world), 0
    for seed in seeds:
        common, own = random.Random(seed), random.Random(1000 * seed + rank)
        num_slices, num_chunks = common.randint(2, 5), common.randint(2, 3)
        group = -(-world // num_slices)
        case = Case(world, group * common.randint(1, 3), num_slices, num_chunks)
        slow = common.choice((0.0, 0.0005, 0.003))

        def passes(action: Action, received: torch.Tensor | None) -> torch.Tensor:
            nonlocal num_received
            last = case.num_stages * case.num_chunks - 1  # noqa: B023
            part = action.chunk * world + rank
            if part == (0 if action.kind == "F" else last):
                assert received is None
            else:
                before = part - 1 if action.kind == "F" else part + 1
                sent = value_of(case, before % world, action._replace(chunk=before // world))  # noqa: B023
                assert received is not None
                assert received.shape == (action.slice_index + 1, 1, HIDDEN)
                assert bool((received == sent).all()), (case, action, received.flatten()[0], sent)  # noqa: B023
                num_received += 1
            time.sleep(own.random() * slow)  # noqa: B023
            return torch.full((action.slice_index + 1, 1, HIDDEN), value_of(case, rank, action))  # noqa: B023

        config = stage_config(case.schedule, True, HIDDEN)
        expected = expected_of(case.schedule, rank)
        communicator = OverlappedP2PCommunicator(dist.group.WORLD, config, expected, None, links)
        run_stage(case.schedule, rank, communicator, passes, seed % 4 == 3)
    return num_received


@pytest.mark.parametrize("num_stages", sampled([2, 3, 4], [3]))
def test_every_pass_gets_its_message_under_random_delays(num_stages: int) -> None:
    assert min(run_ranks(exchange, num_stages, list(range(8)))) > 100
