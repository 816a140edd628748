"""The program of a rank: what it tells its device, in the order of its host, and the file of all programs of a run."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bytescale_ext.new_file import new_file


class Work(NamedTuple):
    """Kernels on the stream that computes.

    Attributes:
        kind: "before" and "after" (linear parts of a layer around its attention), "attention", "join" (of a block of a
            ring to the totals), "head" (output layer and loss) or "optimizer".
        is_backward: direction.
        tokens: rows of queries, or of any other work.
        keys: rows of keys of a join.
        documents: (queries, keys) of the documents of an attention kernel.
        is_causal: mask of an attention kernel.
    """

    kind: str
    is_backward: bool
    tokens: int
    keys: int = 0
    documents: tuple[tuple[int, int], ...] = ()
    is_causal: bool = False


class Message(NamedTuple):
    """A send or a receive of ``numbers`` numbers; ``peer`` is a process."""

    is_send: bool
    peer: int
    numbers: int


class Post(NamedTuple):
    """A batch of messages on a communicator.

    Attributes:
        ticket: number that a wait names.
        communicator: name of the process group, equal on all its ranks.
        kind: "keys" or "sums" (of a ring), or "stage" (of a pipeline).
        messages: sends and receives of the batch.
    """

    ticket: int
    communicator: str
    kind: str
    messages: tuple[Message, ...]


class Collective(NamedTuple):
    """A collective of ``members``; ``kind``: "reduce" or "gather" (of ``numbers`` parameters), or "small"."""

    ticket: int
    communicator: str
    kind: str
    members: tuple[int, ...]
    numbers: int


class Wait(NamedTuple):
    """The stream that computes waits for a post or a collective."""

    ticket: int


class HostWait(NamedTuple):
    """The host waits for the stream that computes."""


class Begin(NamedTuple):
    """Begin of a layer."""

    is_backward: bool


class End(NamedTuple):
    """End of a layer."""


class Step(NamedTuple):
    """Begin of a step; ``lengths``: tokens of its documents."""

    lengths: tuple[int, ...]


Event = Work | Post | Collective | Wait | HostWait | Begin | End | Step


@dataclass(frozen=True)
class Programs:
    """The programs of all ranks of a run, and the loss of each of its steps."""

    ranks: Sequence[Sequence[Event]]
    losses: Sequence[float] = ()


def write_events(path: Path, events: Sequence[Event]) -> None:
    """Write the events of one rank."""
    with new_file(path, is_binary=True) as stream:
        stream.write(pickle.dumps(list(events)))


def read_events(path: Path) -> list[Event]:
    """Return the events of one rank."""
    events: list[Event] = pickle.loads(path.read_bytes())
    return events
