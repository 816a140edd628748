"""The program of a rank of the modelled model: each recorded layer runs as several layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from scripts.bench.cluster.virtual.events import Begin, Collective, End, Event, Post, Wait


def expanded(events: Iterable[Event], repeats: int) -> Iterator[Event]:
    """Yield the events with each layer ``repeats`` times, without ``Begin`` and ``End``. Tickets are numbered anew.

    Collectives that begin in a layer begin in its last repetition. Waits for work from before the layer are in its
    first repetition.
    """
    tickets = _Tickets()
    layer: list[Event] | None = None
    for event in events:
        if isinstance(event, Begin):
            assert layer is None, "a layer begins inside another"
            layer = []
        elif isinstance(event, End):
            assert layer is not None, "a layer ends that has not begun"
            yield from _repeated(layer, repeats, tickets)
            layer = None
        elif layer is None:
            yield tickets.renewed(event)
        else:
            layer.append(event)
    assert layer is None, "a layer has no end"


class _Tickets:
    """New numbers of tickets."""

    def __init__(self) -> None:
        self._last = 0
        self._new: dict[int, int] = {}

    def renewed(self, event: Event) -> Event:
        """Return an event with its new ticket."""
        if isinstance(event, Post | Collective):
            self._last += 1
            self._new[event.ticket] = self._last
            return event._replace(ticket=self._last)
        return Wait(self._new[event.ticket]) if isinstance(event, Wait) else event


def _repeated(layer: Sequence[Event], repeats: int, tickets: _Tickets) -> Iterator[Event]:
    own = {event.ticket for event in layer if isinstance(event, Post)}
    for number in range(repeats):
        for event in layer:
            if isinstance(event, Collective) and number < repeats - 1:
                continue
            if isinstance(event, Wait) and event.ticket not in own and number:
                continue
            yield tickets.renewed(event)
