"""Replay recorded loads under each placement: the plan of a step is made from the loads before it, as in training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from bytescale_ext.plan.experts.check import check_placement
from bytescale_ext.plan.experts.cost import ExpertCost, balance_ratio, step_seconds
from bytescale_ext.plan.experts.eplb import packed
from bytescale_ext.plan.experts.flexmoe import follow
from bytescale_ext.plan.experts.placement import Floats, Ints, PlacementPlan

Planner = Callable[[PlacementPlan, Ints], PlacementPlan]

STATIC: Final = "static"
FLEXMOE: Final = "flexmoe"
EPLB: Final = "eplb"
PLACEMENTS: Final = (STATIC, FLEXMOE, EPLB)


@dataclass(frozen=True)
class Placing:
    """How a run places its experts.

    Attributes:
        placement: one of ``PLACEMENTS``.
        num_slots: of each rank.
        threshold: ratio of the busiest rank to the mean from which flexmoe changes the placement.
        interval: steps between plans; their loads are added up.
        cost: of a layer, for flexmoe.
    """

    placement: str
    num_slots: int
    threshold: float
    interval: int
    cost: ExpertCost

    @property
    def planner(self) -> Planner:
        """The function from the plan so far and loads [ranks, experts] to the next plan."""
        planners: Mapping[str, Planner] = {
            STATIC: lambda plan, _: plan,
            FLEXMOE: partial(follow, cost=self.cost, threshold=self.threshold),
            EPLB: packed,
        }
        return planners[self.placement]


@dataclass(frozen=True)
class Replay:
    """What a placement makes of recorded loads.

    Attributes:
        ratios: [steps, layers] tokens of the busiest rank over the mean.
        seconds: [steps] modelled, all layers.
        num_moves: replicas that were new, in all steps and layers.
        planner_seconds: [plans] of the processor, for one layer each.
        last: the plan of each layer at the end.
    """

    ratios: Floats
    seconds: Floats
    num_moves: int
    planner_seconds: Floats
    last: tuple[PlacementPlan, ...]

    @property
    def mean_ratio(self) -> float:
        """The mean over steps and layers."""
        return float(self.ratios.mean())

    @property
    def late_ratio(self) -> float:
        """The 95th percentile over steps and layers."""
        return float(np.quantile(self.ratios, 0.95))


def replay(loads: Ints, placing: Placing) -> Replay:
    """Return what a placement makes of loads [steps, layers, ranks, experts]. The first plan is static."""
    num_steps, num_layers, num_ranks, num_experts = loads.shape
    plans = [PlacementPlan.static(num_experts, num_ranks, placing.num_slots)] * num_layers
    ratios, seconds = np.zeros((num_steps, num_layers)), np.zeros(num_steps)
    planner_seconds, num_moves = [], 0
    for step in range(num_steps):
        if step and step % placing.interval == 0:
            measured = loads[step - placing.interval : step].sum(0)
            for layer, plan in enumerate(plans):
                started = time.thread_time()
                plans[layer] = placing.planner(plan, measured[layer])
                planner_seconds.append(time.thread_time() - started)
                check_placement(plans[layer], num_experts, placing.num_slots)
                num_moves += plans[layer].changed_slots(plan)
        for layer, plan in enumerate(plans):
            parts = plan.parts()
            ratios[step, layer] = balance_ratio(parts, loads[step, layer])
            seconds[step] += step_seconds(parts, loads[step, layer], placing.cost)
    return Replay(ratios, seconds, num_moves, np.array(planner_seconds), tuple(plans))
