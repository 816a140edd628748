"""The sends and receives of a schedule of slices, in the batches of Megatron's schedules.

Megatron 0.19.2 posts a batch of messages after each forward or backward, and waits for the whole batch. A message
completes once both sides have posted it. ``check_messages`` runs the batches of all stages against each other, and
``received_actions`` names the action that takes each received tensor, in order.

With ``Slicing.receives_ahead`` a stage posts each receive one batch earlier than Megatron, and waits for it when
Megatron asks for it (``p2p_communication.ReceiveAheadP2PCommunicator``). With virtual stages messages overlap with
passes (``OverlappedP2PCommunicator``): a stage posts each message no later than in these batches, and waits for it no
earlier. ``check_messages`` assumes that stages wait immediately, which is stricter.

Weight gradients (W) send and receive nothing. They run after the messages of the previous pass are posted, and before
the stage waits for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bytescale_ext.errors import PlanError
from bytescale_ext.plan.schedule.actions import Action, SliceSchedule, chunk_turns


class Message(NamedTuple):
    """The output of an action on its way to the next stage (forward) or the previous stage (backward).

    Attributes:
        source, target: the sending and the receiving stage.
        action: the action that takes the output.
    """

    source: int
    target: int
    action: Action


Batch = frozenset[Message]


def outgoing(schedule: SliceSchedule, stage: int, action: Action) -> Message | None:
    """Return the message with the output of an action, or None at the ends of the model."""
    is_forward = action.kind == "F"
    last = schedule.num_stages - 1
    target, chunk = stage + (1 if is_forward else -1), action.chunk
    if not 0 <= target <= last:
        target, chunk = (0, chunk + 1) if is_forward else (last, chunk - 1)
    if not 0 <= chunk < schedule.num_chunks:
        return None
    return Message(stage, target, action._replace(chunk=chunk))


def incoming(schedule: SliceSchedule, stage: int, kind: str) -> tuple[Message, ...]:
    """Return all messages to a stage, forward ("F") or backward ("B"), in the order of the sender."""
    source = (stage - 1 if kind == "F" else stage + 1) % schedule.num_stages
    sent = (outgoing(schedule, source, action) for action in schedule.stages[source] if action.kind == kind)
    return tuple(message for message in sent if message is not None and message.target == stage)


def received_actions(schedule: SliceSchedule, stage: int) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    """Return the actions that take the tensors that a stage receives, from the previous and from the next stage."""
    forward, backward = (tuple(message.action for message in incoming(schedule, stage, kind)) for kind in "FB")
    return forward, backward


def check_messages(schedule: SliceSchedule) -> None:
    """Run the batches of all stages against each other. A stage waits until its whole batch is complete.

    Raises:
        PlanError: a batch waits forever, for example because both sides expect different slices.
    """
    if schedule.num_stages == 1:
        return
    batches = [list(_batches(schedule, stage)) for stage in range(schedule.num_stages)]
    nexts = [0] * schedule.num_stages
    posted: Counter[Message] = Counter()
    for stage_batches in batches:
        posted.update(stage_batches[0] if stage_batches else ())
    has_moved = True
    while has_moved:
        has_moved = False
        for stage, stage_batches in enumerate(batches):
            count = len(stage_batches)
            while nexts[stage] < count and all(posted[message] == 2 for message in stage_batches[nexts[stage]]):
                nexts[stage] += 1
                has_moved = True
                posted.update(stage_batches[nexts[stage]] if nexts[stage] < count else ())
    stuck = [stage for stage, stage_batches in enumerate(batches) if nexts[stage] < len(stage_batches)]
    if stuck:
        texts = (
            f"stage {stage} at {', '.join(map(_message_text, sorted(batches[stage][nexts[stage]])))}" for stage in stuck
        )
        raise PlanError(f"messages wait for each other forever: {'; '.join(texts)}\n{schedule}")


def _message_text(message: Message) -> str:
    return f"{message.source}->{message.target} {message.action}"


class _StageMessages:
    """The incoming messages of one stage, taken in order."""

    def __init__(self, schedule: SliceSchedule, stage: int) -> None:
        self.schedule, self.stage = schedule, stage
        self.forward = iter(incoming(schedule, stage, "F"))
        self.backward = iter(incoming(schedule, stage, "B"))

    def batch(
        self, sent: Sequence[Action] = (), receives_forward: bool = False, receives_backward: bool = False
    ) -> Batch:
        """Return the messages of the given actions and the next incoming message of each chosen direction."""
        messages = {outgoing(self.schedule, self.stage, action) for action in sent}
        if receives_forward:
            messages.add(next(self.forward, None))
        if receives_backward:
            messages.add(next(self.backward, None))
        return frozenset(message for message in messages if message is not None)


def _batches(schedule: SliceSchedule, stage: int) -> Iterator[Batch]:
    """Yield the non-empty batches of a stage."""
    make = _batches_of_one_chunk if schedule.num_chunks == 1 else _batches_of_chunks
    return (batch for batch in make(schedule, stage) if batch)


def _batches_of_one_chunk(schedule: SliceSchedule, stage: int) -> Iterator[Batch]:
    """Yield the batches of ``forward_backward_pipelining_without_interleaving``."""
    actions = [action for action in schedule.stages[stage] if action.kind != "W"]
    messages = _StageMessages(schedule, stage)
    num_first = schedule.num_first_forwards(stage)
    steady, last = actions[num_first : len(actions) - num_first], actions[len(actions) - num_first :]
    yield messages.batch(receives_forward=schedule.slicing.receives_ahead)
    for action in actions[:num_first]:
        yield messages.batch(receives_forward=True)
        yield messages.batch([action])
    if steady:
        yield messages.batch(receives_forward=True)
    for index, action in enumerate(steady):
        if action.kind == "F":
            yield messages.batch([action], receives_backward=True)
        else:
            yield messages.batch([action], receives_forward=index < len(steady) - 1)
    for action in last:
        yield messages.batch(receives_backward=True)
        yield messages.batch([action])


def _batches_of_chunks(schedule: SliceSchedule, stage: int) -> Iterator[Batch]:
    """Yield the batches of ``forward_backward_pipelining_with_interleaving`` without overlapped messages."""
    actions = schedule.stages[stage]
    messages = _StageMessages(schedule, stage)
    forwards = [action for action in actions if action.kind == "F"]
    backwards = [action for action in actions if action.kind == "B"]
    num_first, total = schedule.num_first_forwards(stage), len(forwards)
    last_stage = schedule.num_stages - 1
    forward_comes, backward_comes = (_receives_after(schedule, stage, kind) for kind in "FB")
    if stage:
        yield messages.batch(receives_forward=True)
    for turn in range(num_first):
        into_steady = turn == num_first - 1 and num_first < total
        yield messages.batch([forwards[turn]], forward_comes[turn], into_steady and stage < last_stage)
    for turn in range(total - num_first):
        ahead = turn + num_first
        yield messages.batch([forwards[ahead], backwards[turn]], forward_comes[ahead], backward_comes[turn])
    if num_first == total and stage < last_stage:
        yield messages.batch(receives_backward=True)
    for turn in range(total - num_first, total):
        yield messages.batch([backwards[turn]], receives_backward=backward_comes[turn])


def _receives_after(schedule: SliceSchedule, stage: int, kind: str) -> tuple[bool, ...]:
    """Return whether the stage receives a tensor after its forward (or backward) pass, for each turn.

    The first stage (backward: the last stage) receives the message that the stage at the other end of the pipeline sent
    p - 1 turns earlier, if there is one.
    """
    units = schedule.num_micro_batches * schedule.num_slices
    _, chunks = chunk_turns(units, schedule.num_chunks, schedule.group_size)
    if stage != (0 if kind == "F" else schedule.num_stages - 1):
        return (True,) * (len(chunks) - 1) + (False,)
    sent = (chunks != schedule.num_chunks - 1).tolist()
    return (*tuple(([False] * (schedule.num_stages - 1) + sent)[: len(chunks) - 1]), False)
