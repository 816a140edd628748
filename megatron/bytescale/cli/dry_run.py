"""``bytescale dry-run``: what a launch line would do on N processes, found by one process without devices."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bytescale_ext.plan.evaluate.length_samplers import SAMPLERS
from megatron.bytescale.cli.plan import read_lengths
from megatron.bytescale.cli.profile import quiet
from megatron.bytescale.cli.shared.inputs import count

if TYPE_CHECKING:
    from megatron.bytescale.cli.shared.launch_line import DryRun

NAME = "dry-run"
HELP = "resolve a launch line for N processes without starting them: groups, plan, messages, memory, refusals"
EXAMPLE = "bytescale dry-run --world-size 1024 --sampler github -- $TRAINING_FLAGS"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale dry-run``."""
    parser.add_argument("--world-size", type=count, required=True, metavar="N", help="processes of the run")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="the process whose groups are shown (0)")
    parser.add_argument(
        "--ranks-per-node", type=count, default=8, metavar="N", help="processes of a node (8), as torchrun would say"
    )
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="plan documents drawn from this .idx or .npy file; default: the .idx of --data-path in FLAGS",
    )
    lengths.add_argument("--sampler", metavar="NAME", help=f"plan lengths of a distribution: {', '.join(SAMPLERS)}")
    parser.add_argument("--seed", type=int, default=1234, help="of the draw (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "flags",
        nargs="*",
        metavar="-- FLAGS",
        help="after a --: the flags of the training command, on GPUs unless --cpu is among them",
    )


def run(args: argparse.Namespace) -> int:
    """Resolve, plan one step and print.

    Raises:
        ValueError: what the training command itself would refuse, or lengths that cannot be read.
    """
    if not args.flags:
        raise ValueError("no model: give the flags of the training command after a --")
    if not 0 <= args.rank < args.world_size:
        raise ValueError(f"--rank {args.rank}: processes are numbered from 0 to {args.world_size - 1}")
    if args.sampler is not None and args.sampler not in SAMPLERS:
        raise ValueError(f"--sampler {args.sampler} is unknown; choose one of {', '.join(SAMPLERS)}")
    if args.seed < 0:
        raise ValueError(f"--seed {args.seed} must be at least 0")
    given = None if args.lengths is None else read_lengths(args.lengths)
    # Imported here because Megatron takes seconds to import, which --help and errors should not.
    from megatron.bytescale import cpu

    cpu.install_if_wanted(args.flags)  # also where the line is for GPUs, of which this machine has none
    from megatron.bytescale.cli.shared.launch_line import prepare

    with quiet():
        launch = prepare(args.flags, args.world_size, args.rank, args.ranks_per_node, on_cpu="--cpu" in args.flags)
        drawn = launch.sample(args.sampler, args.seed) if args.sampler else launch.draw(given, args.seed)
        found = launch.plan(drawn)
    print(json.dumps(dataclasses.asdict(found), indent=2) if args.json else text_of(found))
    return 0


def text_of(found: DryRun) -> str:
    """Return everything that was found, in sections."""
    groups = {name: ranks_text(ranks) for name, ranks in found.groups.items()}
    received = {name: f"{value:.3f}" for name, value in found.received_gb.items()}
    lines = _pairs(found.about, "")
    lines += ["", f"groups of process {found.rank}", *_pairs(groups)]
    lines += ["", "one step", *_pairs(found.step)]
    lines += ["", "received in the step by the process that receives most, GB", *_pairs(received)]
    lines += ["", "device memory of each stage where it is most, predicted, GB", *_table(found.memory_gb)]
    return "\n".join(lines)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return for example ``0, 8, ..., 1016 (128 ranks)``; short groups in full."""
    if len(ranks) <= 4:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, ..., {ranks[-1]} ({len(ranks)} ranks)"


def _pairs(rows: dict[str, str], indent: str = "  ") -> list[str]:
    return [f"{indent}{name:<{36 - len(indent)}}{value}" for name, value in rows.items()]


def _table(rows: list[dict[str, float]]) -> list[str]:
    lines = ["  " + "".join(f"{name:>13}" for name in rows[0])]
    for row in rows:
        cells = (f"{value:13.2f}" if isinstance(value, float) else f"{value:13d}" for value in row.values())
        lines.append("  " + "".join(cells))
    return lines
