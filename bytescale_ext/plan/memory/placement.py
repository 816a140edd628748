"""Offline dynamic storage allocation by best fit: an address for each request of a trace (MEMO section 4.2).

No placement has a peak below the *liveness bound*, the most bytes that exist at one time. On traces of transformer
layers best fit nearly always reaches it; otherwise ``exact.py`` improves the placement or proves how far it is off.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from bytescale_ext.plan.memory.check import check_memory_plan
from bytescale_ext.plan.memory.plan import MemoryPlan, Request


def plan_memory(requests: Sequence[Request]) -> MemoryPlan:
    """Place requests by best fit, and check the plan; ``exact.improve`` closes a gap to the bound.

    Raises:
        ValueError: a request without size or life.
    """
    for request in requests:
        if request.num_bytes < 1 or request.stop <= request.start:
            raise ValueError(f"a request needs a positive size and life: {request}")
    addresses = place_best_fit(requests)
    bound = liveness_bound(requests)
    plan = MemoryPlan(tuple(requests), addresses, bound, _peak(requests, addresses) == bound)
    check_memory_plan(plan)
    return plan


def liveness_bound(requests: Sequence[Request]) -> int:
    """Return the most bytes that exist at one time: no placement has a lower peak."""
    changes = sorted([(r.start, r.num_bytes) for r in requests] + [(r.stop, -r.num_bytes) for r in requests])
    most = now = 0
    for _, change in changes:  # at equal times releases, which are negative, come first
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

    Requests are placed in several orders (by size, by size times life, by life; ties by position), and the lowest peak
    wins.
    """
    orders = (
        lambda i: (-requests[i].num_bytes, requests[i].start - requests[i].stop, i),
        lambda i: (-requests[i].num_bytes * (requests[i].stop - requests[i].start), i),
        lambda i: (requests[i].start - requests[i].stop, -requests[i].num_bytes, i),
    )
    found = [_place_in_order(requests, sorted(range(len(requests)), key=order)) for order in orders]
    return min(found, key=lambda addresses: _peak(requests, addresses))


def _place_in_order(requests: Sequence[Request], order: Sequence[int]) -> tuple[int, ...]:
    addresses = [0] * len(requests)
    placed: list[tuple[int, int]] = []  # (address, request), ascending
    for index in order:
        request = requests[index]
        best_gap: tuple[int, int] | None = None
        end = 0
        for address, other in placed:
            if not request.overlaps(requests[other]):
                continue
            gap = address - end
            if gap >= request.num_bytes and (best_gap is None or gap < best_gap[0]):
                best_gap = gap, end
            end = max(end, address + requests[other].num_bytes)
        addresses[index] = end if best_gap is None else best_gap[1]
        bisect.insort(placed, (addresses[index], index))
    return tuple(addresses)


def _peak(requests: Sequence[Request], addresses: Sequence[int]) -> int:
    return max((a + r.num_bytes for a, r in zip(addresses, requests, strict=True)), default=0)
