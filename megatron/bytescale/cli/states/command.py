"""``bytescale states``: predict what paged model states take, move and save, before training."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bytescale_ext.plan.activation.policies import in_gigabytes
from bytescale_ext.plan.states.forecast import StateCase, most_layers
from bytescale_ext.plan.states.pages import FLOAT_BYTES, NUM_MOMENTS, page_bytes_of
from bytescale_ext.plan.states.timeline import ADAM_BYTES, Speeds, replay, step_seconds
from megatron.bytescale.cli.activations import shape_of_flags
from megatron.bytescale.cli.shared.inputs import add_link, add_optimizer_ranks, check_picture, count

NAME = "states"
HELP = "predict what Adam's states in pages of host memory take, move and save"
EXAMPLE = 'bytescale states --model-flags "$MODEL_FLAGS" --device-memory-gb 80 --host-memory-gb 200 --plot moves.png'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale states``."""
    parser.add_argument(
        "--model-flags",
        required=True,
        metavar="'FLAGS'",
        help="Megatron's flags of the model in one quoted string; unknown flags are ignored, experts and biases are "
        "not counted",
    )
    parser.add_argument("--tensor-parallel", type=count, default=1, metavar="N", help="ranks that share a layer (1)")
    parser.add_argument("--stages", type=count, default=1, metavar="N", help="pipeline stages of equal layers (1)")
    add_optimizer_ranks(parser)
    parser.add_argument("--float32", action="store_true", help="parameters of 32 bits on the device, not of 16")
    parser.add_argument("--page-mb", type=float, default=4.0, metavar="M", help="size of a page in MiB (4)")
    parser.add_argument("--device-memory-gb", type=float, default=80.0, metavar="G", help="for model states (80)")
    parser.add_argument("--host-memory-gb", type=float, default=100.0, metavar="G", help="of each process (100)")
    add_link(parser)
    parser.add_argument(
        "--adam-gb-per-second",
        type=float,
        default=20.0,
        metavar="B",
        help=f"host memory that Adam reads and writes in a second, {ADAM_BYTES} bytes for each parameter (20)",
    )
    parser.add_argument("--plot", type=Path, metavar="F.png", help="draw the moves of one step of the fullest stage")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


@dataclass(frozen=True)
class Row:
    """One stage, and the seconds of its optimizer's step."""

    case: StateCase
    seconds: float


def run(args: argparse.Namespace) -> int:
    """Predict and print.

    Raises:
        ValueError: sizes out of range, stages that do not divide the layers, or pages that need more host memory.
    """
    check_sizes(args)
    speeds = Speeds(args.link_gb_per_second * 1e9, args.adam_gb_per_second * 1e9)
    rows = [Row(case, step_seconds(replay(case.table, case.element_bytes, speeds))) for case in cases(args)]
    case = max((row.case for row in rows), key=lambda case: case.host_bytes)
    if case.host_bytes > args.host_memory_gb * 1e9:
        raise ValueError(
            f"pages of the fullest stage take {in_gigabytes(case.host_bytes)} GB of host memory: give "
            "--host-memory-gb at least that, or more --stages, --tensor-parallel or --optimizer-ranks"
        )
    largest = largest_models(args, [row.case for row in rows])
    if args.plot is not None:
        from bytescale_ext.draw.states import draw_moves

        title = f"one step of {case.num_parameters:,.0f} parameters in {len(case.table.pages):,} pages"
        draw_moves(replay(case.table, case.element_bytes, speeds), args.plot, title)
    if args.json:
        print(json.dumps({"stages": [row_json(row) for row in rows], "largest": largest}))
        return 0
    print(table_text(rows))
    print(largest_text(args, largest))
    return 0


def check_sizes(args: argparse.Namespace) -> None:
    """Raise ValueError for a size or speed out of range, or a picture that cannot be written."""
    check_picture("--plot", args.plot)
    for name in ("device_memory_gb", "host_memory_gb", "link_gb_per_second", "adam_gb_per_second"):
        if not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}")
    page_bytes_of(args.page_mb, "--page-mb")


def cases(args: argparse.Namespace) -> list[StateCase]:
    """Return the states of each stage. Raises ValueError where stages do not divide the layers."""
    shape = shape_of_flags(args.model_flags)
    layers, rest = divmod(shape.num_layers, args.stages)
    if rest or not layers:
        raise ValueError(f"{args.stages} stages do not divide the {shape.num_layers} layers of the model")
    return [
        StateCase(
            shape=replace(shape, num_layers=layers),
            tensor_parallel=args.tensor_parallel,
            has_embedding=stage == 0,
            has_head=stage == args.stages - 1,
            element_bytes=FLOAT_BYTES if args.float32 else 2,
            optimizer_ranks=args.optimizer_ranks,
            page_bytes=page_bytes_of(args.page_mb, "--page-mb"),
        )
        for stage in range(args.stages)
    ]


def largest_models(args: argparse.Namespace, cases: Sequence[StateCase]) -> dict[str, tuple[int, float]]:
    """Return, for both policies, the most layers whose states fit and the parameters of all stages then."""
    found = {}
    for policy in ("resident", "paged"):
        stages = [
            (case, most_layers(case, args.device_memory_gb * 1e9, args.host_memory_gb * 1e9, policy == "paged"))
            for case in cases
        ]
        layers = min(most for _, most in stages)
        parameters = sum(case.with_layers(layers).num_parameters for case, _ in stages) if layers else 0.0
        found[policy] = (layers * args.stages, args.tensor_parallel * parameters)
    return found


def table_text(rows: list[Row]) -> str:
    """Return a table with a row for each stage."""
    lines = [f"{'stage':>5} {'parameters':>15} {'pages':>9} {'host GB':>8} {'device GB':>9} {'resident GB':>11} "
             f"{'to host GB':>10} {'to device GB':>12} {'optimizer ms':>12}"]  # fmt: skip
    for number, row in enumerate(rows):
        case, traffic = row.case, row.case.traffic
        lines.append(
            f"{number:5} {case.num_parameters:15,.0f} {case.table.num_host_pages:9,} {case.host_bytes / 1e9:8.2f} "
            f"{case.paged_bytes / 1e9:9.2f} {case.resident_bytes / 1e9:11.2f} {traffic.fetched / 1e9:10.2f} "
            f"{traffic.returned / 1e9:12.2f} {1e3 * row.seconds:12.1f}"
        )
    return "\n".join(lines)


def largest_text(args: argparse.Namespace, largest: dict[str, tuple[int, float]]) -> str:
    """Return a line about the largest model of this width, without activations."""
    texts = [f"{policy} {layers} layers, {parameters / 1e9:.2f} G" for policy, (layers, parameters) in largest.items()]
    times = largest["paged"][1] / largest["resident"][1] if largest["resident"][1] else math.inf
    return (
        f"largest model of this width whose states fit in {args.device_memory_gb:g} GB of a device and "
        f"{args.host_memory_gb:g} GB of host memory: {'; '.join(texts)} parameters ({times:.2f} times)"
    )


def row_json(row: Row) -> dict[str, object]:
    """Return a row of ``table_text`` as plain values."""
    case = row.case
    return {
        "parameters": case.num_parameters,
        "pages": {"exp_avg and exp_avg_sq": NUM_MOMENTS * len(case.table.pages), "float32": case.table.num_copies},
        "host_bytes": case.host_bytes,
        "device_bytes": case.paged_bytes,
        "resident_bytes": case.resident_bytes,
        "fetched_bytes": case.traffic.fetched,
        "returned_bytes": case.traffic.returned,
        "optimizer_seconds": row.seconds,
    }
