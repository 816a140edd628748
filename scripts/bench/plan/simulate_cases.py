"""The cases of docs/results/simulated.md: steps of published lengths, planning speed, gaps to the optimum."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from itertools import product

from bytescale_ext.measure.cost_file import shipped
from bytescale_ext.measure.devices import device_cost
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import key_value_bytes
from bytescale_ext.plan.evaluate.bounds import lower_bounds
from bytescale_ext.plan.evaluate.exact import brute_force, solve, without_launch
from bytescale_ext.plan.evaluate.length_samplers import sample_lengths
from bytescale_ext.plan.evaluate.replay import replay
from bytescale_ext.plan.evaluate.schedulers import Outcome
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.hdp.table import auto_balance
from bytescale_ext.plan.schedule.document_slices import affordable_tokens
from bytescale_ext.plan.setup.choose import choose
from bytescale_ext.plan.setup.costs import stage_costs
from bytescale_ext.plan.setup.planner import scenario_of
from bytescale_ext.plan.setup.setup import setup_of_cost
from bytescale_ext.plan.step.sizes import ONE_SLICE, Cluster, Slicing
from megatron.bytescale.cli.simulate import DEFAULTS, all_schedulers, outcomes_of
from megatron.bytescale.features.slices.flags import ORDER_FLAG

K, M = 1 << 10, 1 << 20
TOKENS_PER_RANK = 8 * K
ALL_KEYS = 2 * M
SLICINGS = (
    Slicing(2),
    Slicing(8),
    Slicing(8, ALL_KEYS),
    Slicing(8, ALL_KEYS).in_eager_order(),
    Slicing(12, ALL_KEYS).in_eager_order(),
)
"""Slicings of the cases with pipelines; 0 kept tokens mean the default of training."""
ORDER_NOTE = f"*{SLICINGS[-1].order}*: stages run two forwards ahead (`{ORDER_FLAG}`)."


@dataclass(frozen=True)
class Case:
    """A distribution of lengths on a cluster."""

    sampler: str
    context: int
    num_ranks: int
    global_tokens: int

    @property
    def name(self) -> str:
        context = f"{self.context // M}M" if self.context >= M else f"{self.context // K}K"
        return f"{self.sampler} {context}, {self.num_ranks} ranks"


CASES = (
    *(Case(sampler, 256 * K, 64, 4 * M) for sampler in ("byted", "github", "wikipedia")),
    *(Case(sampler, 1 * M, 128, 8 * M) for sampler in ("byted", "github")),
    *(Case(sampler, 2 * M, 512, 32 * M) for sampler in ("byted", "github")),
)


@dataclass(frozen=True)
class Scores:
    """Outcomes of every scheduler in one case, step by step.

    Attributes:
        bounds: lower bound of each step without slices.
        outcomes: outcomes by scheduler, and by the ``label`` of a slicing.
        sliced_bounds: lower bound of each step in slices, by the label of the slicing.
    """

    case: Case
    num_stages: int
    bounds: list[float]
    outcomes: dict[str, list[Outcome] | str]
    sliced_bounds: dict[str, list[float]]

    def over_bound(self, name: str) -> list[float]:
        return [outcome.makespan / bound for outcome, bound in zip(self.of(name), self.bounds, strict=True)]

    def over_own_bound(self, name: str) -> list[float]:
        """Return makespans over the bound of their own slices, or of whole micro-batches."""
        bounds = self.sliced_bounds.get(name, self.bounds)
        return [outcome.makespan / bound for outcome, bound in zip(self.of(name), bounds, strict=True)]

    @property
    def best_sliced(self) -> str:
        """Name of our fastest plans with pipelines, in slices or whole."""
        return min(("ours", *self.sliced_bounds), key=lambda name: statistics.mean(self.over_bound(name)))

    def faster_than(self, name: str, other: str) -> list[float]:
        return [b.makespan / a.makespan for a, b in zip(self.of(name), self.of(other), strict=True)]

    def of(self, name: str) -> list[Outcome]:
        outcomes = self.outcomes[name]
        return [] if isinstance(outcomes, str) else outcomes


def run_case(case: Case, num_stages: int, num_seeds: int) -> Scores:
    """Run every scheduler on every step of a case."""
    cluster = Cluster(case.num_ranks, TOKENS_PER_RANK)
    scenario = scenario_of(choose(setup_of_cost(shipped("bytescale_7b"), num_stages, cluster, case.context)))
    steps = [sample_lengths(case.sampler, case.context, case.global_tokens, seed).tolist() for seed in range(num_seeds)]
    schedulers = all_schedulers()
    outcomes = {name: outcomes_of(schedulers[name], scenario, steps) for name in DEFAULTS}

    def bounds(slicing: Slicing) -> list[float]:
        return [lower_bounds(step, cluster, scenario.stages, slicing).largest for step in steps]

    sliced_bounds = {}
    for slicing in SLICINGS if num_stages > 1 else ():
        name = label(slicing)
        used = slicing if slicing.kept_tokens else replace(slicing, kept_tokens=default_kept_keys(num_stages, slicing))
        outcomes[name] = outcomes_of(schedulers["ours"], replace(scenario, slicing=used), steps)
        sliced_bounds[name] = bounds(used)
    return Scores(case, num_stages, bounds(ONE_SLICE), outcomes, sliced_bounds)


def label(slicing: Slicing) -> str:
    """Return the name of our plans in slices."""
    kept = "all keys" if slicing.kept_tokens else ""
    return ", ".join(filter(None, ("ours", f"{slicing.num_slices} slices", kept, slicing.order)))


def default_kept_keys(num_stages: int, slicing: Slicing) -> int:
    """Return the default of ``--hdp-kept-keys`` in tokens."""
    cost = shipped("bytescale_7b")
    return affordable_tokens(num_stages, slicing, TOKENS_PER_RANK, cost.layer_bytes, key_value_bytes(cost.shape))


@dataclass(frozen=True)
class PlanningSpeed:
    """Processor seconds of the plans of steps with ``num_sequences`` sequences.

    Attributes:
        num_ranks: HDP ranks.
        num_sequences: sequences of a step.
        pipeline: stages and slices, or "none".
        hidden: seconds under costs whose exchange computation hides.
        exposed: seconds under costs of an H100 in nodes of 8; empty: not measured.
    """

    num_ranks: int
    num_sequences: int
    pipeline: str
    hidden: list[float]
    exposed: list[float]


def planning_speeds(num_seeds: int) -> list[PlanningSpeed]:
    """Return the processor seconds of plans of GitHub's lengths at 2M tokens."""
    sizes = [(512, 15_000), *product((512, 4_096, 12_288, 100_000), (50_000, 500_000))]
    alone = [
        PlanningSpeed(
            *size,
            "none",
            _planning_seconds(shipped("bytescale_7b"), Cluster(size[0], TOKENS_PER_RANK), size[1], num_seeds),
            _planning_seconds(device_cost("h100"), Cluster(size[0], TOKENS_PER_RANK, 8), size[1], num_seeds),
        )
        for size in sizes
    ]
    pipelines = [
        PlanningSpeed(
            512,
            15_000,
            f"4 stages, {str(slicing).split(',')[0]}",
            _planning_seconds(
                shipped("bytescale_7b"), Cluster(512, TOKENS_PER_RANK), 15_000, num_seeds, num_stages=4, slicing=slicing
            ),
            [],
        )
        for slicing in (ONE_SLICE, SLICINGS[-1])
    ]
    return alone + pipelines


def _planning_seconds(
    cost: ModelCost,
    cluster: Cluster,
    num_sequences: int,
    num_seeds: int,
    *,
    num_stages: int = 1,
    slicing: Slicing = ONE_SLICE,
) -> list[float]:
    """Return the processor seconds of a plan for each seed of the lengths."""
    stages = stage_costs(setup_of_cost(cost, num_stages))
    planner = HdpPlanner(cluster, stages, slicing, balance=auto_balance(num_stages > 1))
    seconds = []
    for seed in range(num_seeds):
        lengths = sample_lengths("github", 2 * M, 2600 * num_sequences, seed)[:num_sequences].tolist()
        assert len(lengths) == num_sequences, f"{len(lengths)=} {num_sequences=}"
        began = time.process_time()
        planner(lengths)
        seconds.append(time.process_time() - began)
    return seconds


def small_gaps() -> list[tuple[str, list[float], list[float]]]:
    """Try every schedule of up to 8 documents on 4 ranks; return (name, plan / optimum, optimum / bound)."""
    rows = []
    for num_sequences in (4, 6, 8):
        gaps, bounds = zip(*(_gap(4, num_sequences, seed, None) for seed in range(3)), strict=True)
        rows.append((f"{num_sequences} documents on 4 ranks, brute force, 3 steps", list(gaps), list(bounds)))
    return rows


def middle_gaps(limit_seconds: float) -> list[tuple[str, list[float], list[float]]]:
    """Return the same for more documents, with the lower bound of CP-SAT as the optimum."""
    rows = []
    for num_ranks, num_sequences in ((8, 24), (8, 48), (16, 48)):
        gaps, bounds = zip(*(_gap(num_ranks, num_sequences, seed, limit_seconds) for seed in range(3)), strict=True)
        rows.append((f"{num_sequences} documents on {num_ranks} ranks, CP-SAT, 3 steps", list(gaps), list(bounds)))
    return rows


def _gap(num_ranks: int, num_sequences: int, seed: int, limit_seconds: float | None) -> tuple[float, float]:
    """Return (our plan / optimum, optimum / lower bound) without launches; the optimum may be its best known bound."""
    stage = stage_costs(setup_of_cost(shipped("bytescale_7b")))[0]
    free = type(stage)(without_launch(stage.forward), without_launch(stage.backward))
    context = num_ranks * TOKENS_PER_RANK
    lengths = sample_lengths("byted", context, 64 * num_sequences * context, seed)[:num_sequences].tolist()
    cluster = Cluster(num_ranks, TOKENS_PER_RANK)
    bound = lower_bounds(lengths, cluster, (free,)).largest
    if limit_seconds is None:
        best = brute_force(lengths, cluster, free.both)
    else:  # a solver that stops early may have proved less than the bound
        best = max(bound, solve(lengths, cluster, free.both, limit_seconds).bound)
    plan = HdpPlanner(cluster, (free,))(lengths)
    return replay(plan, free.both).makespan / best, best / bound
