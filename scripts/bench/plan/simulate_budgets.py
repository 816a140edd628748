"""The planner's choice of slices within the memory of a device, in the cases of docs/results/simulated.md.

Each step of each case is one result, written as a line of JSON, so an interrupted run continues where it ended.
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
from bytescale_ext.new_file import appended
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.evaluate.bounds import lower_bounds
from bytescale_ext.plan.evaluate.length_samplers import sample_lengths
from bytescale_ext.plan.evaluate.replay import replay_stages
from bytescale_ext.plan.memory.held import peak_memory
from bytescale_ext.plan.setup.choose import choose
from bytescale_ext.plan.setup.planner import scenario_of
from bytescale_ext.plan.setup.setup import AUTO, Budget, setup_of_cost
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.placed import micro_batch_counts
from bytescale_ext.plan.step.sizes import ONE_SLICE, Cluster, Slicing
from scripts.bench.plan.simulate_cases import CASES, TOKENS_PER_RANK, Case
from scripts.bench.progress import progress

GIGABYTES = (80, 141)
HOST_GIGABYTES = 200
STAGES = (4, 8)
LIMIT = 1.10


@dataclass(frozen=True)
class Chosen:
    """The chosen slicing of one step, its time and its memory.

    Attributes:
        case, num_stages, gigabytes, seed: the step and the budget of a device.
        over_bound: time over the bound of 1F1B.
        slicing: fields of a ``Slicing``.
        longest: tokens of the longest document.
        parts: gigabytes of the device with most memory in use, by purpose.
        planning_seconds: processor time of the planner.
        host_gigabytes: budget of host memory for keys.
        in_host: gigabytes of keys in host memory.
    """

    case: str
    num_stages: int
    gigabytes: int
    seed: int
    over_bound: float
    slicing: tuple[int, int, bool, int, bool, int]
    longest: int
    parts: dict[str, float]
    planning_seconds: float
    host_gigabytes: int = 0
    in_host: float = 0.0

    @property
    def key(self) -> tuple[str, int, int, int, int]:
        """Step and budgets of the result."""
        return self.case, self.num_stages, self.gigabytes, self.seed, self.host_gigabytes

    @property
    def described(self) -> str:
        """The slicing, in words."""
        slicing = Slicing(*self.slicing)
        if slicing.num_slices == 1:
            return "1 slice"
        kept, summed = slicing.kept_tokens, slicing.summed_tokens
        keys = "all keys" if kept >= self.longest else f"keys to {kept // 1024}K" if kept else "no keys"
        swapped = slicing.swapped_tokens
        in_host = f"in host memory to {swapped // 1024}K" if kept < swapped else ""
        sums = "" if summed >= slicing.longest_kept else f"sums to {summed // 1024}K" if summed else "no sums"
        return ", ".join(filter(None, (f"{slicing.num_slices} slices", slicing.order, keys, in_host, sums)))


def run_step(case: Case, num_stages: int, gigabytes: int, seed: int, host_gigabytes: int = 0) -> Chosen:
    """Plan one step within a budget, check the plan, and replay it."""
    cluster = Cluster(case.num_ranks, TOKENS_PER_RANK)
    setup = setup_of_cost(shipped("bytescale_7b"), num_stages, cluster, case.context)
    setup = replace(setup, budget=Budget(1e9 * gigabytes, 1e9 * host_gigabytes), slicing=AUTO)
    scenario = scenario_of(choose(setup))
    lengths = sample_lengths(case.sampler, case.context, case.global_tokens, seed).tolist()
    began = time.process_time()
    plan = scenario.planner(lengths)
    seconds = time.process_time() - began
    check_step_plan(plan, lengths)
    assert plan.slicing is not None, f"{case=} {seed=}"
    table = ShardTable.of(plan)
    table = table.with_counts(np.array(micro_batch_counts(plan)))
    bound = lower_bounds(lengths, cluster, scenario.stages, ONE_SLICE).largest
    most = peak_memory(table, plan.slicing, scenario.stages[0].both, scenario.memory)
    slicing = plan.slicing
    return Chosen(
        case.name,
        num_stages,
        gigabytes,
        seed,
        replay_stages(table, scenario.stages, slicing).makespan / bound,
        astuple(slicing),
        max(lengths),
        {name: num_bytes / 1e9 for name, num_bytes in asdict(most.device_parts(scenario.memory)).items()},
        seconds,
        host_gigabytes,
        most.host_bytes(scenario.memory) / 1e9,
    )


def run_all(results: Path, num_seeds: int) -> list[Chosen]:
    """Run every step that ``results`` lacks, and add a line to the file for each."""
    rows = read(results)
    steps = product(range(num_seeds), GIGABYTES, STAGES, CASES)
    _run_missing(results, rows, [(case, num_stages, budget, seed, 0) for seed, budget, num_stages, case in steps])
    rows = complete([row for row in rows if row.seed < num_seeds])
    return rows + run_missed(results, rows)


def run_missed(results: Path, rows: Sequence[Chosen]) -> list[Chosen]:
    """Run the steps of each case that misses the target for lack of memory again, with host memory for keys."""
    steps = []
    for gigabytes, num_stages, case in product(GIGABYTES, STAGES, CASES):
        case_rows = [row for row in rows if row.key[:3] == (case.name, num_stages, gigabytes)]
        lacks_memory = any(min(row.slicing[1], row.slicing[3]) < row.longest for row in case_rows)
        if lacks_memory and statistics.mean(row.over_bound for row in case_rows) > LIMIT:
            steps += [(case, num_stages, gigabytes, row.seed, HOST_GIGABYTES) for row in case_rows]
    with_host = [row for row in read(results) if row.host_gigabytes]
    _run_missing(results, with_host, steps)
    keys = {(case.name, *rest) for case, *rest in steps}
    return [row for row in with_host if row.key in keys]


def _run_missing(results: Path, rows: list[Chosen], steps: Iterable[tuple[Case, int, int, int, int]]) -> None:
    """Run the steps that ``rows`` lack, and add them to ``rows`` and to the file."""
    done = {row.key for row in rows}
    missing = [step for step in steps if (step[0].name, *step[1:]) not in done]
    for step in progress(missing, lambda step: f"{step[0].name} x {step[1]} stages, {step[2]} GB, step {step[3]}"):
        rows.append(run_step(*step))
        with appended(results) as file:
            file.write(json.dumps(asdict(rows[-1])) + "\n")


def complete(rows: Sequence[Chosen]) -> list[Chosen]:
    """Return the results of the steps that all cases have run within a budget."""
    on_device = [row for row in rows if not row.host_gigabytes]
    counts = Counter((row.gigabytes, row.seed) for row in on_device)
    return [row for row in on_device if counts[row.gigabytes, row.seed] == len(CASES) * len(STAGES)]


def read(results: Path) -> list[Chosen]:
    """Return the results in a file; none if there is no file."""
    lines: Iterable[str] = results.read_text(encoding="utf-8").splitlines() if results.exists() else ()
    values: Iterable[dict[str, Any]] = (json.loads(line) for line in lines)
    return [Chosen(**{**value, "slicing": tuple(value["slicing"])}) for value in values]


def section(results: Sequence[Chosen]) -> list[str]:
    """Return the section of the page: a table for each budget, with the number of cases that meet the target."""
    lines = ["## Within the memory of a device", "", _TEXT, ""]
    for gigabytes, host in product(GIGABYTES, (0, HOST_GIGABYTES)):
        steps = [step for step in results if (step.gigabytes, step.host_gigabytes) == (gigabytes, host)]
        groups = [
            [step for step in steps if (step.case, step.num_stages) == (case.name, num_stages)]
            for num_stages, case in product(STAGES, CASES)
        ]
        rows = [_row(group) for group in groups if group]
        if not rows:
            continue
        met = sum(row.endswith("| met |") for row in rows)
        num_steps = len({step.seed for step in steps})
        budget = f"{gigabytes} GB" + (f" and {host} GB of host memory, for cases that lack memory" if host else "")
        lines += [f"**{budget}**, {num_steps} steps: {met} of {len(rows)} cases meet {LIMIT:.2f}", ""]
        lines += [
            "| case | time / bound | slices chosen, first step | GB | activations | kept keys | key sums | states | "
            f"gradients, logits | {'in host memory | ' if host else ''}planning, processor s | |",
            "|---|---|---|---|---|---|---|---|---|---|---|" + "---|" * bool(host),
            *rows,
            "",
        ]
    return lines


def _row(steps: Sequence[Chosen]) -> str:
    largest = max(steps, key=lambda step: sum(step.parts.values()))
    over = [step.over_bound for step in steps]
    parts = " | ".join(f"{num_bytes:.1f}" for num_bytes in largest.parts.values())
    planning = [step.planning_seconds for step in steps]
    in_host = f"{max(step.in_host for step in steps):.1f} | " if largest.host_gigabytes else ""
    return (
        f"| {largest.case} x {largest.num_stages} stages | {statistics.mean(over):.3f} ({max(over):.3f}) | "
        f"{steps[0].described} | {sum(largest.parts.values()):.1f} | {parts} | "
        f"{in_host}{statistics.mean(planning):.1f} ({max(planning):.1f}) | "
        f"{'met' if statistics.mean(over) <= LIMIT else '**missed**'} |"
    )


_TEXT = (
    "The planner chooses slices, order, kept keys and kept sums of each step within the memory of a device "
    "(`--seq1f1b-slices auto --device-memory-gb`; `bytescale_ext/plan/evaluate/slicing_choice.py`). *time / bound* is "
    f"relative to the bound of 1F1B: the mean of the steps, with the worst in brackets; the target is {LIMIT:.2f}. "
    "Gigabytes are for the fullest device and step: activations with each slice's own keys, keys kept of other ranks, "
    "sums of key gradients, parameters with their gradients and the optimizer's part, and the gradients of a layer or "
    "the logits. *sums to N*: ranks keep the sums of key gradients of documents of up to N tokens; longer documents "
    "send them home with each slice. *in host memory to N*: for documents of up to N tokens, keys that are not kept on "
    "the device are in host memory, over a link of 55 GB/s (`--host-memory-gb`). `docs/results/slices.md` explains the "
    "missed target."
)
