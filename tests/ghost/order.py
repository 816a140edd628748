"""Replay of the NCCL calls of all ranks: does a run end, if hosts and devices are faster or slower than they were?

A trace (``lib/ghost.h``) holds what a rank told its device, in the order of its calls. The replay keeps this order and
NCCL's rules: a rank runs the operations of a communicator and of a stream in the order of their calls, a collective
runs when all ranks have reached it, and a message when both ranks have. A host goes on after a call, except:

- ``Hosts.AS_TRACED``: it waits where the trace has a wait for a stream, an event or the device.
- ``Hosts.AT_STREAM_WAITS``: it also waits wherever a stream is told to wait, as a host does that runs into a full queue
  of launches.
- ``device_wait``: in addition, one host waits once for its whole device, as the caching allocator does in ``cudaFree``
  when memory is short.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Message:
    """A send or a receive. ``number`` counts the messages between two members of a communicator."""

    communicator: str
    sender: int
    receiver: int
    number: int
    is_send: bool

    @property
    def counterpart(self) -> Message:
        """The other side of this message."""
        return Message(self.communicator, self.sender, self.receiver, self.number, not self.is_send)


@dataclass(frozen=True)
class Init:
    """Creation of a communicator, which waits for all its members."""

    communicator: str
    num_members: int


@dataclass(frozen=True)
class Post:
    """An operation, or a group of operations, that a host has enqueued on a communicator.

    Attributes:
        ticket: its number in the trace.
        stream: number of its stream; 0 is the default stream.
        member: rank in the communicator.
        text: the operations as the trace has them.
        messages: its sends and receives; none if it is a collective.
        num_collectives: collectives of this rank on the communicator so far.
    """

    ticket: int
    communicator: str
    stream: int
    member: int
    num_members: int
    text: str
    messages: tuple[Message, ...]
    num_collectives: int


@dataclass(frozen=True)
class StreamWait:
    """A stream waits for an operation."""

    stream: int
    ticket: int


@dataclass(frozen=True)
class HostWait:
    """The host waits for a stream, or for an operation; for everything on the device if both are None.

    Attributes:
        place: file and line that wait, or "" if torch's C++ does.
    """

    stream: int | None = None
    ticket: int | None = None
    place: str = ""


@dataclass(frozen=True)
class Step:
    """Beginning of a training step."""

    number: int


Event = Init | Post | StreamWait | HostWait | Step


class Hosts(enum.Enum):
    """When hosts wait, see the module."""

    AS_TRACED = enum.auto()
    AT_STREAM_WAITS = enum.auto()


@dataclass(frozen=True)
class Place:
    """Place of a host: after the event with this index, on this rank."""

    rank: int
    index: int


def read_traces(folder: Path) -> dict[int, list[Event]]:
    """Return the events of each rank from the files ``rank*.trace``."""
    files = {int(file.stem.removeprefix("rank")): file for file in folder.glob("rank*.trace")}
    return {rank: parse(files[rank].read_text().splitlines()) for rank in sorted(files)}


def parse(lines: Iterable[str]) -> list[Event]:
    """Return the events of a rank from the lines of its trace. Lines about memory are left out."""
    counts: Counter[object] = Counter()
    found: list[Event] = []
    place = ""
    for line in lines:
        word, *rest = line.split()
        match word:
            case "INIT":
                found.append(Init(rest[0], int(rest[2])))
            case "POST":
                found.append(_post(rest, counts))
            case "STREAM_WAIT":
                found.append(StreamWait(int(rest[0]), int(rest[1])))
            case "AT":
                place = rest[0]
                continue
            case "HOST_WAIT" if rest[0] == "stream":
                found.append(HostWait(stream=int(rest[1]), place=place))
            case "HOST_WAIT" if int(rest[1]):  # an event without an operation is complete
                found.append(HostWait(ticket=int(rest[1]), place=place))
            case "DEVICE_WAIT":
                found.append(HostWait(place=place))
            case "STEP":
                found.append(Step(int(rest[0])))
        place = ""
    return found


def _post(words: Sequence[str], counts: Counter[object]) -> Post:
    communicator, member = words[1], int(words[3])
    messages = []
    for operation in words[5:]:
        kind, peer, _ = operation.split(":")
        if kind in ("send", "recv"):
            ends = (member, int(peer)) if kind == "send" else (int(peer), member)
            side = (communicator, *ends, kind == "send")
            counts[side] += 1
            messages.append(Message(communicator, *ends, counts[side], kind == "send"))
    if not messages:
        counts[communicator] += 1
    text = " ".join(words[5:])
    place = (int(words[0]), communicator, int(words[2]), member, int(words[4]))
    return Post(*place, text, tuple(messages), counts[communicator])


class Replay:
    """One replay. ``stuck`` is empty if all ranks end, else it says where each rank stands."""

    def __init__(
        self, traces: Mapping[int, Sequence[Event]], hosts: Hosts = Hosts.AS_TRACED, device_wait: Place | None = None
    ) -> None:
        self._traces, self._hosts, self._device_wait = traces, hosts, device_wait
        self._next = dict.fromkeys(traces, 0)
        self._joined: dict[str, set[int]] = defaultdict(set)
        self._queues: dict[tuple[str, int], list[tuple[int, Post]]] = defaultdict(list)
        self._heads: Counter[tuple[str, int]] = Counter()
        self._needs: dict[tuple[int, int], set[int]] = {}  # (rank, ticket): tickets of the rank that it waits for
        self._on_stream: dict[tuple[int, int], set[int]] = defaultdict(set)  # what later work of a stream waits for
        self._posted: dict[int, set[int]] = defaultdict(set)
        # Operations before the first event, such as of earlier steps, have ended.
        self._done = {
            rank: _tickets(events, StreamWait, HostWait) - _tickets(events, Post) for rank, events in traces.items()
        }
        self._active: set[Message] = set()
        self._waits_for_device: int | None = None
        self.stuck = self._run()

    def _run(self) -> list[str]:
        while True:
            moved = [self._advance(rank) for rank in self._traces]
            while self._finish():
                moved.append(True)
            if all(self._next[rank] == len(events) for rank, events in self._traces.items()) and not self._pending():
                return []
            if not any(moved):
                return [self._describe(rank) for rank in self._traces]

    def _pending(self) -> bool:
        return any(self._posted[rank] - self._done[rank] for rank in self._traces)

    def _advance(self, rank: int) -> bool:
        """Let a host go on until it waits; return whether it has moved."""
        start = self._next[rank]
        while self._next[rank] < len(self._traces[rank]) and not self._is_blocked(rank):
            event = self._traces[rank][self._next[rank]]
            if isinstance(event, Post):
                self._enqueue(rank, event)
            elif isinstance(event, StreamWait):
                self._on_stream[rank, event.stream].add(event.ticket)
            if Place(rank, self._next[rank]) == self._device_wait:
                self._waits_for_device = rank
            self._next[rank] += 1
        return self._next[rank] > start

    def _is_blocked(self, rank: int) -> bool:
        done = self._done[rank]
        if self._waits_for_device == rank:
            if self._posted[rank] - done:
                return True
            self._waits_for_device = None
        match self._traces[rank][self._next[rank]]:
            case Init(communicator, num_members):
                self._joined[communicator].add(rank)
                return len(self._joined[communicator]) < num_members
            case StreamWait(_, ticket):
                return self._hosts is Hosts.AT_STREAM_WAITS and ticket not in done
            case HostWait(stream=None, ticket=None):
                return bool(self._posted[rank] - done)
            case HostWait(stream=None, ticket=ticket):
                return ticket not in done
            case HostWait(stream=stream):
                return bool(self._on_stream[rank, stream] - done)
        return False

    def _enqueue(self, rank: int, post: Post) -> None:
        done = self._done[rank]
        # torch lets the stream of a communicator wait for the stream that computes.
        needs = (self._on_stream[rank, post.stream] | self._on_stream[rank, 0]) - done
        self._needs[rank, post.ticket] = needs
        self._on_stream[rank, post.stream] = needs | {post.ticket} if post.stream == 0 else {post.ticket}
        self._posted[rank].add(post.ticket)
        self._queues[post.communicator, post.member].append((rank, post))

    def _head(self, communicator: str, member: int) -> tuple[int, Post] | None:
        """Return the operation that a member runs now, or None if there is none whose needs are done."""
        queue, at = self._queues[communicator, member], self._heads[communicator, member]
        if at == len(queue):
            return None
        rank, post = queue[at]
        return (rank, post) if self._needs[rank, post.ticket] <= self._done[rank] else None

    def _finish(self) -> bool:
        """End every operation that can end; return whether any did."""
        heads = [head for place in list(self._queues) if (head := self._head(*place)) is not None]
        for _, post in heads:
            self._active.update(post.messages)
        ended = [head for head in heads if self._ends(head[1])]
        for rank, post in ended:
            self._done[rank].add(post.ticket)
        for _, post in ended:
            self._heads[post.communicator, post.member] += 1
        return bool(ended)

    def _ends(self, post: Post) -> bool:
        if post.messages:
            return all(message.counterpart in self._active for message in post.messages)
        members = [self._head(post.communicator, member) for member in range(post.num_members)]
        return all(
            head is not None and not head[1].messages and head[1].num_collectives == post.num_collectives
            for head in members
        )

    def _describe(self, rank: int) -> str:
        at, events = self._next[rank], self._traces[rank]
        place = f"at {events[at]}" if at < len(events) else "at its end"
        waits = " in a wait for its device" if self._waits_for_device == rank else ""
        running = [
            f"{post.communicator} {post.text}"
            for (_, queue) in self._queues.items()
            for (one, post) in queue
            if one == rank and post.ticket not in self._done[rank]
        ]
        return f"rank {rank}{waits}, event {at} of {len(events)}, {place}; has not ended: {running[:4]}"


def _tickets(events: Iterable[Event], *kinds: type) -> set[int]:
    return {event.ticket for event in events if isinstance(event, kinds) and event.ticket is not None}


def only_step(traces: Mapping[int, Sequence[Event]], step: int) -> dict[int, list[Event]]:
    """Return the events of one step, if no operation of an earlier step has to meet one of this step."""
    found: dict[int, list[Event]] = {}
    collectives: dict[str, set[int]] = defaultdict(set)
    messages: set[Message] = set()
    for rank, events in traces.items():
        begin, end = _bounds(events, step)
        found[rank] = list(events[begin:end])
        last = {one.communicator: 0 for one in events[:begin] if isinstance(one, Init)}
        for post in events[:begin]:
            if isinstance(post, Post):
                last[post.communicator] = post.num_collectives
                messages.update(post.messages)
        for communicator, number in last.items():
            collectives[communicator].add(number)
    is_complete = messages == {message.counterpart for message in messages}
    assert is_complete, f"messages run from step {step - 1} into {step}"
    assert all(len(one) == 1 for one in collectives.values()), f"collectives run from step {step - 1} into {step}"
    return found


def _bounds(events: Sequence[Event], step: int) -> tuple[int, int]:
    """Return the index of the first event of a step, and of the first event after it."""
    end = next((index for index, event in enumerate(events) if event == Step(step + 1)), len(events))
    return events.index(Step(step)), end


def places_of_step(traces: Mapping[int, Sequence[Event]], step: int) -> list[Place]:
    """Return the places after each operation of a step, on every rank."""
    found = []
    for rank, events in traces.items():
        begin, end = _bounds(events, step)
        found += [Place(rank, index) for index in range(begin, end) if isinstance(events[index], Post)]
    return found


def stuck_runs(traces: Mapping[int, Sequence[Event]], step: int) -> list[str]:
    """Replay a run under all models of the host, and one step with device waits; return who is stuck where."""
    found = []
    for hosts in Hosts:
        found += [f"{hosts.name}: {line}" for line in Replay(traces, hosts).stuck]
    of_step = only_step(traces, step)
    for place in places_of_step(of_step, step):
        found += [f"device wait at {place}: {line}" for line in Replay(of_step, device_wait=place).stuck]
    return found
