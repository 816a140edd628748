"""Two-level plans for a recorded step: repeated passes of layers are planned once (MEMO section 4.2, Fig. 7).

Several micro-batches, or slices of them, are in flight in a pipeline. The passes of a layer differ between slices, and
between layers that keep different shares. So each pattern of requests that occurs more than once is a level.
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
        layer: number of the layer in the model, counted from 0.
        start: first event of the pass. Passes of a trace do not overlap.
        stop: event after the pass.
    """

    kind: str
    layer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StepPlans:
    """Two plans of a step.

    Attributes:
        two: plan of two levels, with one block per repeated pass.
        one: plan of one level, which places all requests together.
    """

    two: TwoLevelPlan
    one: MemoryPlan

    @property
    def best(self) -> TwoLevelPlan:
        """Plan with the lower peak. If both are equal, the plan of two levels, which has fewer numbers."""
        return self.two if self.two.model.peak <= self.one.peak else TwoLevelPlan({}, self.one)


def plan_step(
    requests: Sequence[Request],
    passes: Sequence[Pass],
    place: Callable[[Sequence[Request]], MemoryPlan] = plan_memory,
) -> StepPlans:
    """Return the plans of a step with two levels and with one level.

    Args:
        requests: requests of the step, in order of their allocation.
        passes: passes of the layers, in order.
        place: function that plans requests; called for each level, and for the model with two levels and with one.
    """
    starts = [request.start for request in requests]
    inside = {
        layer_pass: requests_within(
            requests[bisect.bisect_left(starts, layer_pass.start) : bisect.bisect_left(starts, layer_pass.stop)],
            layer_pass.start,
            layer_pass.stop,
        )
        for layer_pass in passes
    }
    patterns: dict[tuple[str, tuple[tuple[int, int, int], ...]], list[Pass]] = {}
    for layer_pass, held in inside.items():
        pattern = tuple((request.num_bytes, request.start, request.stop) for request in held)
        patterns.setdefault((layer_pass.kind, pattern), []).append(layer_pass)
    levels: dict[str, MemoryPlan] = {}
    rest, blocks = {request.start: request for request in requests}, []
    for (kind, pattern), repeats in patterns.items():
        if not pattern or len(repeats) < 2:
            continue
        others = sum(name.split("-")[0] == kind for name in levels)
        name = f"{kind}-{others + 1}" if others else kind
        levels[name] = place(inside[repeats[0]])
        for layer_pass in repeats:
            for _, start, _ in pattern:
                del rest[layer_pass.start + start]
            block = TwoLevelPlan.block_name(layer_pass.layer, name)
            blocks.append(Request(block, levels[name].peak, layer_pass.start, layer_pass.stop))
    model = sorted([*rest.values(), *blocks], key=lambda request: (request.start, request.name))
    return StepPlans(TwoLevelPlan(levels, place(model)), place(requests))
