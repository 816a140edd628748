"""Plans of two levels for a recorded step: passes of layers that repeat are planned once (MEMO section 4.2, Fig. 7).

A step of a pipeline holds several micro-batches, or slices of them, at a time. A pass of a layer differs between
slices and between layers that keep more or less, so each pattern of requests that occurs more than once is a level.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bytescale_ext.plan.memory.placement import plan_memory, requests_within
from bytescale_ext.plan.memory.plan import MemoryPlan, Request, TwoLevelPlan


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass of one layer in a trace.

    Attributes:
        kind: "forward" or "backward".
        layer: number of the layer in the model, from 0 on.
        start, stop: it takes the events ``[start, stop)``. Passes of a trace do not overlap.
    """

    kind: str
    layer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StepPlans:
    """Both plans of a step.

    Attributes:
        two: passes that repeat are one block each.
        one: all requests are placed together.
    """

    two: TwoLevelPlan
    one: MemoryPlan

    @property
    def best(self) -> TwoLevelPlan:
        """The plan with the lower peak; two levels, which are fewer numbers, if both are equal."""
        return self.two if self.two.model.peak <= self.one.peak else TwoLevelPlan({}, self.one)


def plan_step(
    requests: Sequence[Request],
    passes: Sequence[Pass],
    place: Callable[[Sequence[Request]], MemoryPlan] = plan_memory,
) -> StepPlans:
    """Place the requests of a step in two levels, and in one.

    Args:
        requests: requests of the step, in order of their allocation.
        passes: passes of the layers, in order.
        place: makes a plan of requests; called for each level, then for the model in two levels and in one.
    """
    starts = [request.start for request in requests]
    inside = {
        one: requests_within(
            requests[bisect.bisect_left(starts, one.start) : bisect.bisect_left(starts, one.stop)], one.start, one.stop
        )
        for one in passes
    }
    patterns: dict[tuple[str, tuple[tuple[int, int, int], ...]], list[Pass]] = {}
    for one, held in inside.items():
        pattern = tuple((request.num_bytes, request.start, request.stop) for request in held)
        patterns.setdefault((one.kind, pattern), []).append(one)
    levels: dict[str, MemoryPlan] = {}
    rest, blocks = {request.start: request for request in requests}, []
    for (kind, pattern), found in patterns.items():
        if not pattern or len(found) < 2:
            continue
        others = sum(name.split("-")[0] == kind for name in levels)
        name = f"{kind}-{others + 1}" if others else kind
        levels[name] = place(inside[found[0]])
        for one in found:
            for _, start, _ in pattern:
                del rest[one.start + start]
            block = TwoLevelPlan.block_name(one.layer, name)
            blocks.append(Request(block, levels[name].peak, one.start, one.stop))
    model = sorted([*rest.values(), *blocks], key=lambda request: (request.start, request.name))
    return StepPlans(TwoLevelPlan(levels, place(model)), place(requests))
