"""Events of ``deep_ep``; on a CPU every operation has ended when its call returns."""

from __future__ import annotations


class EventHandle:
    """An event on the current stream."""

    def current_stream_wait(self) -> None:
        """Return at once."""


class EventOverlap:
    """An event that another stream can wait for."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[object, ...] | None = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self) -> None:
        """Wait for the event. Raises AssertionError without one, as for a call without ``async_finish``."""
        assert self.event is not None, "no event to wait for"
        self.event.current_stream_wait()
