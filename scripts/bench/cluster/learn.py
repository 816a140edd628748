"""Plans that learn, in virtual time: steps are planned, replayed under true costs, and learned from.

    python -m scripts.bench.cluster.learn --quick --json

Each step is planned with the costs learned so far, as in training: ranks exchange statistics every few steps, and
plans that are made ahead keep their costs. The replay under the true costs and speeds gives the step's time and the
time of each pass, which a noise of 2 % and rare outliers of up to 50 times blur. Nothing trains here: transfers,
launches and clocks of a real run are not measured. The last line has the figures of all cases, medians over the last
steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import numpy.typing as npt

from bytescale_ext.measure.devices import device_cost
from bytescale_ext.measure.learning import CostLearner, MeasuredPass, is_agreed
from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.cost.learned import LearnedCosts, Learner
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.evaluate.bounds import lower_bounds
from bytescale_ext.plan.evaluate.length_samplers import sample_lengths
from bytescale_ext.plan.evaluate.replay import replay_stages
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Cluster

Floats = npt.NDArray[np.float64]
Speeds = Callable[[int], tuple[float, ...]]

PLAN_AHEAD = 2
NOISE = 0.02
OUTLIERS = 0.002
CONTEXT, TOKENS_PER_RANK = 64 * 1024, 8192
PACKS = 4  # tokens of a step, over those that fill all ranks once


@dataclass(frozen=True)
class Case:
    """A training in virtual time.

    Attributes:
        nodes: number of nodes of 8 ranks.
        start: costs that the run begins with, as corrections of the true costs.
        speeds: true speed of each rank in a step, by its number from 0; empty: all are 1.
        steps: number of steps.
        learns: whether costs are learned.
    """

    nodes: int
    start: LearnedCosts
    speeds: Speeds
    steps: int
    learns: bool = True

    @property
    def cluster(self) -> Cluster:
        """The ranks."""
        return Cluster(8 * self.nodes, TOKENS_PER_RANK, 8)


@dataclass(frozen=True)
class Step:
    """One step in virtual time.

    Attributes:
        seconds: time of the step.
        bound: lower bound of the time of any plan.
        predicted: time of the step under the costs with which it was planned.
        learned: costs with which it was planned.
    """

    seconds: float
    bound: float
    predicted: float
    learned: LearnedCosts


def true_stage(cluster: Cluster) -> StageCost:
    """Return the true costs of a model of 7B parameters on this cluster."""
    cost = device_cost()
    return cost.whole().on(cost.nodes(cluster))


def run(case: Case) -> list[Step]:
    """Train in virtual time."""
    cluster, true = case.cluster, true_stage(case.cluster)
    began = case.start.of_stage(true)
    planner = HdpPlanner(cluster, (began,))
    learners = [
        CostLearner(began, Learner.new(cluster.num_ranks), rank, PLAN_AHEAD) for rank in range(cluster.num_ranks)
    ]
    random, steps, pending = np.random.default_rng(0), [], None
    for index in range(case.steps):
        learned = learners[0].at(index)
        lengths = sample_lengths("github", CONTEXT, PACKS * TOKENS_PER_RANK * cluster.num_ranks, seed=index)
        plan, speeds = planner.with_costs(learned)(lengths), case.speeds(index)
        truly = replace(cluster, speeds=speeds)
        seconds, passes = measured_passes(plan, true, truly.rank_speeds(), random)
        known = ShardTable.of(plan).at(replace(cluster, speeds=learned.speeds).rank_speeds())
        predicted = replay_stages(known, (learned.of_stage(began),)).makespan
        steps.append(Step(seconds, lower_bounds(lengths, truly, (true,)).largest, predicted, learned))
        if not case.learns:
            continue
        for learner, own in zip(learners, passes, strict=True):
            if pending is None:
                learner.add(plan, own)
            else:
                learner.adopt(pending, index)
        pending = None
        if is_agreed(index):
            pending = np.sum([learner.take() for learner in learners], axis=0)
    return steps


def measured_passes(
    plan: StepPlan, true: StageCost, speeds: Floats, random: np.random.Generator
) -> tuple[float, list[list[MeasuredPass]]]:
    """Return the time of a step and the passes of each rank, with the waiting for rings in forward passes.

    ``speeds``: true speed of each rank: [ranks].
    """
    table = ShardTable.of(plan).at(speeds)
    result = replay_stages(table, (true,))
    stops, starts = result.stops[:, :, 0], result.starts[:, :, 0].copy()
    for first, count in zip(table.offsets.tolist(), table.counts.tolist(), strict=True):
        starts[first + 1 : first + count, 0] = stops[first : first + count - 1, 1]  # a pass begins when the last ends
    blurred = (stops - starts) * (1 + NOISE * random.standard_normal(starts.shape))
    blurred *= np.where(random.random(starts.shape) < OUTLIERS, random.uniform(2, 50, starts.shape), 1.0)
    passes: list[list[MeasuredPass]] = []
    for first, count in zip(table.offsets.tolist(), table.counts.tolist(), strict=True):
        own = enumerate(blurred[first : first + count].tolist())
        passes.append([MeasuredPass(index, way, pair[way]) for index, pair in own for way in (False, True)])
    return result.makespan, passes


def over(steps: Sequence[Step], others: Sequence[Step], last: int) -> float:
    """Return the median ratio of the times of the last steps."""
    return median(mine.seconds / theirs.seconds for mine, theirs in zip(steps[-last:], others[-last:], strict=True))


def predicted(steps: Sequence[Step], last: int) -> float:
    """Return the median of predicted over measured time of the last steps."""
    return median(step.predicted / step.seconds for step in steps[-last:])


def equal(step: int) -> tuple[float, ...]:
    """Return the speeds of equal ranks."""
    return ()


def figures(quick: bool) -> dict[str, dict[str, float]]:
    """Return the figures of all cases."""
    nodes, steps, last = (2, 28, 8) if quick else (8, 40, 16)
    ranks, right = 8 * nodes, LearnedCosts()
    wrong = LearnedCosts(factors=(2.0, 1.0, 1.0, 1.0, 1 / 3))
    half = (1.0,) * (ranks // 2) + (0.5,) * (ranks // 2)
    one = (1.0,) * 5 + (0.5,) + (1.0,) * (ranks - 6)

    def stalled(step: int) -> tuple[float, ...]:
        return one if 4 <= step < 14 else ()

    learned, profiled = (run(Case(nodes, start, equal, steps)) for start in (wrong, right))
    fixed = run(Case(nodes, right, equal, steps, learns=False))
    unlearned = run(Case(nodes, wrong, equal, steps, learns=False))
    aware, unaware = (run(Case(nodes, right, lambda step: half, steps, learns=on)) for on in (True, False))
    stall, plain = (run(Case(nodes, right, stalled, steps, learns=on)) for on in (True, False))
    return {
        "wrong_costs": {
            "over_profiled": over(learned, fixed, last),
            "without_learning": over(unlearned, fixed, last),
            "predicted_over_measured": predicted(learned, last),
        },
        "right_costs": {
            "over_profiled": over(profiled, fixed, last),
            "predicted_over_measured": predicted(profiled, last),
        },
        "slow_node": {
            "over_unaware": over(unaware, aware, last),
            "of_bound": median(step.bound / step.seconds for step in aware[-last:]),
            "predicted_over_measured": predicted(aware, last),
        },
        "stalled_rank": {
            "over_unaware": median(plain[step].seconds / stall[step].seconds for step in range(10, 14)),
            "after_recovery": over(stall, fixed, last),
            "predicted_over_measured": predicted(stall, last),
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 nodes and 28 steps, not 8 nodes and 40 steps")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    args = parser.parse_args(argv)
    found = figures(args.quick)
    if not args.json:
        for name, case in found.items():
            print(f"{name:14}", ", ".join(f"{figure} {value:.3f}" for figure, value in case.items()))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
