"""Flows in virtual time: each sends its bytes at its max-min fair rate, which changes when flows begin and end."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final

from scripts.bench.cluster.virtual.links import Link, Links, fair_rates

_BYTE: Final = 1e-6  # flows end when less is left, because sums of rates round


@dataclass(slots=True)
class _Flow:
    path: tuple[Link, Link]
    left: float
    rate: float = 0.0
    since: float = 0.0
    version: int = 0


class Flows:
    """All flows of a cluster.

    Attributes:
        now: virtual time, in seconds.
    """

    def __init__(self, links: Links) -> None:
        self.now = 0.0
        self._links = links
        self._active: dict[int, _Flow] = {}
        self._users: dict[Link, set[int]] = {}
        self._ends: list[tuple[float, int, int]] = []

    def begin(self, number: int, sender: int, receiver: int, size: float, now: float) -> None:
        """Begin flow ``number`` of ``size`` bytes."""
        self.now = now
        path = self._links.path(sender, receiver)
        self._active[number] = _Flow(path, size, since=now)
        for link in path:
            self._users.setdefault(link, set()).add(number)
        self._share(path)

    def next_end(self) -> float | None:
        """Return the time at which the next flow ends, if none begins before."""
        while self._ends:
            time, number, version = self._ends[0]
            flow = self._active.get(number)
            if flow is not None and flow.version == version:
                return time
            heapq.heappop(self._ends)
        return None

    def end(self) -> int:
        """End the next flow and return its number."""
        time, number, _ = heapq.heappop(self._ends)
        self.now = time
        flow = self._active.pop(number)
        for link in flow.path:
            self._users[link].discard(number)
        self._share(flow.path)
        return number

    def _share(self, path: tuple[Link, ...]) -> None:
        """Set the rates of all flows that share links with a path, directly or through others."""
        found: set[int] = set()
        links, seen = list(path), set(path)
        while links:
            for number in self._users.get(links.pop(), ()):
                if number not in found:
                    found.add(number)
                    for link in self._active[number].path:
                        if link not in seen:
                            seen.add(link)
                            links.append(link)
        if not found:
            return
        ordered = sorted(found)
        if len(ordered) == 1:
            rates = {ordered[0]: min(map(self._links.capacity, self._active[ordered[0]].path))}
        else:
            paths = {number: self._active[number].path for number in ordered}
            rates = fair_rates(paths, {link: self._links.capacity(link) for link in sorted(seen)})
        for number in ordered:
            self._set(number, rates[number])

    def _set(self, number: int, rate: float) -> None:
        flow = self._active[number]
        if rate == flow.rate:
            return
        flow.left = max(0.0, flow.left - flow.rate * (self.now - flow.since))
        flow.rate, flow.since, flow.version = rate, self.now, flow.version + 1
        heapq.heappush(self._ends, (self.now + max(flow.left, _BYTE) / rate, number, flow.version))
