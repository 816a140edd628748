"""``bytescale experts``: replay recorded expert loads with each placement."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from bytescale_ext.plan.cost.model_cost import LINK_BYTES_PER_SECOND
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.experts.cost import ExpertCost
from bytescale_ext.plan.experts.placement import check_slots
from bytescale_ext.plan.experts.replay import PLACEMENTS, LoadReplay, PlacementSettings, replay_loads
from bytescale_ext.plan.experts.trace import Trace, read_trace
from megatron.bytescale.cli.shared.inputs import check_picture, count
from megatron.bytescale.cli.shared.model_flags import shape_of_flags
from megatron.bytescale.cli.shared.options import add_json, add_option, add_plot
from megatron.bytescale.cli.shared.tables import aligned

NAME = "experts"
HELP = "replay recorded expert loads with each placement of replicas"
EXAMPLE = 'bytescale experts --trace runs/loads.jsonl --model-flags "$MODEL_FLAGS" --slots 12 --plot runs/loads.png'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale experts``."""
    parser.add_argument(
        "--trace", type=Path, required=True, metavar="FILE", help="loads recorded by --moe-placement-trace"
    )
    add_option(parser, "--model-flags", required=True)
    parser.add_argument(
        "--slots", type=count, required=True, metavar="S", help="experts that each rank can hold, replicas included"
    )
    parser.add_argument(
        "--threshold",
        type=float,
        default=1.15,
        metavar="R",
        help="ratio of the busiest rank to the mean above which flexmoe acts (1.15)",
    )
    parser.add_argument("--interval", type=count, default=1, metavar="N", help="steps between plans (1)")
    add_option(parser, "--micro-batches")
    parser.add_argument("--tflops", type=float, default=400.0, metavar="F", help="TFLOP/s of a rank in experts (400)")
    parser.add_argument(
        "--exchange-gb-per-second",
        type=float,
        default=LINK_BYTES_PER_SECOND / 1e9,
        metavar="B",
        help="GB/s of the link between ranks, one way (default: %(default)g)",
    )
    add_plot(parser, "the loads of the least balanced layer")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Replay the loads and print the figures.

    Raises:
        ValueError: sizes out of range, a bad trace, or the trace of another model.
    """
    check_picture("--plot", args.plot)
    for name in ("tflops", "exchange_gb_per_second"):
        if not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name):g} must be positive and finite")
    if not 1 <= args.threshold < math.inf:
        raise ValueError(f"--threshold {args.threshold:g} must be at least 1")
    shape, trace = shape_of_flags(args.model_flags), read_trace(args.trace)
    check_model(shape, trace)
    check_slots("--slots", args.slots, trace.head.experts, trace.head.ranks)
    cost = ExpertCost.of(shape, args.tflops * 1e12, args.exchange_gb_per_second * 1e9, args.micro_batches)
    replays = {
        name: replay_loads(trace.loads, PlacementSettings(name, args.slots, args.threshold, args.interval, cost))
        for name in PLACEMENTS
    }
    if args.plot is not None:
        from bytescale_ext.draw.charts import draw_loads

        worst = int(replays["static"].ratios.mean(0).argmax())
        ratios = {name: result.ratios[:, worst] for name, result in replays.items()}
        draw_loads(
            trace.loads[:, worst].sum(1), ratios, args.plot, f"tokens of each expert, layer {trace.layers[worst]}"
        )
    if args.json:
        print(json.dumps({name: figures(result) for name, result in replays.items()}))
        return 0
    print(table_text(trace, replays))
    return 0


def check_model(shape: ModelShape, trace: Trace) -> None:
    """Raise ValueError if the trace is of another model."""
    model = shape.num_experts, shape.experts_per_token
    if not shape.num_experts:
        raise ValueError("--model-flags needs --num-experts")
    if model != (trace.head.experts, trace.head.topk):
        raise ValueError(
            f"--trace is of another model: {trace.head.experts} experts and {trace.head.topk} for each token, and "
            f"--model-flags has {model[0]} and {model[1]}"
        )


def figures(result: LoadReplay) -> dict[str, float]:
    """Return the figures of one placement as plain values."""
    return {
        "ratio_mean": result.mean_ratio,
        "ratio_p95": result.late_ratio,
        "step_seconds": float(result.seconds.mean()),
        "moves": result.num_moves,
        "planner_seconds": float(result.planner_seconds.mean()) if len(result.planner_seconds) else 0.0,
    }


def table_text(trace: Trace, replays: dict[str, LoadReplay]) -> str:
    """Return a heading and a table with a row for each placement."""
    head, (steps, layers) = trace.head, trace.loads.shape[:2]
    rows = [["placement", "busiest/mean", "p95", "experts ms a step", "of static", "moves", "planner ms a layer"]]
    static = replays["static"].seconds.mean()
    for name, result in replays.items():
        values = figures(result)
        seconds = values["step_seconds"]
        rows.append([
            name, f"{values['ratio_mean']:.3f}", f"{values['ratio_p95']:.3f}", f"{1e3 * seconds:.3f}",
            f"{seconds / static if static else 1.0:.3f}", f"{values['moves']}",
            f"{1e3 * values['planner_seconds']:.3f}",
        ])  # fmt: skip
    heading = f"{steps} steps, {layers} layers of {head.experts} experts on {head.ranks} ranks"
    return "\n".join([heading, *aligned(rows, left=(0,))])
