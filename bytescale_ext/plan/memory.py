"""Where each tensor lies: offline dynamic storage allocation (MEMO, Zhao et al. 2025, section 4.2).

A request is a block of memory with the times of its allocation and release. A placement gives each an address, so
that blocks that exist together do not overlap; its peak is what must be reserved. No placement is below the
*liveness bound*, the most bytes that exist at one time. Best fit reaches the bound on traces of transformer layers
nearly always; where it does not, ``memory_exact.py`` proves how far it is off, or does better.

Two levels, as in MEMO: a layer's requests are placed by themselves, once for all layers, and in the trace of the
model each pass of a layer is one block of that size.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bytescale_ext.errors import PlanError


@dataclass(frozen=True, slots=True)
class Request:
    """One block of memory.

    Attributes:
        name: what it is, for printing.
        num_bytes: its size, positive.
        start, stop: it exists in ``[start, stop)``, in events of the trace.
    """

    name: str
    num_bytes: int
    start: int
    stop: int

    def overlaps(self, other: Request) -> bool:
        """Whether both exist at one time."""
        return self.start < other.stop and other.start < self.stop


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Addresses for the requests of one trace.

    Attributes:
        requests: in order of their allocation.
        addresses: of each request.
        bound: the liveness bound.
        is_optimal: no placement has a lower peak; proven by the bound or a solver.
    """

    requests: tuple[Request, ...]
    addresses: tuple[int, ...]
    bound: int
    is_optimal: bool

    @property
    def peak(self) -> int:
        """Bytes that must be reserved."""
        ends = (a + request.num_bytes for a, request in zip(self.addresses, self.requests, strict=True))
        return max(ends, default=0)

    def to_json(self) -> dict[str, Any]:
        """Plain lists and dicts: the format of a plan file."""
        rows = [
            [request.name, request.num_bytes, request.start, request.stop, address]
            for request, address in zip(self.requests, self.addresses, strict=True)
        ]
        return {"bound": self.bound, "is_optimal": self.is_optimal, "peak": self.peak, "requests": rows}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> MemoryPlan:
        """The inverse of ``to_json``; the plan is checked. Raises PlanError, or KeyError for another format."""
        requests = tuple(Request(str(name), int(size), int(start), int(stop))
                         for name, size, start, stop, _ in value["requests"])  # fmt: skip
        addresses = tuple(int(row[4]) for row in value["requests"])
        plan = cls(requests, addresses, int(value["bound"]), bool(value["is_optimal"]))
        check_memory_plan(plan)
        return plan


def liveness_bound(requests: Sequence[Request]) -> int:
    """The most bytes that exist at one time: no placement has a lower peak."""
    changes = sorted([(r.start, r.num_bytes) for r in requests] + [(r.stop, -r.num_bytes) for r in requests])
    most = now = 0
    for _, change in changes:  # at equal times releases, which are negative, come first
        now += change
        most = max(most, now)
    return most


def requests_within(requests: Sequence[Request], start: int, stop: int) -> list[Request]:
    """Those that begin and end in a window of time, with times from its begin on: a pass's transient tensors."""
    return [
        Request(r.name, r.num_bytes, r.start - start, r.stop - start)
        for r in requests
        if r.start >= start and r.stop <= stop
    ]


def place_best_fit(requests: Sequence[Request]) -> tuple[int, ...]:
    """An address for each request: larger ones first, each in the smallest gap among those that exist with it.

    Sizes that are equal go by the longer life, then by order. Several orders are tried, the lowest peak is taken.
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


def plan_memory(requests: Sequence[Request]) -> MemoryPlan:
    """Place requests by best fit. Pure; ``memory_exact.improve`` closes a gap to the bound.

    Raises:
        ValueError: a request without size or life.
    """
    for request in requests:
        if request.num_bytes < 1 or request.stop <= request.start:
            raise ValueError(f"a request needs a positive size and life: {request}")
    addresses = place_best_fit(requests)
    bound = liveness_bound(requests)
    return MemoryPlan(tuple(requests), addresses, bound, _peak(requests, addresses) == bound)


def check_memory_plan(plan: MemoryPlan) -> None:
    """Raise PlanError, naming both, for two requests that overlap in time and memory, or a bound that is none.

    Knows nothing of how plans are made.
    """
    if len(plan.addresses) != len(plan.requests):
        raise PlanError(f"{len(plan.requests)} requests have {len(plan.addresses)} addresses")
    in_time = sorted(range(len(plan.requests)), key=lambda i: plan.requests[i].start)
    alive: list[int] = []
    for index in in_time:
        request, address = plan.requests[index], plan.addresses[index]
        if address < 0:
            raise PlanError(f"{request} lies at {address}")
        alive = [other for other in alive if plan.requests[other].stop > request.start]
        for other in alive:
            low, high = plan.addresses[other], plan.addresses[other] + plan.requests[other].num_bytes
            if address < high and low < address + request.num_bytes:
                raise PlanError(f"{request} at {address} and {plan.requests[other]} at {low} share memory")
        alive.append(index)
    if plan.bound != liveness_bound(plan.requests):
        raise PlanError(f"the liveness bound is {liveness_bound(plan.requests)}, not {plan.bound}")


@dataclass(frozen=True, slots=True)
class TwoLevelPlan:
    """A plan of a layer's passes, and one of the model in which each pass is one block (MEMO Fig. 7).

    Attributes:
        levels: plans of one layer, by the name of the pass ("forward", "backward").
        model: the plan of the whole trace.
    """

    levels: dict[str, MemoryPlan]
    model: MemoryPlan

    def to_json(self) -> dict[str, Any]:
        """Plain lists and dicts."""
        return {"levels": {name: plan.to_json() for name, plan in self.levels.items()}, "model": self.model.to_json()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TwoLevelPlan:
        """The inverse of ``to_json``. Raises PlanError for a plan that breaks a law."""
        levels = {name: MemoryPlan.from_json(level) for name, level in value["levels"].items()}
        return cls(levels, MemoryPlan.from_json(value["model"]))
