"""``bytescale timeline``: draw the measured or planned work of each rank in a step, without GPU, Megatron and torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from bytescale_ext.draw.timeline import draw_timeline
from bytescale_ext.errors import PlanError, one_line
from bytescale_ext.json_input import json_settings, stored_text
from bytescale_ext.measure.timeline import Phase, RankTimes, phases_of_plan, rank_times, read_phases, write_perfetto
from bytescale_ext.plan.cost.model_cost import flops_cost
from bytescale_ext.plan.cost.model_shape import LLAMA_7B
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.plan import StepPlan
from megatron.bytescale.cli.shared.inputs import check_apart, check_writable, size_text
from megatron.bytescale.cli.shared.options import add_json

NAME = "timeline"
HELP = "draw the timeline of a step, measured or planned, and write a Perfetto trace"
EXAMPLE = "bytescale timeline --from run/timeline --step 12 --output runs/step12"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale timeline``."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--from", dest="directory", type=Path, metavar="DIR", help="measured: folder with rank0.jsonl, ..."
    )
    source.add_argument("--plan", type=Path, metavar="FILE", help="planned: output of bytescale plan --json")
    parser.add_argument(
        "--step", type=int, metavar="N", help="with --from: number of the step (default: the latest complete step)"
    )
    parser.add_argument("--output", required=True, metavar="PREFIX", help="write PREFIX.png and PREFIX.json (Perfetto)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Draw the timeline, write both files and print the figures.

    Raises:
        ValueError: the timeline or the plan cannot be read.
    """
    picture, trace = Path(f"{args.output}.png"), Path(f"{args.output}.json")
    for path in (picture, trace):
        check_writable("--output", path)
        check_apart(path, [args.plan] if args.plan is not None else [])
    if args.directory is not None:
        phases = read_phases(args.directory, args.step)
        num_ranks, unit, title = None, "s", f"step {phases[0].step}, measured"
    else:
        if args.step is not None:
            raise ValueError("--step chooses a measured step; leave it out with --plan")
        plan = read_plan(args.plan)
        phases = phases_of_plan(plan, flops_cost(LLAMA_7B).scaled(1e-15))
        num_ranks, unit = plan.num_ranks, "PFLOP"
        ranks = f"{plan.num_ranks} ranks of {size_text(plan.tokens_per_rank)} tokens"
        title = f"planned: {len(plan.lengths)} documents on {ranks}"
    draw_timeline(phases, picture, title, unit)
    write_perfetto(phases, trace)
    times = rank_times(phases, num_ranks)
    if args.json:
        print(json.dumps(figures(phases, times, unit)))
        return 0
    print(times_text(times, unit))
    print(f"wrote {one_line(picture)} and {one_line(trace)} (open it at https://ui.perfetto.dev)")
    return 0


def read_plan(path: Path) -> StepPlan:
    """Read and check a plan that ``bytescale plan --json`` printed. Raises ValueError for anything else."""
    try:
        plan = StepPlan.from_json(json_settings(stored_text(path)))
    except OSError as error:
        raise ValueError(f"--plan {path}: {error.strerror}") from error
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {one_line(error, 200)}"  # the representation may hold the whole file
        raise ValueError(f"--plan {path} is not the output of bytescale plan --json: {reason}") from error
    try:
        check_step_plan(plan)
    except PlanError as error:
        raise ValueError(f"--plan {path} is a broken plan: {str(error).splitlines()[0]}") from error
    return plan


def figures(phases: Sequence[Phase], times: Sequence[RankTimes], unit: str) -> dict[str, object]:
    """Return the figures of a timeline as plain values."""
    return {
        "step": phases[0].step if phases else None,
        "unit": unit,
        "makespan": max((time.finish for time in times), default=0.0),
        "imbalance": _imbalance(times),
        "ranks": [
            {"rank": time.rank, "busy": time.busy, "busy_share": time.busy_share, "finish": time.finish}
            for time in times
        ],
    }


def times_text(times: Sequence[RankTimes], unit: str) -> str:
    """Return a line for each rank and the imbalance."""
    lines = [f"rank {time.rank:>4}  busy {time.busy_share:6.1%}  finish {time.finish:.4g} {unit}" for time in times]
    return "\n".join([*lines, f"imbalance {_imbalance(times):.3f} (last finish / mean busy time)"])


def _imbalance(times: Sequence[RankTimes]) -> float:
    busy = sum(time.busy for time in times)
    return max(time.finish for time in times) * len(times) / busy if busy else 1.0
