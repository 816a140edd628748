"""Copies between a device and the host arena: plain ones on CPU, on streams of their own on a GPU.

On a GPU nothing waits on the host. The forward pass writes a layer while the next one computes; the pass after that
makes the compute stream wait until the first is written, so memory does not grow when the bus is slow (the two
rounding buffers of MEMO, section 4.1). Tensors are held until then: the caching allocator hands their memory out
again in the order of the compute stream, which has waited.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from bytescale_ext.activation.arena import Block, HostArena

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""(destination, source) of each copy."""


class Link(Protocol):
    """How copies are made. ``ticket`` is what one call gives another to wait for.

    Attributes:
        arena: the host memory.
        timed: measure for how long computing waits for copies.
    """

    arena: HostArena
    timed: bool

    @property
    def used_bytes(self) -> int:
        """Of the arena, without what is only waiting for a copy to end."""
        ...

    def take(self, num_bytes: int) -> Block | None:
        """A part of the arena, or None."""
        ...

    def write(self, pairs: Pairs, held: list[torch.Tensor]) -> Any:
        """Begin copies to the host; ``held`` may be dropped by the caller. Returns a ticket."""
        ...

    def read(self, pairs: Pairs, written: Any) -> Any:
        """Begin copies from the host after the writes of a ticket. Returns a ticket."""
        ...

    def wait(self, ticket: Any) -> None:
        """What is computed from now on comes after the copies of a ticket."""
        ...

    def settle(self) -> None:
        """Hold nothing any longer for copies to the host."""
        ...

    def give_back(self, block: Block, ticket: Any) -> None:
        """Free a part of the arena, once the copies of a ticket are done."""
        ...

    def take_stall_seconds(self) -> float:
        """For how long computing has waited for copies since the last call, where it is ``timed``."""
        ...


@dataclass
class PlainLink:
    """Copies at once; for CPU."""

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
        """See ``Link``."""
        begun = time.perf_counter()
        for destination, source in pairs:
            destination.copy_(source)
        self._stall_seconds += time.perf_counter() - begun if self.timed else 0.0

    def read(self, pairs: Pairs, written: Any) -> None:
        """See ``Link``."""
        self.write(pairs, [])

    def wait(self, ticket: Any) -> None:
        """See ``Link``; nothing is ever under way."""

    def settle(self) -> None:
        """See ``Link``; nothing is ever held."""

    def give_back(self, block: Block, ticket: Any) -> None:
        """See ``Link``."""
        self.arena.give_back(block)

    def take_stall_seconds(self) -> float:
        """See ``Link``; every copy is waited for."""
        seconds, self._stall_seconds = self._stall_seconds, 0.0
        return seconds


@dataclass
class CudaLink:
    """Copies on two streams beside the compute stream, one each way.

    Attributes:
        arena: pinned.
        layers_under_way: layers that may be on their way to the host while computing goes on; one more waits.
        timed: put an event before and after each wait of the compute stream.
    """

    arena: HostArena
    timed: bool = False
    layers_under_way: int = 1
    to_host: Any = field(default_factory=lambda: torch.cuda.Stream())
    to_device: Any = field(default_factory=lambda: torch.cuda.Stream())
    _held: deque[tuple[Any, list[torch.Tensor]]] = field(default_factory=deque)
    _freeing: deque[tuple[Any, Block]] = field(default_factory=deque)
    _stalls: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def used_bytes(self) -> int:
        """See ``Link``."""
        return self.arena.used_bytes - sum(block.num_bytes for _, block in self._freeing)

    def take(self, num_bytes: int) -> Block | None:
        """See ``Link``. A part that is still being read from is handed out last; then the next write waits."""
        while self._freeing and self._freeing[0][0].query():
            self.arena.give_back(self._freeing.popleft()[1])
        block = self.arena.take(num_bytes)
        while block is None and self._freeing:
            event, freed = self._freeing.popleft()
            self.to_host.wait_event(event)
            self.arena.give_back(freed)
            block = self.arena.take(num_bytes)
        return block

    def write(self, pairs: Pairs, held: list[torch.Tensor]) -> Any:
        """See ``Link``."""
        self.to_host.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.to_host):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
        done = self.to_host.record_event()
        self._held.append((done, held))
        while len(self._held) > self.layers_under_way:
            self.wait(self._held.popleft()[0])
        return done

    def read(self, pairs: Pairs, written: Any) -> Any:
        """See ``Link``. Destinations were allocated on the compute stream, so their memory is free only behind it."""
        self.to_device.wait_stream(torch.cuda.current_stream())
        if written is not None:
            self.to_device.wait_event(written)
        with torch.cuda.stream(self.to_device):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
        return self.to_device.record_event()

    def wait(self, ticket: Any) -> None:
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

    def give_back(self, block: Block, ticket: Any) -> None:
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
    """The link of this device."""
    return CudaLink(arena) if on_cuda else PlainLink(arena)
