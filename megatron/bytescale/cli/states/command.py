"""``bytescale states``: predict memory, traffic and time of paged model states before training."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from bytescale_ext.plan.activation.policies import in_gigabytes
from bytescale_ext.plan.setup.memory import state_cases
from bytescale_ext.plan.states.forecast import Room, StateCase, Tier, most_layers
from bytescale_ext.plan.states.moves import StateTraffic
from bytescale_ext.plan.states.pages import NUM_MOMENTS, page_bytes_of
from bytescale_ext.plan.states.tiers import BLOCK_BYTES, pages_on_disk, tiered_host_bytes
from bytescale_ext.plan.states.timeline import ADAM_BYTES, Speeds, TimedMove, optimizer_step_seconds, time_moves
from megatron.bytescale.cli.shared.inputs import check_picture, count
from megatron.bytescale.cli.shared.options import add_json, add_option, add_plot
from megatron.bytescale.cli.states.computing import (
    add_corpus,
    automatic,
    check_corpus,
    overlap_of,
    overlap_text,
    setup_of_options,
)

NAME = "states"
HELP = "predict memory, traffic and time of Adam's states in pages of host memory and NVMe"
STAGES = {1: "Adam's states", 2: "Adam's states, gradients", 3: "Adam's states, gradients, parameters of layers"}
TIERS = {"": Tier.HOST, " with NVMe": Tier.DISK}
EXAMPLE = (
    'bytescale states --model-flags "$MODEL_FLAGS" --device-memory-gb 80 --host-memory-gb 200 --plot runs/moves.png'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale states``."""
    add_option(parser, "--model-flags", required=True, note="experts and biases are not counted")
    add_option(parser, "--tensor-parallel")
    add_option(parser, "--pipeline-parallel", note="with equal numbers of layers")
    add_option(parser, "--optimizer-ranks")
    add_option(
        parser, "--ranks-per-node", note="they share host gradients and parameters (default: all --optimizer-ranks)"
    )
    parser.add_argument(
        "--state-stage",
        type=int,
        choices=list(STAGES),
        default=1,
        help="states off the device: 1 Adam's states, 2 also gradients, 3 also parameters (default: 1)",
    )
    parser.add_argument(
        "--window-layers", type=count, default=2, metavar="N", help="layers on the device at a time in stage 3 (2)"
    )
    add_option(parser, "--micro-batches", note="for traffic")
    parser.add_argument(
        "--update-steps",
        type=count,
        default=0,
        metavar="N",
        help="steps that overlap with a late update, for host memory (default: none, updates are exact)",
    )
    parser.add_argument("--float32", action="store_true", help="parameters of 32 bits on the device, not of 16")
    parser.add_argument("--page-mb", type=float, default=4.0, metavar="M", help="size of a page in MiB (4)")
    add_option(parser, "--device-memory-gb", default=80.0)
    add_option(parser, "--host-memory-gb", default=100.0)
    parser.add_argument(
        "--nvme-gb", type=float, default=0.0, metavar="G", help="GB of a local disk that each process may use (0)"
    )
    for option, default, text in (
        ("--nvme-read-gb-per-second", 6.0, "GB/s that each process reads from the disk"),
        ("--nvme-write-gb-per-second", 3.0, "GB/s that each process writes to the disk"),
        ("--adam-gb-per-second", 20.0, f"GB/s of host memory in Adam, which moves {ADAM_BYTES} bytes per parameter"),
    ):
        parser.add_argument(option, type=float, default=default, metavar="B", help=f"{text} (default: %(default)g)")
    add_option(parser, "--link-gb-per-second")
    add_corpus(parser)
    add_plot(parser, "the moves of one step of the fullest stage")
    add_json(parser)


@dataclass(frozen=True)
class StageStates:
    """The paged states of one pipeline stage.

    Attributes:
        case: sizes of the states.
        on_disk: numbers of the pages that do not fit in host memory.
        moves: moves of one step, in order of time.
        num_micro_batches: micro-batches of one step.
    """

    case: StateCase
    on_disk: frozenset[int]
    moves: tuple[TimedMove, ...]
    num_micro_batches: int = 1

    @classmethod
    def of(cls, case: StateCase, room: Room, speeds: Speeds, num_micro_batches: int) -> StageStates:
        """Return the states of a stage. Raises ValueError, with a sufficient size, if they do not fit."""
        fits = case.host_bytes <= room.host_bytes
        if not fits and not room.disk_bytes:
            raise ValueError(
                f"pages of the fullest stage take {in_gigabytes(case.host_bytes)} GB of host memory: give "
                "--host-memory-gb at least that, or --nvme-gb, or more --pipeline-parallel, --tensor-parallel or "
                "--optimizer-ranks"
            )
        if not fits and case.least_host_bytes > room.host_bytes:
            raise ValueError(
                f"pages under way take {in_gigabytes(case.least_host_bytes)} GB of host memory: give --host-memory-gb "
                "at least that, or smaller pages by --page-mb"
            )
        if not fits and case.file_bytes > room.disk_bytes:
            raise ValueError(
                f"pages of the fullest stage take {in_gigabytes(case.file_bytes)} GB of a disk in two versions: give "
                "--nvme-gb at least that, or more --pipeline-parallel, --tensor-parallel or --optimizer-ranks"
            )
        on_disk = pages_on_disk(case.table, room.host_bytes - case.whole_host_bytes)
        moves = time_moves(case.table, case.element_bytes, speeds.of_stage(case.stage), on_disk)
        return cls(case, on_disk, moves, num_micro_batches)

    @property
    def seconds(self) -> float:
        """Seconds of the optimizer step."""
        return optimizer_step_seconds(self.moves)

    @property
    def traffic(self) -> StateTraffic:
        """Bytes of one step."""
        return replace(self.case.link_bytes(self.num_micro_batches), on_disk=self.case.traffic(self.on_disk).on_disk)

    @property
    def host_bytes(self) -> int:
        """Host memory of one process."""
        return tiered_host_bytes(self.case.table, self.on_disk) + self.case.whole_host_bytes

    @property
    def disk_pages(self) -> int:
        """Pages of all planes on the disk."""
        return self.traffic.on_disk // self.case.page_bytes


def run(args: argparse.Namespace) -> int:
    """Predict the states and print them.

    Raises:
        ValueError: sizes out of range, stages that do not divide the layers, or pages that need more host memory.
    """
    check_sizes(args)
    check_corpus(args)
    setup = setup_of_options(args)
    budget, speeds, cases = setup.budget, setup.states.speeds, state_cases(setup)
    room = Room(budget.device_bytes, budget.host_bytes, budget.disk_bytes)
    in_order = sorted(set(cases), key=lambda case: -case.host_bytes)  # errors describe the fullest stage
    of_case = {case: StageStates.of(case, room, speeds, args.micro_batches) for case in in_order}
    rows = [of_case[case] for case in cases]
    largest = largest_models(args, cases, room)
    if args.plot is not None:
        from bytescale_ext.draw.states import draw_moves

        fullest = in_order[0]
        title = f"one step of {fullest.num_parameters:,.0f} parameters in {len(fullest.table.pages):,} pages"
        draw_moves(of_case[fullest].moves, args.plot, title)
    overlap = choice = None
    if args.tokens_per_rank is not None:
        overlap, choice = overlap_of(args, setup, in_order[0]), automatic(setup)
    if args.json:
        of_corpus = {} if overlap is None else {"hidden": asdict(overlap)}
        of_choice = {} if choice is None else {"auto": choice.described().splitlines()}
        stages = {"stages": [row_json(row) for row in rows], "largest": largest}
        print(json.dumps({**stages, **of_corpus, **of_choice}))
        return 0
    print(table_text(rows))
    if overlap is not None:
        print(overlap_text(overlap, speeds))
    print(largest_text(args, largest))
    if choice is not None:
        print(choice.described())
    return 0


def check_sizes(args: argparse.Namespace) -> None:
    """Raise ValueError for a size or speed out of range, or a picture that cannot be written."""
    check_picture("--plot", args.plot)
    speeds = [f"{name}_gb_per_second" for name in ("link", "adam", "nvme_read", "nvme_write")]
    for name in ("device_memory_gb", "host_memory_gb", *speeds):
        if not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be positive and finite, got {getattr(args, name)}")
    if not 0 <= args.nvme_gb < math.inf:
        raise ValueError(f"--nvme-gb must be 0 or more, got {args.nvme_gb}")
    if page_bytes_of(args.page_mb, "--page-mb") % BLOCK_BYTES and args.nvme_gb:
        raise ValueError(f"--page-mb {args.page_mb:g} must be a multiple of 1/256 with --nvme-gb")


def largest_models(args: argparse.Namespace, cases: Sequence[StateCase], room: Room) -> dict[str, tuple[int, float]]:
    """Return the most layers whose states fit, and their parameters, for each offload stage and tier.

    Args:
        args: options of the command.
        cases: states of each pipeline stage.
        room: budgets of device memory, host memory and disk.
    """
    places = {"resident": (1, Tier.DEVICE)}
    for kind, tier in TIERS.items():
        if tier is not Tier.DISK or room.disk_bytes:
            places |= {f"stage {stage}{kind}": (stage, tier) for stage in STAGES}
    largest = {}
    for name, (stage, tier) in places.items():
        parts = [replace(case, stage=stage) for case in cases]
        layers = min(most_layers(case, room, tier) for case in set(parts))
        parameters = sum(case.with_layers(layers).num_parameters for case in parts) if layers else 0.0
        largest[name] = (layers * args.pipeline_parallel, args.tensor_parallel * parameters)
    return largest


def table_text(rows: list[StageStates]) -> str:
    """Return a table with a row for each stage, with columns about the disk if it holds pages."""
    has_disk = any(row.on_disk for row in rows)
    heads = [("stage", 5), ("parameters", 15), ("host pages", 10), ("host GB", 8), ("device GB", 9),
             ("resident GB", 11), ("to host GB", 10), ("to device GB", 12), ("optimizer ms", 12),
             *[("NVMe pages", 10), ("NVMe GB", 8), ("written GB", 10)][: 3 * has_disk]]  # fmt: skip
    lines = [" ".join(f"{name:>{width}}" for name, width in heads)]
    for number, row in enumerate(rows):
        case, traffic = row.case, row.traffic
        cells = [
            str(number), f"{case.num_parameters:,.0f}", f"{case.table.num_host_pages - row.disk_pages:,}",
            f"{row.host_bytes / 1e9:.2f}", f"{case.paged_bytes / 1e9:.2f}",
            f"{case.resident_bytes / 1e9:.2f}", f"{traffic.fetched / 1e9:.2f}", f"{traffic.returned / 1e9:.2f}",
            f"{1e3 * row.seconds:.1f}",
            f"{row.disk_pages:,}", f"{case.file_bytes * bool(row.on_disk) / 1e9:.2f}", f"{traffic.on_disk / 1e9:.2f}",
        ]  # fmt: skip
        lines.append(" ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, heads, strict=False)))
    return "\n".join(lines)


def largest_text(args: argparse.Namespace, largest: dict[str, tuple[int, float]]) -> str:
    """Return a table of the largest models of this width, without activations."""
    resident = largest["resident"][1]
    disk = f" and {args.nvme_gb:g} GB of NVMe" if args.nvme_gb else ""
    lines = [
        f"largest model of this width whose states fit in {args.device_memory_gb:g} GB of a device, "
        f"{args.host_memory_gb:g} GB of host memory{disk}:",
        f"{'':20} {'layers':>6} {'G parameters':>12} {'times':>6}  off the device",
    ]
    for name, (layers, parameters) in largest.items():
        times = parameters / resident if resident else math.inf
        moved = [text for stage, text in STAGES.items() if name.startswith(f"stage {stage}")]
        lines.append(f"{name:20} {layers:6} {parameters / 1e9:12.2f} {times:6.2f}  {''.join(moved)}")
    return "\n".join(line.rstrip() for line in lines)


def row_json(row: StageStates) -> dict[str, object]:
    """Return a row of ``table_text`` as plain values."""
    case = row.case
    return {
        "parameters": case.num_parameters,
        "pages": {"exp_avg and exp_avg_sq": NUM_MOMENTS * len(case.table.pages), "float32": case.table.num_copies},
        "pages_on_nvme": row.disk_pages,
        "host_bytes": row.host_bytes,
        "nvme_bytes": case.file_bytes * bool(row.on_disk),
        "device_bytes": case.paged_bytes,
        "build_bytes": case.build_bytes,
        "resident_bytes": case.resident_bytes,
        "fetched_bytes": row.traffic.fetched,
        "returned_bytes": row.traffic.returned,
        "written_bytes": row.traffic.on_disk,
        "optimizer_seconds": row.seconds,
    }
