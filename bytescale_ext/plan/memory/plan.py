"""Values of memory planning: requests for device memory and their addresses (MEMO, Zhao et al. 2025, section 4.2).

A request is a block of memory between its allocation and its release. A placement gives each request an address such
that blocks that exist together do not overlap; its peak is the memory to reserve.

A plan has two levels, as in MEMO Fig. 7: the requests of one layer's pass are placed once for all layers, and in the
trace of the model each pass of a layer is one block of that size. ``placement.py`` and ``exact.py`` make plans, and
``check.py`` validates them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from bytescale_ext.json_input import whole


class MemoryPlanJson(TypedDict):
    """JSON format of a plan. A row of ``requests`` is name, bytes, start, stop and address."""

    bound: int
    is_optimal: bool
    peak: int
    requests: list[tuple[str, int, int, int, int]]


class TwoLevelPlanJson(TypedDict):
    """JSON format of a plan of two levels."""

    levels: dict[str, MemoryPlanJson]
    model: MemoryPlanJson


@dataclass(frozen=True, slots=True)
class Request:
    """One block of memory.

    Attributes:
        name: printed name.
        num_bytes: size in bytes, positive.
        start: event of the trace that allocates the block.
        stop: event of the trace that releases the block.
    """

    name: str
    num_bytes: int
    start: int
    stop: int

    def overlaps(self, other: Request) -> bool:
        """Return whether both blocks exist at the same time."""
        return self.start < other.stop and other.start < self.stop


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Addresses for the requests of one trace.

    Attributes:
        requests: requests in order of their allocation.
        addresses: address of each request.
        bound: liveness bound, the peak of the bytes that exist together; no placement has a lower peak.
        is_optimal: whether the bound or a solver proves that no placement has a lower peak.
    """

    requests: tuple[Request, ...]
    addresses: tuple[int, ...]
    bound: int
    is_optimal: bool

    @property
    def peak(self) -> int:
        """Bytes to reserve."""
        ends = (a + request.num_bytes for a, request in zip(self.addresses, self.requests, strict=True))
        return max(ends, default=0)

    def to_json(self) -> MemoryPlanJson:
        """Return plain lists and dicts in the format of a plan file."""
        rows = [
            (request.name, request.num_bytes, request.start, request.stop, address)
            for request, address in zip(self.requests, self.addresses, strict=True)
        ]
        return {"bound": self.bound, "is_optimal": self.is_optimal, "peak": self.peak, "requests": rows}

    @classmethod
    def from_json(cls, value: MemoryPlanJson) -> MemoryPlan:
        """Return the plan that ``to_json`` wrote, unchecked. Raises KeyError or TypeError for other values."""
        requests = tuple(Request(str(name), whole(size), whole(start), whole(stop))
                         for name, size, start, stop, _ in value["requests"])  # fmt: skip
        addresses = tuple(whole(row[4]) for row in value["requests"])
        return cls(requests, addresses, whole(value["bound"]), bool(value["is_optimal"]))


@dataclass(frozen=True, slots=True)
class TwoLevelPlan:
    """Plans of the passes of a layer, and a plan of the model with one block per pass (MEMO Fig. 7).

    Attributes:
        levels: plan of each pass of a layer, by the name of the pass ("forward", "backward").
        model: plan of the whole trace; ``block_name`` gives the name of the block of a pass.
    """

    levels: dict[str, MemoryPlan]
    model: MemoryPlan

    @staticmethod
    def block_name(layer: int, level: str) -> str:
        """Return the name of the request that represents a layer's pass in the model's plan."""
        return f"layer {layer} {level}"

    def to_json(self) -> TwoLevelPlanJson:
        """Return plain lists and dicts."""
        return {"levels": {name: plan.to_json() for name, plan in self.levels.items()}, "model": self.model.to_json()}

    @classmethod
    def from_json(cls, value: TwoLevelPlanJson) -> TwoLevelPlan:
        """Return the plan that ``to_json`` wrote, unchecked."""
        levels = {name: MemoryPlan.from_json(level) for name, level in value["levels"].items()}
        return cls(levels, MemoryPlan.from_json(value["model"]))
