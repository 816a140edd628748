"""``bytescale dry-run``: forecast a training on N ranks in one process without devices."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.bytescale.cli.profile import quiet
from megatron.bytescale.cli.shared.lengths import read_lengths
from megatron.bytescale.cli.shared.options import add_json, add_lengths, add_option, check_sampler

if TYPE_CHECKING:
    from megatron.bytescale.cli.shared.launch_line import DryRun

NAME = "dry-run"
HELP = "resolve a launch line for N ranks without starting them: groups, plan, messages, memory, refusals"
EXAMPLE = "bytescale dry-run --ranks 1024 --sampler github -- $TRAINING_FLAGS"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale dry-run``."""
    add_option(parser, "--ranks", required=True, note="one process for each device")
    add_option(parser, "--ranks-per-node", default=8)
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="rank whose groups are shown (default: 0)")
    add_lengths(parser, note="default: the .idx files of --data-path in FLAGS")
    add_option(parser, "--seed")
    add_json(parser)
    parser.add_argument(
        "flags",
        nargs="*",
        metavar="-- FLAGS",
        help="flags of the training command, after a --; the training is on GPUs unless --cpu is among them",
    )


def run(args: argparse.Namespace) -> int:
    """Resolve the launch line, plan one step and print the forecast.

    Raises:
        ValueError: flags that the training refuses, or lengths that cannot be read.
    """
    if not args.flags:
        raise ValueError("no model: give the flags of the training command after a --")
    if not 0 <= args.rank < args.ranks:
        raise ValueError(f"--rank {args.rank}: ranks are numbered from 0 to {args.ranks - 1}")
    check_sampler(args.sampler)
    given = None if args.lengths is None else read_lengths(args.lengths)
    # Megatron takes seconds to import, so --help and errors come first.
    from megatron.bytescale import cpu

    cpu.install_if_wanted(args.flags)  # also if the line is for GPUs and this machine has none
    from megatron.bytescale.cli.shared.launch_line import resolve_launch

    with quiet():
        launch = resolve_launch(args.flags, args.ranks, args.rank, args.ranks_per_node, on_cpu="--cpu" in args.flags)
        drawn = launch.sample(args.sampler, args.seed) if args.sampler else launch.draw(given, args.seed)
        forecast = launch.plan(drawn)
    print(json.dumps(dataclasses.asdict(forecast), indent=2) if args.json else text_of(forecast))
    return 0


def text_of(forecast: DryRun) -> str:
    """Return a dry run as text, in sections."""
    groups = {name: ranks_text(ranks) for name, ranks in forecast.groups.items()}
    received = {name: f"{value:.3f}" for name, value in forecast.received_gb.items()}
    lines = _pairs(forecast.about, "")
    lines += ["", f"groups of rank {forecast.rank}", *_pairs(groups)]
    lines += ["", "one step", *_pairs(forecast.step)]
    lines += ["", "received in the step by the rank that receives most, GB", *_pairs(received)]
    lines += ["", "predicted device memory of the fullest rank of each stage, GB", *_table(forecast.memory_gb)]
    return "\n".join(lines)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return for example ``0, 8, ..., 1016 (128 ranks)``; up to four ranks are all listed."""
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
