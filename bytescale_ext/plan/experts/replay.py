"""Replay of recorded loads with a placement. As in training, a step is planned from the loads of earlier steps."""

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
class PlacementSettings:
    """Settings of expert placement.

    Attributes:
        placement: one of ``PLACEMENTS``.
        num_slots: number of slots of each rank.
        threshold: ratio of the busiest rank to the mean above which flexmoe changes the placement.
        interval: number of steps between plans; a plan uses the sum of their loads.
        cost: cost constants of a layer, for flexmoe.
    """

    placement: str
    num_slots: int
    threshold: float
    interval: int
    cost: ExpertCost

    @property
    def planner(self) -> Planner:
        """Function from the current plan and the loads, [ranks, experts], to the next plan."""
        planners: Mapping[str, Planner] = {
            STATIC: lambda plan, _: plan,
            FLEXMOE: partial(follow, cost=self.cost, threshold=self.threshold),
            EPLB: packed,
        }
        return planners[self.placement]


@dataclass(frozen=True)
class LoadReplay:
    """Result of a replay.

    Attributes:
        ratios: tokens of the busiest rank over the mean, [steps, layers].
        seconds: modelled seconds of all layers, [steps].
        num_moves: number of new replicas in all steps and layers.
        planner_seconds: processor time of each plan of one layer, [plans].
        last: plan of each layer after the last step.
    """

    ratios: Floats
    seconds: Floats
    num_moves: int
    planner_seconds: Floats
    last: tuple[PlacementPlan, ...]

    @property
    def mean_ratio(self) -> float:
        """Mean of the ratios over steps and layers."""
        return float(self.ratios.mean())

    @property
    def late_ratio(self) -> float:
        """95th percentile of the ratios over steps and layers."""
        return float(np.quantile(self.ratios, 0.95))


def replay_loads(loads: Ints, placing: PlacementSettings) -> LoadReplay:
    """Replay loads, [steps, layers, ranks, experts], with a placement. The first plan has no replicas."""
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
    return LoadReplay(ratios, seconds, num_moves, np.array(planner_seconds), tuple(plans))
