"""``bytescale schedule``: the schedule of a pipeline with or without slices, its idle time and its memory."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from bytescale_ext.errors import one_line
from bytescale_ext.plan.schedule.actions import SliceSchedule, seq1f1b_schedule
from bytescale_ext.plan.schedule.check import check_slice_schedule
from bytescale_ext.plan.schedule.compare import (
    SHAPES,
    ScheduleFigures,
    SliceModel,
    compare_schedules,
    model_slice_lengths,
    schedule_figures,
    schedule_name,
    simulate_model,
)
from bytescale_ext.plan.schedule.slices import Partition, parse_partition
from megatron.bytescale.cli.shared.inputs import check_picture, count
from megatron.bytescale.cli.shared.options import add_json, add_option, add_plot
from megatron.bytescale.cli.shared.slicing import add_slices_arguments, slicing_of_options

NAME = "schedule"
HELP = "print the schedule of a pipeline whose micro-batches are cut into slices (Seq1F1B)"
EXAMPLE = "bytescale schedule --pipeline-parallel 4 --micro-batches 8 --slices 4 --compare"

MOST_PASSES: Final = 1 << 17
"""Forward passes of all stages in a schedule that is simulated."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale schedule``."""
    add_option(parser, "--pipeline-parallel", required=True)
    add_option(parser, "--micro-batches", required=True)
    add_slices_arguments(parser, "slices of each micro-batch (default: 1)")
    parser.add_argument(
        "--zero-bubble", action="store_true", help="weight gradients fill idle time, as with --seq1f1b-zero-bubble"
    )
    parser.add_argument("--vpp", type=count, default=1, metavar="V", help="virtual stages of each stage (default: 1)")
    parser.add_argument(
        "--seq1f1b-partition",
        default="time",
        metavar="NAME",
        help="cut of a micro-batch into slices: even, flops, time (default), or the tokens of each slice as L1,...,LK",
    )
    add_option(parser, "--seq-length", default=131072, note="each micro-batch is one sequence")
    parser.add_argument("--model", choices=sorted(SHAPES), default="gpt-7b", help="model (default: gpt-7b)")
    add_option(parser, "--tensor-parallel", note="also the ranks of sequence parallelism")
    add_option(parser, "--cost-file", note="in place of --model and --tensor-parallel")
    parser.add_argument(
        "--compare", action="store_true", help="compare 1F1B and Seq1F1B, and with --vpp interleaved 1F1B"
    )
    add_plot(parser, "the schedule over time")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Make a schedule, check it, simulate it and print it.

    Raises:
        ValueError: sizes that do not fit together; the message names the nearest sizes that fit.
    """
    check_picture("--plot", args.plot)
    partition = parse_partition(args.seq1f1b_partition)
    stages, micro_batches = args.pipeline_parallel, args.micro_batches
    if args.vpp > 1 and stages <= 2:
        raise ValueError(
            f"--vpp {args.vpp} needs --pipeline-parallel of 3 or more, not {stages}: Megatron does not interleave two "
            "stages"
        )
    if args.eager and args.slices == 1:
        raise ValueError("--eager needs --slices of 2 or more")
    slicing = replace(slicing_of_options(args), zero_bubble=args.zero_bubble)
    passes = stages * micro_batches * slicing.num_slices * args.vpp
    if passes > MOST_PASSES:
        raise ValueError(
            f"--pipeline-parallel {stages}, --micro-batches {micro_batches}, --slices {slicing.num_slices} and --vpp "
            f"{args.vpp} are {passes:,} passes, and at most {MOST_PASSES:,} are simulated: give fewer micro-batches, "
            "because the middle of a schedule repeats"
        )
    model = _model(args)
    sizes = (stages, micro_batches, slicing, args.vpp)
    schedule = seq1f1b_schedule(*sizes)
    check_slice_schedule(schedule)
    rows = (
        compare_schedules(model, *sizes, partition) if args.compare else (schedule_figures(model, *sizes, partition),)
    )
    if args.plot is not None:
        _draw(args.plot, model, schedule, partition)
    if args.json:
        print(json.dumps([row.to_json() for row in rows]))
        return 0
    if args.compare:
        print(table_text(rows))
    else:
        print(f"{schedule}\n\n{figures_text(rows[0])}")
    if args.plot is not None:
        print(f"wrote {one_line(args.plot)}")
    return 0


def _model(args: argparse.Namespace) -> SliceModel:
    if args.cost_file is None:
        return SliceModel(SHAPES[args.model], args.seq_length, args.tensor_parallel)
    from bytescale_ext.measure.cost_file import read_cost

    measured = read_cost(args.cost_file)
    return SliceModel(measured.shape, args.seq_length, measured.tensor_parallel, measured)


def figures_text(figures: ScheduleFigures) -> str:
    """Return the figures of one schedule, a line each."""
    formula = figures.bubble_of_equal_costs
    return "\n".join(
        (
            f"schedule              {figures.name}",
            f"slices (tokens)       {' '.join(map(str, figures.slices))}",
            f"bubble                {figures.bubble:.4f} ({formula:.4f} if all slices cost the same)",
            f"slices on stage 0     {figures.peak_slices} at most",
            f"activations           {figures.peak_micro_batches:.2f} micro-batches of a stage's layers; with the sums "
            f"of key gradients {figures.activation_bytes / 2**30:.2f} GiB on each rank of stage 0",
        )
    )


def table_text(rows: Sequence[ScheduleFigures]) -> str:
    """Return a table with a row for each schedule."""
    head = f"{'schedule':<22} {'bubble':>7} {'formula':>8} {'time/ideal':>10} {'slices':>7}"
    head += f" {'micro-batches':>14} {'GiB':>8}"
    lines = [
        f"{row.name:<22} {row.bubble:>7.4f} {row.bubble_of_equal_costs:>8.4f} {row.relative_time:>10.3f} "
        f"{row.peak_slices:>7} {row.peak_micro_batches:>14.2f} {row.activation_bytes / 2**30:>8.2f}"
        for row in rows
    ]
    note = "slices, micro-batches: peaks on stage 0; GiB: activations and sums of key gradients; "
    note += "formula: equal slices"
    return "\n".join((head, *lines, note))


def _draw(path: Path, model: SliceModel, schedule: SliceSchedule, partition: Partition) -> None:
    from bytescale_ext.draw.schedule import draw_schedule

    result = simulate_model(model, schedule, model_slice_lengths(model, schedule.num_slices, partition))
    name = schedule_name(schedule.slicing, schedule.num_chunks, partition)
    draw_schedule(result, path, f"{name}: {schedule.num_stages} stages, idle {result.bubble:.1%}")
