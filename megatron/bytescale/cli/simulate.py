"""``bytescale simulate``: replay the plans of schedulers and compare them with the lower bound. No GPU needed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, NotRequired, TypedDict

import numpy as np

from bytescale_ext.plan.cost.entries import from_entries
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.evaluate.bounds import lower_bounds
from bytescale_ext.plan.evaluate.length_samplers import sample_lengths
from bytescale_ext.plan.evaluate.schedulers import (
    UNSLICED,
    NotApplicable,
    Outcome,
    Scenario,
    Scheduler,
    schedulers,
    static,
)
from bytescale_ext.plan.setup.choose import choose
from bytescale_ext.plan.setup.planner import scenario_of
from bytescale_ext.plan.step.sizes import ONE_SLICE, Slicing
from megatron.bytescale.cli.shared.inputs import check_picture, count, size, size_text
from megatron.bytescale.cli.shared.lengths import read_lengths
from megatron.bytescale.cli.shared.megatron_hybrid import megatron_hybrid
from megatron.bytescale.cli.shared.options import add_json, add_lengths, add_option, add_plot, check_sampler
from megatron.bytescale.cli.shared.slicing import add_setup_arguments, cost_of_options, setup_of_options
from megatron.bytescale.cli.shared.tables import aligned

NAME = "simulate"
HELP = "replay the plans of schedulers with a cost model: time over the lower bound, and other figures"
EXAMPLE = (
    "bytescale simulate --sampler github --seq-length 2M --ranks 512 --tokens-per-rank 8K --global-tokens 32M --seeds 5"
)

MOST_RANKS: Final = 1 << 16
MOST_DOCUMENTS: Final = 1 << 18
"""Ranks and documents of a step that are planned in seconds."""
DEFAULTS: Final = ("static", "megatron-hybrid", "naive", "bytescale", "ours")
_COLUMNS: Final = {
    "makespan_over_bound": ("time / bound", ".3f"),
    "makespan_over_1f1b_bound": ("time / 1F1B bound", ".3f"),
    "speedup_over_static": ("over static", ".2f"),
    "idle_share": ("idle", ".1%"),
    "exposed_communication": ("exposed", ".1%"),
    "forwards_per_rank": ("forwards", ".0f"),
    "peak_tokens": ("peak tokens", ".0f"),
    "kept_keys": ("kept keys", ".0f"),
    "device_bytes": ("GB", ".1f"),
    "host_bytes": ("host GB", ".1f"),
    "distinct_peers": ("peers", ".0f"),
    "planning_seconds": ("planning s", ".4f"),
}


class Figure(TypedDict):
    """Mean and worst value of a figure over all steps."""

    mean: float
    worst: float


SchedulerFigures = dict[str, Figure | None]
"""Figures of a scheduler by name; None if there is nothing to compare with."""


class ScenarioJson(TypedDict):
    """The printed scenario, whose lengths come from a sampler or from a file."""

    sampler: NotRequired[str]
    lengths: NotRequired[str]
    context: int
    ranks: int
    tokens_per_rank: int
    global_tokens: int
    stages: int
    slicing: dict[str, int]
    chosen_within_gb: float | None
    host_gb: float | None
    seeds: int
    cost: dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale simulate``."""
    add_lengths(parser, required=True)
    add_option(parser, "--seq-length", required=True, note="longer documents are left out")
    parser.add_argument("--global-tokens", type=size, required=True, metavar="T", help="tokens of a step")
    parser.add_argument("--seeds", type=count, default=5, metavar="N", help="steps to draw, with seeds 0 to N-1 (5)")
    add_setup_arguments(parser, f"; {' and '.join(UNSLICED)} run Megatron's own 1F1B, without slices")
    parser.add_argument(
        "--schedulers",
        default=",".join(DEFAULTS),
        metavar="A,B,C",
        help=f"schedulers to compare, of {', '.join(all_schedulers())} (default: %(default)s)",
    )
    add_plot(parser, "the time over the lower bound")
    add_json(parser)


def all_schedulers() -> dict[str, Scheduler]:
    """Return every scheduler by name, in the order of the help."""
    return {"static": static, "megatron-hybrid": megatron_hybrid, **schedulers()}


def run(args: argparse.Namespace) -> int:
    """Draw steps, run each scheduler on each step, and print the figures.

    Raises:
        ValueError: an unknown name, sizes that conflict, a bad file.
    """
    names = [name.strip() for name in args.schedulers.split(",")]
    known = all_schedulers()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"--schedulers: {unknown[0]!r} is unknown; choose from {', '.join(known)}")
    check_picture("--plot", args.plot)
    check_sampler(args.sampler)
    if args.ranks > MOST_RANKS:
        raise ValueError(f"--ranks {args.ranks:,}: at most {MOST_RANKS:,} are simulated")
    if args.seq_length > args.ranks * args.tokens_per_rank:
        raise ValueError(
            f"a document of --seq-length {args.seq_length} does not fit on {args.ranks} ranks of "
            f"{args.tokens_per_rank} tokens; raise --tokens-per-rank to at least {-(-args.seq_length // args.ranks)}"
        )
    cost = cost_of_options(args)
    scenario = scenario_of(choose(setup_of_options(args, cost, args.seq_length)))
    figures = compare(scenario, draw_steps(args), names)
    described = described_scenario(args, scenario.slicing, cost)
    if args.plot:
        _plot(figures, described, args.plot)
    if args.json:
        rows = {name: {"not_applicable": row} if isinstance(row, str) else row for name, row in figures.items()}
        print(json.dumps({"scenario": described, "schedulers": rows}))
    else:
        print(text_of(described, figures))
    return 0


def described_scenario(args: argparse.Namespace, slicing: Slicing, cost: ModelCost) -> ScenarioJson:
    """Return the printed scenario of a command line."""
    described: ScenarioJson = {
        "context": args.seq_length,
        "ranks": args.ranks,
        "tokens_per_rank": args.tokens_per_rank,
        "global_tokens": args.global_tokens,
        "stages": args.pipeline_parallel,
        "slicing": asdict(slicing),
        "chosen_within_gb": args.device_memory_gb,
        "host_gb": args.host_memory_gb,
        "seeds": args.seeds,
        "cost": {"file": str(args.cost_file) if args.cost_file else cost.source, "device": cost.device},
    }
    return (
        {"sampler": args.sampler, **described}
        if args.sampler is not None
        else {"lengths": str(args.lengths), **described}
    )


def draw_steps(args: argparse.Namespace) -> list[list[int]]:
    """Return the lengths of each step. A step from a file takes the first documents of a random order."""
    if args.sampler is not None:
        check_documents(args.global_tokens / mean_length(args.sampler, args.seq_length), args)
        seeds = range(args.seeds)
        return [sample_lengths(args.sampler, args.seq_length, args.global_tokens, seed).tolist() for seed in seeds]
    lengths = np.array(read_lengths(args.lengths), dtype=np.int64)
    shortest = lengths.min()
    lengths = lengths[lengths <= args.seq_length]
    if not len(lengths):
        raise ValueError(
            f"the shortest document of --lengths {args.lengths} has {shortest:,} tokens: raise --seq-length "
            f"{args.seq_length} to keep it"
        )
    if lengths.sum() < args.global_tokens:
        raise ValueError(
            f"--lengths {args.lengths} holds {lengths.sum()} tokens in documents of at most {args.seq_length}, fewer "
            f"than --global-tokens {args.global_tokens}; lower it"
        )
    check_documents(args.global_tokens / lengths.mean(), args)
    steps = []
    for seed in range(args.seeds):
        shuffled = np.random.default_rng(seed).permutation(lengths)
        count = int(np.searchsorted(np.cumsum(shuffled), args.global_tokens, side="right"))
        steps.append(shuffled[: max(1, count)].tolist())
    return steps


def mean_length(sampler: str, context: int) -> float:
    """Return about how many tokens a document of a sampler has."""
    return float(sample_lengths(sampler, context, 64 * context, 0).mean())


def check_documents(number: float, args: argparse.Namespace) -> None:
    """Raise ValueError if a step has more documents than are planned in seconds."""
    if number > MOST_DOCUMENTS:
        raise ValueError(
            f"--global-tokens {args.global_tokens:,} are about {number:,.0f} documents in a step, and at most "
            f"{MOST_DOCUMENTS:,} are simulated: give fewer tokens"
        )


def compare(
    scenario: Scenario, steps: Sequence[Sequence[int]], names: Sequence[str]
) -> dict[str, SchedulerFigures | str]:
    """Return the figures of each scheduler over the steps, or why it does not support the scenario or a step.

    ``makespan_over_bound`` uses the lower bound for the order that the scheduler runs: slices or 1F1B.
    ``speedup_over_static`` is null if no static mesh is applicable.
    """
    bounds = {
        slicing: [lower_bounds(step, scenario.cluster, scenario.stages, slicing).largest for step in steps]
        for slicing in (ONE_SLICE, scenario.slicing)
    }
    references = outcomes_of(static, scenario, steps)
    result: dict[str, SchedulerFigures | str] = {}
    known = all_schedulers()
    for name in names:
        outcomes = outcomes_of(known[name], scenario, steps)
        if isinstance(outcomes, str):
            result[name] = outcomes
            continue
        times = [outcome.makespan for outcome in outcomes]
        plain_bounds = bounds[ONE_SLICE]
        own_bounds = bounds[ONE_SLICE if name in UNSLICED else scenario.slicing]
        result[name] = {
            "makespan_over_bound": _figure([time / bound for time, bound in zip(times, own_bounds, strict=True)]),
            "makespan_over_1f1b_bound": _figure(
                [time / bound for time, bound in zip(times, plain_bounds, strict=True)]
            ),
            "speedup_over_static": None
            if isinstance(references, str)
            else _figure(
                [reference.makespan / time for reference, time in zip(references, times, strict=True)], worst=min
            ),
            **{figure: _figure([asdict(outcome)[figure] for outcome in outcomes]) for figure in asdict(outcomes[0])},
        }
    return result


def text_of(scenario: ScenarioJson, figures: Mapping[str, SchedulerFigures | str]) -> str:
    """Return the comparison as a table with the mean and the worst of each figure."""
    is_whole = scenario["slicing"]["num_slices"] == 1 and scenario["chosen_within_gb"] is None
    may_swap = scenario["slicing"]["swapped_tokens"] or scenario["host_gb"]
    hidden = ("makespan_over_1f1b_bound", "kept_keys") if is_whole else ()
    hidden = hidden if may_swap else (*hidden, "host_bytes")
    columns = {name: column for name, column in _COLUMNS.items() if name not in hidden}
    heads = ["", *(title for title, _ in columns.values())]
    rows = [heads]
    notes = []
    for name, row in figures.items():
        if isinstance(row, str):
            notes.append(f"{name}: not applicable, {row}")
            continue
        rows.append([name, *(_cell(row[figure], spec, 1e-9 if figure.endswith("_bytes") else 1.0)
                             for figure, (_, spec) in columns.items())])  # fmt: skip
    return "\n".join([_title(scenario), "mean and worst of each figure", "", *aligned(rows, left={0}), *notes])


def _cell(figure: Figure | None, spec: str, unit: float) -> str:
    return "-" if figure is None else f"{figure['mean'] * unit:{spec}} {figure['worst'] * unit:{spec}}"


def _title(scenario: ScenarioJson) -> str:
    source = scenario["sampler"] if "sampler" in scenario else Path(scenario["lengths"]).name
    stages = f" x {scenario['stages']} stages" if scenario["stages"] > 1 else ""
    slicing = from_entries(Slicing, scenario["slicing"])
    if slicing.num_slices > 1:
        stages += f" in {slicing}"
    if scenario["chosen_within_gb"] is not None:
        stages += f" in slices chosen for each step within {scenario['chosen_within_gb']:g} GB"
    if scenario["host_gb"] is not None:
        stages += f" and {scenario['host_gb']:g} GB of host memory"
    return (
        f"{source}, context {size_text(scenario['context'])}, {scenario['ranks']} ranks{stages}, "
        f"C {size_text(scenario['tokens_per_rank'])}, {size_text(scenario['global_tokens'])} tokens a step, "
        f"{scenario['seeds']} seeds"
    )


def outcomes_of(scheduler: Scheduler, scenario: Scenario, steps: Sequence[Sequence[int]]) -> list[Outcome] | str:
    """Return the outcome of each step, or why the scheduler is not applicable."""
    try:
        return [scheduler(step, scenario) for step in steps]
    except NotApplicable as error:
        return str(error)


def _figure(values: Sequence[float], worst: Callable[[Iterable[float]], float] = max) -> Figure:
    return {"mean": sum(values) / len(values), "worst": worst(values)}


def _plot(figures: Mapping[str, SchedulerFigures | str], scenario: ScenarioJson, path: Path) -> None:
    from bytescale_ext.draw.charts import draw_bars

    ratios = {name: row["makespan_over_bound"] for name, row in figures.items() if not isinstance(row, str)}
    bars = {name: (ratio["mean"], ratio["worst"]) for name, ratio in ratios.items() if ratio is not None}
    draw_bars(bars, path, _title(scenario), "time of a step / lower bound")
