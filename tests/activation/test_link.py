"""Order of copies, events and waits on a GPU, with streams that only record their calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bytescale_ext.activation.arena import ALIGNMENT, HostArena
from bytescale_ext.activation.keys import SwappedKeys
from bytescale_ext.activation.link import CudaLink

NOTES: list[str] = []


class Event:
    def __init__(self, name: str, number: int) -> None:
        self.name, self.done = f"{name}{number}", False

    def query(self) -> bool:
        return self.done


class Stream:
    def __init__(self, name: str) -> None:
        self.name, self.events = name, 0

    def wait_stream(self, other: Stream) -> None:
        NOTES.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        NOTES.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Event:
        self.events += 1
        return Event(self.name, self.events)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> CudaLink:
    compute = Stream("compute")

    @contextlib.contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        NOTES.append(f"on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: compute)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    NOTES.clear()
    arena = HostArena(torch.empty(4 * ALIGNMENT, dtype=torch.uint8))
    return CudaLink(arena, to_host=Stream("out"), to_device=Stream("in"))


def pair(value: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(3), torch.full((3,), value)


def test_writes_follow_what_was_computed_and_hold_their_sources(link: CudaLink) -> None:
    target, source = pair(2.0)
    ticket = link.write([(target, source)], [source])
    assert NOTES == ["out waits for compute", "on out"]
    assert torch.equal(target, source)
    assert ticket.name == "out1"


def test_computing_waits_for_the_layer_before_the_last(link: CudaLink) -> None:
    for _ in range(3):
        link.write([pair(1.0)], [torch.empty(5)])
    assert [note for note in NOTES if note.startswith("compute")] == [
        "compute waits for out1",
        "compute waits for out2",
    ]
    assert len(link._held) == 1
    link.settle()
    assert NOTES[-1] == "compute waits for out3"
    assert not link._held


def test_reads_come_after_their_writes_and_before_use(link: CudaLink) -> None:
    written = link.write([pair(1.0)], [])
    NOTES.clear()
    ticket: Any = link.read([pair(3.0)], written)
    link.wait(ticket)
    assert NOTES == ["in waits for compute", "in waits for out1", "on in", "compute waits for in1"]


def test_swapped_keys_wait_for_their_copies_once(link: CudaLink) -> None:
    keys = SwappedKeys(torch.ones(2, 1, 1, 3), link)
    keys.take()
    assert not NOTES
    keys.release()
    assert NOTES == ["out waits for compute", "on out"]
    NOTES.clear()
    keys.read_ahead()
    assert NOTES == ["in waits for compute", "in waits for out1", "on in"]
    NOTES.clear()
    for _ in range(2):
        assert keys.take().sum() == 6
    assert NOTES == ["compute waits for in1"]
    keys.release()  # written already
    assert NOTES == ["compute waits for in1"]
    assert link.used_bytes == ALIGNMENT
    del keys
    assert link.used_bytes == 0  # the memory is freed only after the read
    assert len(link._freeing) == 1


def test_memory_that_is_still_read_is_handed_out_last(link: CudaLink) -> None:
    first = link.take(2 * ALIGNMENT)
    assert first is not None
    reading = link.read([], None)
    link.give_back(first, reading)
    assert link.used_bytes == 0  # the copy still runs
    NOTES.clear()
    second = link.take(2 * ALIGNMENT)
    assert second is not None
    assert second.start != first.start
    assert not NOTES
    third = link.take(2 * ALIGNMENT)  # only the part that is being read remains
    assert third == first
    assert NOTES == ["out waits for in1"]
    link.give_back(second, None)
    assert link.used_bytes == 2 * ALIGNMENT


def test_stalls_are_what_the_compute_stream_waits(link: CudaLink, monkeypatch: pytest.MonkeyPatch) -> None:
    class Timer:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Stream) -> None:
            NOTES.append(f"time on {stream.name}")

        def elapsed_time(self, end: Timer) -> float:
            return 250.0

        def synchronize(self) -> None:
            NOTES.append("host waits for a time")

    monkeypatch.setattr(torch.cuda, "Event", Timer)
    link.wait(link.read([], None))
    assert link.take_stall_seconds() == 0.0  # it was not requested
    link.timed = True
    NOTES.clear()
    link.wait(link.read([], None))
    assert NOTES[-3:] == ["time on compute", "compute waits for in2", "time on compute"]
    link.wait(None)
    link.write([], [])
    link.settle()
    NOTES.clear()
    assert link.take_stall_seconds() == 0.5
    assert link.take_stall_seconds() == 0.0
    assert NOTES == ["host waits for a time"]
