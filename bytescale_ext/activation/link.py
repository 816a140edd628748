"""Copies between a device and the host arena: at once on CPU, on separate streams on a GPU.

On a GPU the host never waits. The forward pass writes a layer while the next one computes; one layer later the compute
stream waits until that write is done, so memory does not grow when the bus is slow (the two rounding buffers of MEMO,
section 4.1). Tensors are held until then, because the caching allocator reuses memory in the order of the compute
stream.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch

from bytescale_ext.activation.arena import Block, HostArena

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""(destination, source) of each copy; both have the same shape."""

Ticket = torch.cuda.Event | None
"""Identifies copies that another call can wait for; None: they are done."""

LAYERS_UNDER_WAY = 1
"""The most layers that are written to the host at the same time; computing waits before it starts another write."""


class Link(Protocol):
    """The interface of copies.

    Attributes:
        arena: the host memory.
        timed: measure how long computing waits for copies.
    """

    arena: HostArena
    timed: bool

    @property
    def used_bytes(self) -> int:
        """Used bytes of the arena, without parts that only wait for a copy to end."""
        ...

    def take(self, num_bytes: int) -> Block | None:
        """Return a part of the arena, or None."""
        ...

    def write(self, pairs: Pairs, held: list[torch.Tensor]) -> Ticket:
        """Start copies to the host, of any shapes, and hold the tensors ``held`` meanwhile. Returns a ticket."""
        ...

    def read(self, pairs: Pairs, written: Ticket) -> Ticket:
        """Start copies from the host, of any shapes, after the writes of a ticket. Returns a ticket."""
        ...

    def wait(self, ticket: Ticket) -> None:
        """Make all further computing wait for the copies of a ticket."""
        ...

    def settle(self) -> None:
        """Make computing wait for all writes, and hold no more tensors."""
        ...

    def give_back(self, block: Block, ticket: Ticket) -> None:
        """Free a part of the arena once the copies of a ticket are done."""
        ...

    def take_stall_seconds(self) -> float:
        """Return how long computing has waited for copies since the last call, if ``timed``."""
        ...


@dataclass
class HeldParts:
    """Parts of the arena that one owner holds, and the last copies from or to them."""

    blocks: list[Block] = field(default_factory=list)
    last_copy: Ticket = None

    def give_back(self, link: Link) -> None:
        """Free the parts after the last copies."""
        for block in self.blocks:
            link.give_back(block, self.last_copy)
        self.blocks.clear()


@dataclass
class PlainLink:
    """Copies at once, for CPU."""

    arena: HostArena
    timed: bool = False
    _stall_seconds: float = 0.0

    @property
    def used_bytes(self) -> int:
        """See ``Link``."""
        return self.arena.used_bytes

    def take(self, num_bytes: int) -> Block | None:
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
        """See ``Link``; copies are already done."""

    def settle(self) -> None:
        """See ``Link``; no tensors are held."""

    def give_back(self, block: Block, ticket: Ticket) -> None:
        """See ``Link``."""
        self.arena.give_back(block)

    def take_stall_seconds(self) -> float:
        """See ``Link``; computing waits for every copy."""
        seconds, self._stall_seconds = self._stall_seconds, 0.0
        return seconds


@dataclass
class CudaLink:
    """Copies on two streams beside the compute stream, one each way.

    Attributes:
        arena: pinned.
        timed: record an event before and after each wait of the compute stream.
    """

    arena: HostArena
    timed: bool = False
    to_host: torch.cuda.Stream = field(default_factory=lambda: torch.cuda.Stream())
    to_device: torch.cuda.Stream = field(default_factory=lambda: torch.cuda.Stream())
    _held: deque[tuple[torch.cuda.Event, list[torch.Tensor]]] = field(default_factory=deque)
    _freeing: deque[tuple[torch.cuda.Event, Block]] = field(default_factory=deque)
    _stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @property
    def used_bytes(self) -> int:
        """See ``Link``."""
        return self.arena.used_bytes - sum(block.num_bytes for _, block in self._freeing)

    def take(self, num_bytes: int) -> Block | None:
        """See ``Link``. A part that is still being read is handed out last; then the next write waits for it."""
        while self._freeing and self._freeing[0][0].query():
            self.arena.give_back(self._freeing.popleft()[1])
        block = self.arena.take(num_bytes)
        while block is None and self._freeing:
            event, freed = self._freeing.popleft()
            self.to_host.wait_event(event)
            self.arena.give_back(freed)
            block = self.arena.take(num_bytes)
        return block

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
        """See ``Link`` for shapes. Waits for the compute stream, which may still use the memory of the destinations."""
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

    def give_back(self, block: Block, ticket: Ticket) -> None:
        """See ``Link``."""
        if ticket is None:
            self.arena.give_back(block)
        else:
            self._freeing.append((ticket, block))

    def take_stall_seconds(self) -> float:
        """See ``Link``; waits for the device."""
        torch.cuda.synchronize()
        seconds = sum(begin.elapsed_time(end) for begin, end in self._stalls) / 1e3
        self._stalls.clear()
        return float(seconds)


def make_link(arena: HostArena, on_cuda: bool) -> Link:
    """Return the link of this device."""
    return CudaLink(arena) if on_cuda else PlainLink(arena)
