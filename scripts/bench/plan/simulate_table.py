"""Write docs/results/simulated.md: schedulers against each other, planning speed, gaps to the true optimum.

    .venv/bin/python scripts/bench/plan/simulate_table.py
    .venv/bin/python scripts/bench/plan/simulate_table.py --only budgets speed   # only these sections of the page
    .venv/bin/python scripts/bench/plan/simulate_table.py --only summary         # only its head and its pictures

Everything is simulated: plans are replayed under the shipped costs of a 7B model, without a training and a GPU.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.measure.cost_file import shipped
from bytescale_ext.new_file import write_text
from bytescale_ext.plan.evaluate.length_samplers import sample_lengths
from bytescale_ext.plan.evaluate.pipeline_limit import pipeline_limit
from bytescale_ext.plan.setup.costs import stage_costs
from bytescale_ext.plan.setup.setup import setup_of_cost
from bytescale_ext.plan.step.sizes import Cluster, Slicing
from scripts.bench.plan.simulate_budgets import (
    GIGABYTES,
    HOST_GIGABYTES,
    LIMIT,
    STAGES,
    Chosen,
    run_all,
    section,
)
from scripts.bench.plan.simulate_cases import (
    CASES,
    ORDER_NOTE,
    TOKENS_PER_RANK,
    M,
    PlanningSpeed,
    Scores,
    default_kept_keys,
    middle_gaps,
    planning_speeds,
    run_case,
    small_gaps,
)
from scripts.bench.plan.simulate_summary import draw_figures, with_summary
from scripts.bench.progress import progress
from scripts.bench.report import ROOT, Target

OUT = ROOT / "docs" / "results" / "simulated.md"
RESULTS = Path("simulate_budgets.jsonl")
FORM = ".3f"
SPEED_LIMITS = {(512, 15_000, "none"): 0.1, (12_288, 500_000, "none"): 3.0}
"""Targets of planning in processor seconds, by ranks, documents and pipeline."""


def main() -> None:
    """Run everything and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, metavar="n", help="steps of each case (5)")
    parser.add_argument("--solver-seconds", type=float, default=30.0, metavar="S", help="of each middle case (30)")
    parser.add_argument(
        "--only", nargs="+", choices=("budgets", "speed", "summary"),
        help="run only these sections, and put them into the page",
    )  # fmt: skip
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="FILE",
        help="finished steps within budgets, a line of JSON each (simulate_budgets.jsonl)",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=OUT, metavar="FILE", help="page to write (%(default)s)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.only is not None:
        text = args.output.read_text(encoding="utf-8")
        if "budgets" in args.only:
            text = with_budgets(text, run_all(args.results, args.seeds))
        if "speed" in args.only:
            text = with_speeds(text, planning_speeds(args.seeds))
        write_page(text, args.output)
        return
    parts = [(case, num_stages) for num_stages in (1, 4, 8) for case in CASES]
    shown = progress(parts, lambda part: f"{part[0].name} x {part[1]} stages")
    scores = [run_case(case, num_stages, args.seeds) for case, num_stages in shown]
    text = page(scores, [*small_gaps(), *middle_gaps(args.solver_seconds)], args)
    text = with_speeds(with_budgets(text, run_all(args.results, args.seeds)), planning_speeds(args.seeds))
    write_page(text, args.output)
    print(text)


def write_page(text: str, path: Path) -> None:
    """Write a page with its summary, and its pictures."""
    write_text(path, with_summary(text))
    draw_figures(text, path.parent)


def with_budgets(text: str, results: Sequence[Chosen]) -> str:
    """Return the page with the section of choices within a budget, and their targets."""
    rows = []
    for gigabytes, host, num_stages, case in product(GIGABYTES, (0, HOST_GIGABYTES), STAGES, CASES):
        budget = (case.name, num_stages, gigabytes, host)
        over = [step.over_bound for step in results if (*step.key[:3], step.host_gigabytes) == budget]
        figure = f"{case.name} x {num_stages} stages: time / pipeline bound, mean, chosen within {gigabytes} GB"
        figure += f" and {host} GB of host memory" if host else ""
        rows += [Target(figure, statistics.mean(over), LIMIT, True, FORM).row] if over else []
    return _with_section(_with_targets(text, ", chosen within ", rows), section(results), "## What 1F1B allows")


def cell(seconds: Sequence[float]) -> str:
    """Return the median and the largest of some seconds; "-" without any."""
    return f"{statistics.median(seconds):.3f} ({max(seconds):.3f})" if seconds else "-"


def with_speeds(text: str, speeds: Sequence[PlanningSpeed]) -> str:
    """Return the page with the section of planning speed, and its targets."""
    rows = []
    for speed in speeds:
        limit = SPEED_LIMITS.get((speed.num_ranks, speed.num_sequences, speed.pipeline))
        if limit is not None:
            figure = f"plan of {speed.num_sequences:,} documents on {speed.num_ranks:,} ranks, processor seconds"
            seconds = statistics.median(speed.exposed or speed.hidden)
            rows.append(Target(f"{figure}, median", seconds, limit, True, FORM).row)
    lines = ["## Planning speed", "", f"Processor seconds, {platform.machine()}, GitHub's lengths at 2M tokens: median"]
    lines += ["(worst). *Exposed*: costs of an H100 in nodes of 8; the targets are for them.", ""]
    lines += ["| ranks | documents | pipeline | hidden exchange | exposed |", "|---|---|---|---|---|"]
    lines += [
        f"| {speed.num_ranks:,} | {speed.num_sequences:,} | {speed.pipeline} | {cell(speed.hidden)} | "
        f"{cell(speed.exposed)} |"
        for speed in speeds
    ]
    return _with_section(_with_targets(text, "| plan of ", rows), [*lines, ""], "## Distance from the true optimum")


def _with_targets(text: str, mark: str, rows: Sequence[str]) -> str:
    """Replace the rows of the first table that contain ``mark``, or add rows at its end."""
    lines = text.split("\n")
    start = lines.index("## Targets")
    stop = lines.index("", start + 2)
    others = [line for line in lines[start:stop] if mark not in line]
    return "\n".join([*lines[:start], *others, *rows, *lines[stop:]])


def _with_section(text: str, lines: Sequence[str], before: str) -> str:
    """Replace the section with the first line as its heading, or put it before another section."""
    head, _, rest = text.partition(f"{lines[0]}\n")
    if rest:
        rest = rest[rest.index(f"{before}\n") :]
    else:
        head, _, after = text.partition(f"{before}\n")
        rest = f"{before}\n{after}"
    return head + "\n".join(lines) + "\n" + rest


def targets(scores: Sequence[Scores]) -> list[Target]:
    """Return the targets of the schedulers."""
    rows = []
    for score in scores:
        over, name = score.over_bound("ours"), score.case.name
        if score.num_stages > 1:
            text = f"{name} x {score.num_stages} stages: time / pipeline bound"
            rows.append(Target(f"{text}, mean", statistics.mean(over), 1.10, True, FORM))
            best = score.best_sliced
            slicing = best.removeprefix("ours, ") if best in score.sliced_bounds else "no slices"
            mean = statistics.mean(score.over_bound(best))
            rows.append(Target(f"{text}, mean, best of all ({slicing})", mean, 1.10, True, FORM))
            continue
        is_hardest = (score.case.sampler, score.case.context) == ("github", 2 * M)
        rows.append(Target(f"{name}: time / bound, mean", statistics.mean(over), 1.05, True, FORM))
        rows.append(Target(f"{name}: time / bound, worst", max(over), 1.10, True, FORM))
        if score.of("megatron-hybrid"):
            faster = statistics.mean(score.faster_than("ours", "megatron-hybrid"))
            rows.append(Target(f"{name}: over megatron-hybrid", faster, 1.25 if is_hardest else 1.08, form=FORM))
        if is_hardest and score.of("static"):
            faster = statistics.mean(score.faster_than("ours", "static"))
            rows.append(Target(f"{name}: over static", faster, 7.89, form=FORM))
    return rows


def page(
    scores: Sequence[Scores],
    gaps: Sequence[tuple[str, list[float], list[float]]],
    args: argparse.Namespace,
) -> str:
    """Return the text of docs/results/simulated.md."""
    options = "" if args.seeds == 5 else f" --seeds {args.seeds}"
    lines = [
        "# Simulated plans",
        "",
        "This page is written by one command; do not edit it:",
        "",
        f"    .venv/bin/python scripts/bench/plan/simulate_table.py{options}",
        "",
        "## What the figures are",
        "",
        f"Everything is simulated: {args.seeds} steps of each case (seeds 0 to {args.seeds - 1}) are planned, and the "
        "plans are replayed under the costs of `bytescale_ext/measure/costs/bytescale_7b.json`, with C = 8K tokens and "
        "without offloading. A figure is the mean of the steps, with the worst step in brackets. *time / bound*: time "
        "over a lower bound (`bytescale_ext/plan/evaluate/bounds.py`); no plan can be faster, and possibly no plan "
        "reaches it. *idle*, *exposed*: share of time without work, and of exchange that does not overlap.",
        "",
        "*static* is the smallest context-parallel mesh that holds the context. *megatron-hybrid* is Megatron's "
        "installed `BalancedCPScheduler`, with one launch per sub-sample and its barriers. *naive* and *bytescale* are "
        "Algorithms 1 and 2 of the paper.",
        "",
        "With pipelines our plans also run in slices (`--seq1f1b-slices`). The bound is always the bound of 1F1B, so "
        "all rows can be compared, and a row may be below 1. Slices of one long sequence, with the models of the "
        "Seq1F1B paper, are in `docs/results/slices.md`.",
        "",
        "Each rank keeps the keys of documents up to a certain length from slice to slice (`--hdp-kept-keys`). By "
        f"default a stage then takes no more memory than under 1F1B: {_kept_text()}. *all keys* keeps the keys of "
        "every document, which takes more memory; without it longer documents exchange their keys again for each "
        f"slice, and many slices take longer than none. {ORDER_NOTE} *GB* is the memory of the fullest device: "
        "activations, kept keys and their gradient sums, parameters, gradients, the optimizer's part (shared by all "
        "ranks), the gradients of a layer, and the logits. Rows above 80 or 141 GB do not run on GPUs of that size.",
        "",
        "## Targets",
        "",
        "| figure | target | reached | |",
        "|---|---|---|---|",
        *(target.row for target in targets(scores)),
    ]
    for num_stages in sorted({score.num_stages for score in scores}):
        title = "Without pipelines" if num_stages == 1 else f"{num_stages} pipeline stages (ranks are pipelines)"
        lines += ["", f"## {title}", ""]
        for score in scores:
            if score.num_stages == num_stages:
                lines += [*_case_table(score), ""]
    lines += limits(scores)
    lines += ["## Distance from the true optimum", "", _GAP_TEXT, ""]
    lines += ["| case | plan / optimum | optimum / bound of this page |", "|---|---|---|"]
    lines += [f"| {name} | {_spread(plans, 4)} | {_spread(bounds, 4)} |" for name, plans, bounds in gaps]
    return "\n".join(lines) + "\n"


def _kept_text() -> str:
    lengths = [
        f"{default_kept_keys(num_stages, Slicing(k)):,} tokens with {num_stages} stages and {k} slices"
        for num_stages in (4, 8)
        for k in (2, 8)
    ]
    return ", ".join(lengths)


_GAP_TEXT = (
    "Byted's lengths, with a context that just fits on all ranks. Both searches use the same model "
    "(`bytescale_ext/plan/evaluate/exact.py`): contiguous rings whose members run together, at most one ring in a "
    "micro-batch, and no cost per micro-batch. Brute force tries every schedule. If CP-SAT stops at its time limit, "
    "its lower bound replaces the optimum, and the true gap is smaller."
)


def limits(scores: Sequence[Scores]) -> list[str]:
    """Return the table of the lower bounds of any plan with pipelines, from step 0 of each case."""
    lines = ["## What 1F1B allows", "", _LIMIT_TEXT, ""]
    lines += ["| case | least possible / bound | ours / least possible | in slices / bound |", "|---|---|---|---|"]
    for score in scores:
        if score.num_stages == 1:
            continue
        case, bound = score.case, score.bounds[0]
        step = sample_lengths(case.sampler, case.context, case.global_tokens, 0).tolist()
        stage = stage_costs(setup_of_cost(shipped("bytescale_7b"), score.num_stages))[0]
        limit = pipeline_limit(step, Cluster(case.num_ranks, TOKENS_PER_RANK), stage, score.num_stages).seconds
        least, ours = max(limit, bound), score.of("ours")[0].makespan
        name = f"{case.name} x {score.num_stages} stages"
        best = score.over_bound(score.best_sliced)[0]
        lines.append(f"| {name} | {least / bound:.3f} | {ours / least:.3f} | {best:.3f} |")
    return [*lines, ""]


_LIMIT_TEXT = (
    "The pipeline bound covers the longest document alone and the total work alone, but ignores that a pipeline idles "
    "around a tall slot. `bytescale_ext/plan/evaluate/pipeline_limit.py` accounts for that with linear programs over "
    "the sizes of all other slots, split arbitrarily finely. If the first column is above 1.1, no plan with Megatron's "
    "1F1B reaches the target of 1.1. The last column is our best plan with slices, to which that limit does not apply. "
    "Step 0 of each case."
)


def _case_table(score: Scores) -> list[str]:
    lines = [
        f"**{score.case.name}**, {score.case.global_tokens // M}M tokens a step",
        "",
        "| scheduler | time / bound | over static | over megatron-hybrid | idle % | exposed % | GB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, outcomes in score.outcomes.items():
        if isinstance(outcomes, str):
            lines.append(f"| {name} | not applicable: {outcomes} | | | | | |")
            continue
        cells = [_spread(score.over_bound(name))]
        for other in ("static", "megatron-hybrid"):
            cells.append(_spread(score.faster_than(name, other), 2, worst=min) if score.of(other) else "-")
        cells += [
            _spread([100 * one.idle_share for one in outcomes], 1),
            _spread([100 * one.exposed_communication for one in outcomes], 1),
            _spread([1e-9 * one.device_bytes for one in outcomes], 1),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _spread(values: Sequence[float], digits: int = 3, worst: Callable[[Sequence[float]], float] = max) -> str:
    return f"{np.mean(values):z.{digits}f} ({worst(values):z.{digits}f})"


if __name__ == "__main__":
    main()
