"""Offline dynamic storage allocation by best fit: an address for each request of a trace (MEMO section 4.2).

No placement has a peak below the *liveness bound*, the peak of the bytes that exist together. On traces of transformer
layers best fit nearly always reaches it; otherwise ``exact.py`` improves the placement or proves how far it is off.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from bytescale_ext.plan.memory.check import check_memory_plan
from bytescale_ext.plan.memory.plan import MemoryPlan, Request

MAX_ORDERED: Final = 12_000
"""Largest number of requests for best fit, which takes quadratic time. More requests are placed in their order."""


def plan_memory(requests: Sequence[Request]) -> MemoryPlan:
    """Place requests by best fit, and check the plan; ``exact.improve`` closes a gap to the bound.

    The peak is never above the peak of an allocator that serves the requests as they come (``place_online``).

    Raises:
        ValueError: a request has no size or no life.
    """
    for request in requests:
        if request.num_bytes < 1 or request.stop <= request.start:
            raise ValueError(f"a request needs a positive size and life: {request}")
    placements = [place_online(requests)]
    if len(requests) <= MAX_ORDERED:
        placements.append(place_best_fit(requests))
    addresses = min(reversed(placements), key=lambda placement: _peak(requests, placement))
    bound = liveness_bound(requests)
    plan = MemoryPlan(tuple(requests), addresses, bound, _peak(requests, addresses) == bound)
    check_memory_plan(plan)
    return plan


def liveness_bound(requests: Sequence[Request]) -> int:
    """Return the peak of the bytes that exist together. No placement has a lower peak."""
    changes = sorted([(r.start, r.num_bytes) for r in requests] + [(r.stop, -r.num_bytes) for r in requests])
    most = now = 0
    for _, change in changes:  # releases are negative, so they come first at equal times
        now += change
        most = max(most, now)
    return most


def requests_within(requests: Sequence[Request], start: int, stop: int) -> list[Request]:
    """Return the requests that begin and end in a window of time, with times counted from ``start``."""
    return [
        Request(r.name, r.num_bytes, r.start - start, r.stop - start)
        for r in requests
        if r.start >= start and r.stop <= stop
    ]


def place_best_fit(requests: Sequence[Request]) -> tuple[int, ...]:
    """Return an address for each request: each goes to the smallest gap among the requests that exist with it.

    Requests are placed in several orders (by size, by size times life, by life; then by position), and the placement
    with the lowest peak is returned.
    """
    orders: tuple[Callable[[int], tuple[int, ...]], ...] = (
        lambda i: (-requests[i].num_bytes, requests[i].start - requests[i].stop, i),
        lambda i: (-requests[i].num_bytes * (requests[i].stop - requests[i].start), i),
        lambda i: (requests[i].start - requests[i].stop, -requests[i].num_bytes, i),
    )
    placements = [_place_in_order(requests, sorted(range(len(requests)), key=order)) for order in orders]
    return min(placements, key=lambda addresses: _peak(requests, addresses))


def _place_in_order(requests: Sequence[Request], order: Sequence[int]) -> tuple[int, ...]:
    """Place requests one by one in an order: each in the smallest gap, then the lowest gap, or on top of all."""
    count = len(requests)
    starts, stops, begins, ends = (np.zeros(count, dtype=np.int64) for _ in range(4))
    addresses = [0] * count
    for placed, index in enumerate(order):
        request = requests[index]
        together = np.flatnonzero((starts[:placed] < request.stop) & (stops[:placed] > request.start))
        together = together[np.argsort(begins[together], kind="stable")]
        tops = np.append(0, np.maximum.accumulate(ends[together]))
        gaps = begins[together] - tops[:-1]
        fitting = np.flatnonzero(gaps >= request.num_bytes)
        address = int(tops[fitting[np.argmin(gaps[fitting])]] if len(fitting) else tops[-1])
        addresses[index] = address
        starts[placed], stops[placed] = request.start, request.stop
        begins[placed], ends[placed] = address, address + request.num_bytes
    return tuple(addresses)


def place_online(requests: Sequence[Request]) -> tuple[int, ...]:
    """Return the addresses of an allocator that serves each request without knowledge of later requests.

    It works like torch's caching allocator with one segment that can grow: it splits the smallest free part that fits,
    and joins neighbouring free parts.
    """
    moments = [(r.stop, 0, i) for i, r in enumerate(requests)] + [(r.start, 1, i) for i, r in enumerate(requests)]
    addresses = [0] * len(requests)
    free: list[tuple[int, int]] = []  # (begin, end), ascending; the last part may grow
    top = 0
    for _, begins, index in sorted(moments):
        size = requests[index].num_bytes
        if not begins:
            _join(free, addresses[index], addresses[index] + size)
            continue
        fitting = [(end - begin, number) for number, (begin, end) in enumerate(free) if end - begin >= size]
        if fitting:
            number = min(fitting)[1]
        else:
            if not free or free[-1][1] < top:
                free.append((top, top))
            number, top = len(free) - 1, free[-1][0] + size
            free[-1] = free[-1][0], top
        begin, end = free.pop(number)
        addresses[index] = begin
        if begin + size < end:
            free.insert(number, (begin + size, end))
    return tuple(addresses)


def _join(free: list[tuple[int, int]], begin: int, end: int) -> None:
    """Add a part to the free parts, and join it with the neighbours that it touches."""
    number = bisect.bisect_left(free, (begin, end))
    if number < len(free) and free[number][0] == end:
        end = free.pop(number)[1]
    if number and free[number - 1][1] == begin:
        begin = free.pop(number - 1)[0]
        number -= 1
    free.insert(number, (begin, end))


def _peak(requests: Sequence[Request], addresses: Sequence[int]) -> int:
    return max((a + r.num_bytes for a, r in zip(addresses, requests, strict=True)), default=0)
