"""The planner's own choice of slices within the memory of a device, in the cases of docs/performance.md.

Each step of each case is one result, kept as a line of JSON, so that an interrupted run goes on where it ended.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bytescale_ext.measure.cost_file import shipped
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.evaluate.bounds import lower_bounds
from bytescale_ext.plan.evaluate.length_samplers import sample_lengths
from bytescale_ext.plan.evaluate.replay import replay_stages
from bytescale_ext.plan.evaluate.schedulers import Scenario, planner_of
from bytescale_ext.plan.hdp.planner import auto_balance
from bytescale_ext.plan.hdp.slicing_choice import SlicingChoice
from bytescale_ext.plan.memory.held import held
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.placed import micro_batch_counts
from bytescale_ext.plan.step.sizes import ONE_SLICE, Cluster, Slicing
from scripts.bench.plan.simulate_cases import CASES, TOKENS_PER_RANK, Case

GIGABYTES = (80, 141)
STAGES = (4, 8)
LIMIT = 1.10


@dataclass(frozen=True)
class Chosen:
    """What the planner chose for one step, and what it takes.

    Attributes:
        case, num_stages, gigabytes, seed: the step and the budget of a device.
        over_bound: time over the bound of 1F1B.
        slicing: fields of a ``Slicing``.
        longest: tokens of the longest document.
        parts: gigabytes of the device that takes most, by name.
        planning_seconds: processor time of the planner.
    """

    case: str
    num_stages: int
    gigabytes: int
    seed: int
    over_bound: float
    slicing: tuple[int, int, bool, int]
    longest: int
    parts: dict[str, float]
    planning_seconds: float

    @property
    def key(self) -> tuple[str, int, int, int]:
        """What the result is of."""
        return self.case, self.num_stages, self.gigabytes, self.seed

    @property
    def described(self) -> str:
        """The slicing, in words."""
        slicing = Slicing(*self.slicing)
        if slicing.num_slices == 1:
            return "1 slice"
        kept, summed = slicing.kept_tokens, slicing.summed_tokens
        keys = "all keys" if kept >= self.longest else f"keys to {kept // 1024}K" if kept else "no keys"
        sums = "" if summed >= kept else f"sums to {summed // 1024}K" if summed else "no sums"
        return ", ".join(filter(None, (f"{slicing.num_slices} slices", slicing.order, keys, sums)))


def run_step(case: Case, num_stages: int, gigabytes: int, seed: int) -> Chosen:
    """Plan one step within a budget, check the plan and replay it."""
    cluster = Cluster(case.num_ranks, TOKENS_PER_RANK)
    scenario = Scenario.of(cluster, case.context, shipped("bytescale_7b"), num_stages)
    scenario = replace(scenario, choice=SlicingChoice(scenario.memory, 1e9 * gigabytes))
    lengths = sample_lengths(case.sampler, case.context, case.global_tokens, seed).tolist()
    began = time.process_time()
    plan = planner_of(scenario, auto_balance(aligned=True))(lengths)
    seconds = time.process_time() - began
    check_step_plan(plan, lengths)
    assert plan.slicing is not None, f"{case=} {seed=}"
    table = ShardTable.of(plan)
    table = table.with_counts(np.array(micro_batch_counts(plan)))
    bound = lower_bounds(lengths, cluster, scenario.stages, ONE_SLICE).largest
    most = held(table, plan.slicing, scenario.stages[0].both, scenario.memory).device_parts(scenario.memory)
    slicing = plan.slicing
    return Chosen(
        case.name,
        num_stages,
        gigabytes,
        seed,
        replay_stages(table, scenario.stages, slicing).makespan / bound,
        astuple(slicing),
        max(lengths),
        {name: num_bytes / 1e9 for name, num_bytes in asdict(most).items()},
        seconds,
    )


def run_all(results: Path, num_seeds: int) -> list[Chosen]:
    """Run every step that ``results`` does not have yet, and add a line to it for each."""
    found = read(results)
    done = {one.key for one in found}
    for seed, gigabytes, num_stages, case in product(range(num_seeds), GIGABYTES, STAGES, CASES):
        if (case.name, num_stages, gigabytes, seed) in done:
            continue
        found.append(run_step(case, num_stages, gigabytes, seed))
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(found[-1])) + "\n")
    return complete([one for one in found if one.seed < num_seeds])


def complete(found: Sequence[Chosen]) -> list[Chosen]:
    """Return the results of the steps that all cases have run within a budget."""
    counts = Counter((one.gigabytes, one.seed) for one in found)
    return [one for one in found if counts[one.gigabytes, one.seed] == len(CASES) * len(STAGES)]


def read(results: Path) -> list[Chosen]:
    """Return the results in a file; none where there is no file."""
    lines: Iterable[str] = results.read_text(encoding="utf-8").splitlines() if results.exists() else ()
    values: Iterable[dict[str, Any]] = (json.loads(line) for line in lines)
    return [Chosen(**{**value, "slicing": tuple(value["slicing"])}) for value in values]


def section(found: Sequence[Chosen]) -> list[str]:
    """Return the section of the page: a table for each budget, and how many cases meet the target."""
    lines = ["## Within the memory of a device", "", _TEXT, ""]
    for gigabytes in GIGABYTES:
        steps = [one for one in found if one.gigabytes == gigabytes]
        rows = [
            _row([one for one in steps if (one.case, one.num_stages) == (case.name, num_stages)], case, num_stages)
            for num_stages, case in product(STAGES, CASES)
        ]
        met = sum(row.endswith("| met |") for row in rows)
        num_steps = len({one.seed for one in steps})
        lines += [f"**{gigabytes} GB**, {num_steps} steps: {met} of {len(rows)} cases meet {LIMIT:.2f}", ""]
        lines += [
            "| case | time / bound | slices chosen, first step | GB | activations | kept keys | key sums | states | "
            "gradients, logits | planning, processor s | |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    return lines


def _row(steps: Sequence[Chosen], case: Case, num_stages: int) -> str:
    largest = max(steps, key=lambda one: sum(one.parts.values()))
    over = [one.over_bound for one in steps]
    parts = " | ".join(f"{num_bytes:.1f}" for num_bytes in largest.parts.values())
    planning = [one.planning_seconds for one in steps]
    return (
        f"| {case.name} x {num_stages} stages | {statistics.mean(over):.3f} ({max(over):.3f}) | {steps[0].described} | "
        f"{sum(largest.parts.values()):.1f} | {parts} | {statistics.mean(planning):.1f} ({max(planning):.1f}) | "
        f"{'met' if statistics.mean(over) <= LIMIT else '**missed**'} |"
    )


_TEXT = (
    "The planner chooses slices, order, kept keys and kept sums of each step within the memory of a device "
    "(`--seq1f1b-slices auto --device-memory-gb`; `bytescale_ext/plan/hdp/slicing_choice.py`). *time / bound* is "
    "relative to the bound of 1F1B, the mean of the steps with the worst in brackets; the target is "
    f"{LIMIT:.2f}. Gigabytes are of the device and the step that take most: activations with each slice's own keys, "
    "keys kept of other ranks, sums of key gradients, parameters with their gradients and the optimizer's part, and "
    "the gradients of a layer or the logits. *sums to N* means that ranks keep the sums of key gradients of documents "
    "of up to N tokens; those of longer documents travel home with each slice. `docs/seq1f1b.md` says what is "
    "possible where the target is missed."
)
