"""Replay of the programs of all ranks in virtual time.

A host runs through its program and takes a while for each layer. It waits only where the program says so. The stream
that computes runs kernels in order, each after its launch, and waits for messages where the program says so. A
communicator runs its posts and collectives in order, as NCCL does: each begins when the stream that computes has
reached it and the communicator is free; a message begins when both ends have begun, a collective when all members have.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final

from scripts.bench.cluster.virtual.events import Collective, Event, HostWait, Post, Programs, Step, Wait, Work
from scripts.bench.cluster.virtual.expand import expanded
from scripts.bench.cluster.virtual.flows import Flows
from scripts.bench.cluster.virtual.links import Links
from scripts.bench.cluster.virtual.times import ModelTimes

COMPUTING = ("linear", "attention", "join", "head", "optimizer")
KINDS = (*COMPUTING, "exchange", "stage", "reduction", "waiting", "launch")
"""Where the time of a rank goes: kernels, exposed transfers of rings, of pipelines and of gradients and parameters,
waiting for other ranks, and waiting for the own host."""

MOST_REPEATS: Final = 8
"""Equal layers of a stage that are replayed."""

_EXPOSED = {"keys": "exchange", "sums": "exchange", "stage": "stage", "reduce": "reduction", "gather": "reduction"}
_LINEAR = {"before": "linear", "after": "linear"}


@dataclass(frozen=True)
class StepTimes:
    """Times of one step.

    Attributes:
        lengths: recorded tokens of its documents.
        seconds: time from its begin to its end, on the last rank.
        by_kind: mean seconds of a rank by ``KINDS``.
    """

    lengths: tuple[int, ...]
    seconds: float
    by_kind: dict[str, float]


@dataclass(eq=False, slots=True)
class _Operation:
    """A post or a collective of one rank.

    Attributes:
        ready: when the stream that computes has reached it.
        left: messages that have not ended.
        begun: when the last of its messages, or the collective, has begun on all ranks.
        done: when it has ended.
    """

    rank: int
    event: Post | Collective
    ready: float
    left: int = 0
    begun: float = 0.0
    done: float | None = None


@dataclass(eq=False, slots=True)
class _Meeting:
    """A collective of all its members: operations that have begun, and flows that have not ended."""

    operations: list[_Operation] = field(default_factory=list)
    left: int = 0


@dataclass(eq=False)
class _Rank:
    """The clocks of a rank, in seconds: its host and the stream that computes.

    Attributes:
        program: yields the operations that the rank has to wait for.
        spent: seconds of the current step by ``KINDS``.
        starts: begin of each step, and the end of the last.
        by_step: seconds of each step by ``KINDS``.
    """

    program: Iterator[_Operation]
    host: float = 0.0
    device: float = 0.0
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    starts: list[float] = field(default_factory=list)
    by_step: list[dict[str, float]] = field(default_factory=list)

    def begin_step(self) -> None:
        """Close the current step and begin the next one."""
        if self.starts:
            self.by_step.append(self.spent)
        self.spent = dict.fromkeys(KINDS, 0.0)
        self.starts.append(max(self.host, self.device))

    def compute(self, kind: str, seconds: float) -> None:
        """Run kernels after their launch."""
        if self.host > self.device:
            self.spent["launch"] += self.host - self.device
            self.device = self.host
        self.device += seconds
        self.spent[kind] += seconds

    def wait(self, operation: _Operation) -> None:
        """Let the stream that computes wait for an operation that has ended."""
        assert operation.done is not None
        lost = operation.done - self.device
        if lost > 0:
            kind = _EXPOSED.get(operation.event.kind, "waiting")
            exposed = min(lost, max(0.0, operation.done - operation.begun))
            self.spent[kind] += exposed
            self.spent["waiting"] += lost - exposed
            self.device = operation.done


class Replay:
    """One replay; ``steps`` has its result.

    Raises RuntimeError if ranks wait for each other forever.
    """

    def __init__(self, programs: Programs, times: ModelTimes, links: Links) -> None:
        self._times, self._links = times, links
        self._flows = Flows(links)
        self._coming: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()
        self._queues: dict[tuple[str, int], deque[_Operation]] = defaultdict(deque)
        self._halves: dict[tuple[str, int, int], deque[tuple[bool, _Operation, int]]] = defaultdict(deque)
        self._met: Counter[tuple[str, int]] = Counter()
        self._meetings: dict[tuple[str, int], _Meeting] = defaultdict(_Meeting)
        self._ends: dict[int, Callable[[float], None]] = {}
        self._seconds: dict[Work, float] = {}
        self._ranks = [_Rank(self._run(number, events)) for number, events in enumerate(programs.ranks)]
        self._replay()
        self.steps = self._steps(programs)

    def _replay(self) -> None:
        waiting: dict[int, _Operation] = {}
        runnable = list(range(len(self._ranks)))
        while True:
            for number in runnable:
                operation = next(self._ranks[number].program, None)
                if operation is not None:
                    waiting[number] = operation
            runnable = []
            while not runnable:
                if not self._advance():
                    if waiting:
                        raise RuntimeError(f"ranks wait forever: {[(r, o.event) for r, o in waiting.items()][:4]}")
                    return
                runnable = [number for number, operation in waiting.items() if operation.done is not None]
            for number in runnable:
                del waiting[number]

    def _advance(self) -> bool:
        """Go to the next event; return whether there was one."""
        end = self._flows.next_end()
        if end is not None and (not self._coming or end <= self._coming[0][0]):
            self._ends.pop(self._flows.end())(end)
            return True
        if not self._coming:
            return False
        now, _, act = heapq.heappop(self._coming)
        act(now)
        return True

    def _at(self, time: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._coming, (time, next(self._numbers), act))

    def _run(self, number: int, events: Sequence[Event]) -> Iterator[_Operation]:
        """Run the program of a rank; yield each operation that has not ended where the rank needs it."""
        rank, host, blocks = self._ranks[number], self._times.host, 0
        operations: dict[int, _Operation] = {}
        for event in expanded(events, self._times.repeats):
            if isinstance(event, Work):
                if event.kind in _LINEAR:
                    rank.host += host.layer / 2
                    blocks = 0
                elif event.kind == "attention":
                    rank.host += host.block if blocks else 0.0
                    blocks += 1
                rank.compute(_LINEAR.get(event.kind, event.kind), self._seconds_of(event, number))
            elif isinstance(event, Post | Collective):
                operation = _Operation(number, event, max(rank.device, rank.host))
                operations[event.ticket] = operation
                self._enqueue(operation)
            elif isinstance(event, Wait):
                operation = operations.pop(event.ticket)
                if operation.done is None:
                    yield operation
                rank.wait(operation)
            elif isinstance(event, HostWait):
                rank.host = max(rank.host, rank.device)
            elif isinstance(event, Step):
                rank.begin_step()
        rank.begin_step()

    def _seconds_of(self, work: Work, number: int) -> float:
        if work.kind == "optimizer":
            return self._times.optimizer_seconds(self._stage(number))
        seconds = self._seconds.get(work)
        if seconds is None:
            seconds = self._seconds[work] = self._times.seconds(work)
        return seconds

    def _stage(self, number: int) -> int:
        return number // self._times.num_replicas

    def _enqueue(self, operation: _Operation) -> None:
        queue = self._queues[operation.event.communicator, operation.rank]
        queue.append(operation)
        if len(queue) == 1:
            self._at(operation.ready, partial(self._begin, operation))

    def _begin(self, operation: _Operation, now: float) -> None:
        """Begin an operation on its rank: the communicator is free, and the stream that computes has reached it."""
        if isinstance(operation.event, Collective):
            self._join(operation, operation.event, now)
            return
        operation.left = len(operation.event.messages)
        for message in operation.event.messages:
            ends = (operation.rank, message.peer) if message.is_send else (message.peer, operation.rank)
            halves = self._halves[operation.event.communicator, *ends]
            if halves and halves[0][0] != message.is_send:
                _, other, numbers = halves.popleft()
                assert numbers == message.numbers, f"{operation.event} meets {other.event}"
                self._send(ends, self._times.message_bytes(operation.event.kind, numbers), (operation, other), now)
            else:
                halves.append((message.is_send, operation, message.numbers))

    def _send(self, ends: tuple[int, int], size: float, pair: tuple[_Operation, _Operation], now: float) -> None:
        for operation in pair:
            operation.begun = now

        def end(now: float) -> None:
            for operation in pair:
                operation.left -= 1
                if not operation.left:
                    self._finish(operation, now)

        self._flow(ends, size, now + self._links.latency(*ends), end)

    def _flow(self, ends: tuple[int, int], size: float, begin: float, end: Callable[[float], None]) -> None:
        def act(now: float) -> None:
            number = next(self._numbers)
            self._ends[number] = end
            self._flows.begin(number, *ends, size, now)

        self._at(begin, act)

    def _join(self, operation: _Operation, event: Collective, now: float) -> None:
        """Begin a collective on one rank, and on all of them if the rank is the last."""
        key = (event.communicator, operation.rank)
        self._met[key] += 1
        meeting = self._meetings[event.communicator, self._met[key]]
        meeting.operations.append(operation)
        if len(meeting.operations) < len(event.members):
            return
        for member in meeting.operations:
            member.begun = now
        rounds = math.ceil(math.log2(len(event.members))) if len(event.members) > 1 else 0
        begin = now + rounds * max(self._links.latency(event.members[0], one) for one in event.members)
        size = self._times.collective_bytes(event.kind, event.numbers, self._stage(operation.rank))
        flows = [] if event.kind == "small" else ring_flows(event.members, size, self._links)
        meeting.left = len(flows)

        def end(now: float) -> None:
            meeting.left -= 1
            if meeting.left <= 0:
                for member in meeting.operations:
                    self._finish(member, now)

        if not flows:
            self._at(begin, end)
        for ends, part in flows:
            self._flow(ends, part, begin, end)

    def _finish(self, operation: _Operation, now: float) -> None:
        operation.done = now
        queue = self._queues[operation.event.communicator, operation.rank]
        queue.popleft()
        if queue:
            self._at(max(now, queue[0].ready), partial(self._begin, queue[0]))

    def _steps(self, programs: Programs) -> list[StepTimes]:
        lengths = [event.lengths for event in programs.ranks[0] if isinstance(event, Step)]
        starts = [max(times) for times in zip(*(rank.starts for rank in self._ranks), strict=True)]
        return [
            StepTimes(
                lengths[step],
                starts[step + 1] - starts[step],
                {kind: sum(rank.by_step[step][kind] for rank in self._ranks) / len(self._ranks) for kind in KINDS},
            )
            for step in range(len(lengths))
        ]


def ring_flows(members: Sequence[int], size: float, links: Links) -> list[tuple[tuple[int, int], float]]:
    """Return the ends and bytes of the flows of a reduction or gather of ``size`` bytes.

    Rings run through all members, one ring for each member of a node, and leave a node at another member each, as
    NCCL's do. Nodes with unequal numbers of members have one ring.
    """
    if len(members) < 2:
        return []
    nodes: dict[int, list[int]] = {}
    for member in sorted(members):
        nodes.setdefault(member // links.ranks_per_node, []).append(member)
    groups, part = list(nodes.values()), size * (len(members) - 1) / len(members)
    width = len(groups[0])
    if any(len(group) != width for group in groups):
        ring = sorted(members)
        return [((one, ring[(place + 1) % len(ring)]), part) for place, one in enumerate(ring)]
    flows = []
    for number, group in enumerate(groups):
        following = groups[(number + 1) % len(groups)]
        for place, member in enumerate(group):
            if width > 1:
                inside = part if len(groups) == 1 else part * (width - 1) / width
                flows.append(((member, group[(place + 1) % width]), inside))
            if len(groups) > 1:
                flows.append(((member, following[place]), part / width))
    return flows


def model_steps(programs: Programs, times: ModelTimes, links: Links) -> tuple[StepTimes, ...]:
    """Return the times of all steps.

    A stage of more than ``MOST_REPEATS`` equal layers is replayed with ``MOST_REPEATS`` layers and with half of them.
    The difference of the two times is extended to the other layers.
    """
    if times.repeats <= MOST_REPEATS:
        return tuple(Replay(programs, times, links).steps)
    fewer, more = (
        Replay(programs, times.with_repeats(count), links).steps for count in (MOST_REPEATS // 2, MOST_REPEATS)
    )
    further = (times.repeats - MOST_REPEATS) / (MOST_REPEATS - MOST_REPEATS // 2)

    def extended(first: float, second: float) -> float:
        return second + further * (second - first)

    return tuple(
        StepTimes(
            more_of.lengths,
            extended(fewer_of.seconds, more_of.seconds),
            {kind: extended(fewer_of.by_kind[kind], seconds) for kind, seconds in more_of.by_kind.items()},
        )
        for fewer_of, more_of in zip(fewer, more, strict=True)
    )
