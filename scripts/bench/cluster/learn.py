"""Plans that learn, in virtual time: steps are planned, replayed under true costs, and learned from.

    python -m scripts.bench.cluster.learn --quick --json    # about 2 minutes of processor time
    python -m scripts.bench.cluster.learn                   # 8 nodes: many times as long

Each step is planned with the costs learned so far, as in training: ranks exchange statistics every few steps, and
plans that are made ahead keep their costs. The replay under the true costs and speeds gives the step's time and the
time of each pass, which a noise of 2 % and rare outliers of up to 50 times blur. Nothing trains here: transfers,
launches and clocks of a real run are not measured. In pipelines, passes do not count the waiting for late ranks of a
ring. The last line has the figures of all cases, medians over the last steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
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
Speeds = Callable[[int], Floats]
Figures = Mapping[str, Mapping[str, Sequence[float]]]
"""Values of the last steps by case and figure."""

PLAN_AHEAD = 2
NOISE = 0.02
OUTLIERS = 0.002
CONTEXT, TOKENS_PER_RANK = 64 * 1024, 8192
PACKS = 4  # tokens of a step, over those that fill all ranks once


@dataclass(frozen=True)
class Case:
    """A training in virtual time.

    Attributes:
        nodes: number of nodes of 8 HDP ranks.
        start: costs that the run begins with, as corrections of the true costs.
        speeds: true speed in a step, by its number from 0: of each rank, [ranks], or stage, [ranks, stages].
        steps: number of steps.
        learns: whether costs are learned.
        stages: pipeline stages of each HDP rank.
        context: most tokens of a document.
    """

    nodes: int
    start: LearnedCosts
    speeds: Speeds
    steps: int
    learns: bool = True
    stages: int = 1
    context: int = CONTEXT

    @property
    def cluster(self) -> Cluster:
        """The ranks. A pipeline of equal stages holds as many tokens as ranks that hold the whole model."""
        return Cluster(8 * self.nodes, TOKENS_PER_RANK * self.stages, 8)

    @property
    def true_stage(self) -> StageCost:
        """True costs of a stage of a model of 7B parameters."""
        cost = device_cost()
        whole, share = cost.whole(), 1 / self.stages
        stage = StageCost(whole.forward.scaled(share), whole.backward.scaled(share))
        return stage.on(cost.nodes(self.cluster))

    def lengths(self, step: int) -> npt.NDArray[np.int64]:
        """Return the lengths of the documents of a step, by its number from 0: [n]."""
        cluster = self.cluster
        return sample_lengths("github", self.context, PACKS * cluster.tokens_per_rank * cluster.num_ranks, seed=step)


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


def run(case: Case) -> list[Step]:
    """Train in virtual time."""
    cluster, true, stages = case.cluster, case.true_stage, case.stages
    began = case.start.of_stage(true)
    planner = HdpPlanner(cluster, (began,) * stages, balance="dp" if stages == 1 else "pp")
    learners = [
        CostLearner(began, Learner.new(cluster.num_ranks, stages), rank, PLAN_AHEAD, stage)
        for rank in range(cluster.num_ranks)
        for stage in range(stages)
    ]
    random, steps, pending = np.random.default_rng(0), [], None
    for index in range(case.steps):
        learned, speeds = learners[0].at(index), case.speeds(index)
        lengths = case.lengths(index)
        plan = planner.with_costs(learned)(lengths)
        seconds, passes = measured_passes(plan, (true,) * stages, speeds, random)
        truly = replace(cluster, speeds=tuple(speeds.reshape(cluster.num_ranks, -1).min(axis=1).tolist()))
        known = ShardTable.of(plan).at(learned.all_speeds(stages, cluster.num_ranks).T)
        predicted = replay_stages(known, (learned.of_stage(began),) * stages).makespan
        steps.append(Step(seconds, lower_bounds(lengths, truly, (true,) * stages).largest, predicted, learned))
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
    plan: StepPlan, true: Sequence[StageCost], speeds: Floats, random: np.random.Generator
) -> tuple[float, list[list[MeasuredPass]]]:
    """Return the time of a step and the passes of each stage of each rank.

    Without pipelines, forward passes include the waiting for rings. ``speeds``: true speeds: [ranks] or [ranks, V].
    """
    table = ShardTable.of(plan).at(speeds)
    result = replay_stages(table, true)
    stops, starts = result.stops, result.starts.copy()
    places = list(zip(table.offsets.tolist(), table.counts.tolist(), strict=True))
    for first, count in places if len(true) == 1 else ():
        starts[first + 1 : first + count, 0] = stops[first : first + count - 1, 1]  # a pass begins when the last ends
    blurred = (stops - starts) * (1 + NOISE * random.standard_normal(starts.shape))
    blurred *= np.where(random.random(starts.shape) < OUTLIERS, random.uniform(2, 50, starts.shape), 1.0)
    passes: list[list[MeasuredPass]] = []
    for first, count in places:
        for stage in range(len(true)):
            own = enumerate(blurred[first : first + count, :, stage].tolist())
            passes.append([MeasuredPass(index, way, pair[way]) for index, pair in own for way in (False, True)])
    return result.makespan, passes


def over(steps: Sequence[Step], others: Sequence[Step], last: int) -> list[float]:
    """Return the ratio of the times of the last steps."""
    return [mine.seconds / theirs.seconds for mine, theirs in zip(steps[-last:], others[-last:], strict=True)]


def of_equal(steps: Sequence[Step], equal: Sequence[Step], last: int) -> list[float]:
    """Return ``of_bound`` over the ``of_bound`` of ranks of equal speed: pipelines fill and drain at any speed."""
    return [mine / theirs for mine, theirs in zip(of_bound(steps, last), of_bound(equal, last), strict=True)]


def predicted(steps: Sequence[Step], last: int) -> list[float]:
    """Return predicted over measured time of the last steps."""
    return [step.predicted / step.seconds for step in steps[-last:]]


def of_bound(steps: Sequence[Step], last: int) -> list[float]:
    """Return the bound over the time of the last steps: the share of the throughput that all speeds allow."""
    return [step.bound / step.seconds for step in steps[-last:]]


def always(speeds: Floats) -> Speeds:
    """Return the speeds of ranks that never change: [ranks] or [ranks, stages]."""
    return lambda step: speeds


def figures(quick: bool) -> Figures:
    """Return the figures of all cases."""
    nodes, steps, last = (2, 28, 8) if quick else (8, 40, 16)
    ranks, right = 8 * nodes, LearnedCosts()
    wrong = LearnedCosts(factors=(2.0, 1.0, 1.0, 1.0, 1 / 3))
    equal, half, one = np.ones(ranks), np.ones(ranks), np.ones(ranks)
    half[ranks // 2 :], one[5] = 0.5, 0.5

    def stalled(step: int) -> Floats:
        return one if 4 <= step < 14 else equal

    learned, profiled = (run(Case(nodes, start, always(equal), steps)) for start in (wrong, right))
    fixed = run(Case(nodes, right, always(equal), steps, learns=False))
    unlearned = run(Case(nodes, wrong, always(equal), steps, learns=False))
    aware, unaware = (run(Case(nodes, right, always(half), steps, learns=on)) for on in (True, False))
    long, long_unaware = (
        run(Case(nodes, right, always(one), steps, learns=on, context=nodes * CONTEXT)) for on in (True, False)
    )
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
            "of_bound": of_bound(aware, last),
            "predicted_over_measured": predicted(aware, last),
        },
        "slow_rank_long_documents": {
            "over_unaware": over(long_unaware, long, last),
            "of_bound": of_bound(long, last),
            "predicted_over_measured": predicted(long, last),
        },
        "stalled_rank": {
            "over_unaware": over(plain[10:14], stall[10:14], 4),
            "of_bound": of_bound(stall[11:14], 3),
            "after_recovery": over(stall, fixed, last),
            "of_bound_after_recovery": of_bound(stall, last),
            "predicted_over_measured": predicted(stall, last),
        },
        **pipelines(nodes, steps, last),
    }


def pipelines(nodes: int, steps: int, last: int) -> Figures:
    """Return the figures of pipelines of 4 stages: one slow stage, and a slow half of all pipelines."""
    ranks, stages, right = 8 * nodes, 4, LearnedCosts()
    equal, one, half = (np.ones((ranks, stages)) for _ in range(3))
    one[5, 2], half[ranks // 2 :] = 0.5, 0.5
    even = run(Case(nodes, right, always(equal), steps, learns=False, stages=stages))
    found = {"equal_stages": {"of_bound": of_bound(even, last)}}
    for name, speeds in (("slow_stage", one), ("slow_pipelines", half)):
        aware, unaware = (run(Case(nodes, right, always(speeds), steps, on, stages)) for on in (True, False))
        found[name] = {
            "over_unaware": over(unaware, aware, last),
            "of_bound": of_bound(aware, last),
            "of_equal": of_equal(aware, even, last),
            "predicted_over_measured": predicted(aware, last),
        }
    return found


def print_figures(found: Figures, only_json: bool) -> None:
    """Print a table of the figures, unless JSON is wanted only, and their medians as the last line."""
    if not only_json:
        print("| case | figure | lowest | median | highest |\n|---|---|---|---|---|")
        for name, case in found.items():
            for figure, values in case.items():
                cells = f"{min(values):.3f} | {median(values):.3f} | {max(values):.3f}"
                print(f"| {name.replace('_', ' ')} | {figure.replace('_', ' ')} | {cells} |")
    print(json.dumps({name: {key: round(median(row), 4) for key, row in case.items()} for name, case in found.items()}))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 nodes and 28 steps, not 8 nodes and 40 steps")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    args = parser.parse_args(argv)
    found = figures(args.quick)
    print_figures(found, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
