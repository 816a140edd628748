"""Copies between a device and the host arena: synchronous on CPU, on separate streams on a GPU.

On a GPU the host never waits. In the forward pass a layer is written to the host while the next layer computes. One
layer later the compute stream waits until that write is complete. So memory does not grow if the bus is slow (the two
rounding buffers of MEMO, section 4.1). The sources of a write are referenced until then, because the caching allocator
reuses memory in the order of the compute stream.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch

from bytescale_ext.activation.arena import ArenaPart, HostArena

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Destination and source of each copy, of the same shape."""

Ticket = torch.cuda.Event | None
"""Handle of a group of copies to wait for; None if they are complete."""

LAYERS_UNDER_WAY = 1
"""The most layers with unfinished writes. Before another write starts, the compute stream waits for the oldest."""


class Link(Protocol):
    """Copies between a device and a host arena.

    Attributes:
        arena: host memory.
        timed: whether to measure how long computation waits for copies.
    """

    arena: HostArena
    timed: bool

    @property
    def used_bytes(self) -> int:
        """Used bytes of the arena, except parts that are freed as soon as a copy ends."""
        ...

    def take(self, num_bytes: int) -> ArenaPart | None:
        """Return a part of the arena of at least ``num_bytes``, or None if no free part is large enough."""
        ...

    def write(self, pairs: Pairs, held: list[torch.Tensor]) -> Ticket:
        """Start copies of any shapes to the host and return their ticket. Keep ``held`` alive until they end."""
        ...

    def read(self, pairs: Pairs, written: Ticket) -> Ticket:
        """Start copies of any shapes from the host, after the writes of a ticket, and return their ticket."""
        ...

    def wait(self, ticket: Ticket) -> None:
        """Make all further computation wait for the copies of a ticket."""
        ...

    def settle(self) -> None:
        """Make all further computation wait for all writes, and drop the references to their sources."""
        ...

    def give_back(self, part: ArenaPart, ticket: Ticket) -> None:
        """Free a part of the arena once the copies of a ticket are complete."""
        ...

    def take_stall_seconds(self) -> float:
        """Return the seconds that computation has waited for copies since the last call; 0 unless ``timed``."""
        ...


@dataclass
class HeldParts:
    """Parts of the arena with a common owner.

    Attributes:
        parts: the parts.
        last_copy: ticket of the last copies from or to the parts.
    """

    parts: list[ArenaPart] = field(default_factory=list)
    last_copy: Ticket = None

    def give_back(self, link: Link) -> None:
        """Free the parts after the last copies."""
        for part in self.parts:
            link.give_back(part, self.last_copy)
        self.parts.clear()


@dataclass
class PlainLink:
    """Synchronous copies, for CPU."""

    arena: HostArena
    timed: bool = False
    _stall_seconds: float = 0.0

    @property
    def used_bytes(self) -> int:
        """See ``Link``."""
        return self.arena.used_bytes

    def take(self, num_bytes: int) -> ArenaPart | None:
        """See ``Link``."""
        return self.arena.take(num_bytes)

    def write(self, pairs: Pairs, held: list[torch.Tensor]) -> None:
        """See ``Link`` for shapes."""
        begun = time.perf_counter()
        for destination, source in pairs:
            destination.copy_(source)
        self._stall_seconds += time.perf_counter() - begun if self.timed else 0.0

    def read(self, pairs: Pairs, written: Ticket) -> None:
        """See ``Link`` for shapes."""
        self.write(pairs, [])

    def wait(self, ticket: Ticket) -> None:
        """See ``Link``. Copies are already complete."""

    def settle(self) -> None:
        """See ``Link``. Copies are already complete."""

    def give_back(self, part: ArenaPart, ticket: Ticket) -> None:
        """See ``Link``."""
        self.arena.give_back(part)

    def take_stall_seconds(self) -> float:
        """See ``Link``. Computation waits for every copy."""
        seconds, self._stall_seconds = self._stall_seconds, 0.0
        return seconds


@dataclass
class CudaLink:
    """Copies on two streams of their own, one per direction.

    Attributes:
        arena: pinned host memory.
        timed: whether to record an event before and after each wait of the compute stream.
        to_host, to_device: streams of the copies.
    """

    arena: HostArena
    timed: bool = False
    to_host: torch.cuda.Stream = field(default_factory=lambda: torch.cuda.Stream())
    to_device: torch.cuda.Stream = field(default_factory=lambda: torch.cuda.Stream())
    _held: deque[tuple[torch.cuda.Event, list[torch.Tensor]]] = field(default_factory=deque)
    _freeing: deque[tuple[torch.cuda.Event, ArenaPart]] = field(default_factory=deque)
    _stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @property
    def used_bytes(self) -> int:
        """See ``Link``."""
        return self.arena.used_bytes - sum(part.num_bytes for _, part in self._freeing)

    def take(self, num_bytes: int) -> ArenaPart | None:
        """See ``Link``. Parts that are still being read are handed out last; then the next write waits for the read."""
        while self._freeing and self._freeing[0][0].query():
            self.arena.give_back(self._freeing.popleft()[1])
        part = self.arena.take(num_bytes)
        while part is None and self._freeing:
            event, freed = self._freeing.popleft()
            self.to_host.wait_event(event)
            self.arena.give_back(freed)
            part = self.arena.take(num_bytes)
        return part

    def write(self, pairs: Pairs, held: list[torch.Tensor]) -> Ticket:
        """See ``Link`` for shapes."""
        self.to_host.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.to_host):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
        done: torch.cuda.Event = self.to_host.record_event()
        self._held.append((done, held))
        while len(self._held) > LAYERS_UNDER_WAY:
            self.wait(self._held.popleft()[0])
        return done

    def read(self, pairs: Pairs, written: Ticket) -> Ticket:
        """See ``Link`` for shapes. Copies wait for the compute stream, which may still use the destinations."""
        self.to_device.wait_stream(torch.cuda.current_stream())
        if written is not None:
            self.to_device.wait_event(written)
        with torch.cuda.stream(self.to_device):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
        done: torch.cuda.Event = self.to_device.record_event()
        return done

    def wait(self, ticket: Ticket) -> None:
        """See ``Link``."""
        if ticket is None:
            return
        compute = torch.cuda.current_stream()
        if self.timed:
            self._stalls.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            self._stalls[-1][0].record(compute)
        compute.wait_event(ticket)
        if self.timed:
            self._stalls[-1][1].record(compute)

    def settle(self) -> None:
        """See ``Link``."""
        while self._held:
            self.wait(self._held.popleft()[0])

    def give_back(self, part: ArenaPart, ticket: Ticket) -> None:
        """See ``Link``."""
        if ticket is None:
            self.arena.give_back(part)
        else:
            self._freeing.append((ticket, part))

    def take_stall_seconds(self) -> float:
        """See ``Link``. The host waits until the compute stream has passed the last of these waits."""
        if self._stalls:
            self._stalls[-1][1].synchronize()
        seconds = sum(begin.elapsed_time(end) for begin, end in self._stalls) / 1e3
        self._stalls.clear()
        return float(seconds)


def make_link(arena: HostArena, on_cuda: bool) -> Link:
    """Return the link for the device. On CUDA the arena must be pinned."""
    return CudaLink(arena) if on_cuda else PlainLink(arena)


def wait_on_host(ticket: Ticket) -> None:
    """Block the host until the copies of a ticket are done. Any thread may call it.

    The current device of a new thread is GPU 0, where waiting would create a context of this process.
    """
    if ticket is not None:
        with torch.cuda.device(ticket.device):
            ticket.synchronize()
