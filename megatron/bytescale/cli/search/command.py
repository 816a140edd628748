"""``bytescale search``: find the launch line for a model, a cluster and the lengths of documents. No GPU needed."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from bytescale_ext.measure.cost_file import check_same_model, read_cost, shipped
from bytescale_ext.measure.progress import peak_flops
from bytescale_ext.plan.evaluate.length_samplers import SAMPLERS, sample_documents
from bytescale_ext.plan.search.case import Devices, Task
from bytescale_ext.plan.search.costs import scaled_cost
from bytescale_ext.plan.search.explore import Exploration, Scored, explore, in_sizes
from bytescale_ext.plan.search.remedies import remedies
from bytescale_ext.plan.search.space import Branch, Space
from bytescale_ext.plan.search.strategy import Strategy
from megatron.bytescale.arguments.operators import operators_of_flags
from megatron.bytescale.cli.activations import shape_of_flags
from megatron.bytescale.cli.plan import draw_pieces, read_lengths
from megatron.bytescale.cli.search.choices import BATCH, CHOICES, DECIDED
from megatron.bytescale.cli.search.script import LAUNCHERS, Run, script_text
from megatron.bytescale.cli.search.table import Row, counts_text, rows_of, table_text
from megatron.bytescale.cli.search.verify import check_machine, correlation, verified, verified_text
from megatron.bytescale.cli.shared.inputs import check_picture, check_writable, count, size

NAME = "search"
HELP = "find the fastest launch line for a model, a cluster and the lengths of documents, and write it"
EXAMPLE = (
    'bytescale search --model-flags "$MODEL_FLAGS" --sampler byted --context 256K --gpus 64 --device h100 '
    "--device-memory-gb 80 --output launch.sh --global-batch-size 512"
)

DEVICES: Final = {"h100": "h100_7b"}
"""Devices whose published timings are shipped, as the costs of a model from which those of others follow."""

DOCUMENTS_OF_A_DEVICE: Final = 8
"""The most documents of a step for each device, where their number is left open."""

VOCAB_MULTIPLE: Final = 128
"""Megatron pads the vocabulary to a multiple of this and the tensor-parallel ranks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale search``."""
    parser.add_argument(
        "--model-flags",
        required=True,
        metavar="'FLAGS'",
        help="Megatron's flags of the model in one quoted string; the script gets them as they are",
    )
    lengths = parser.add_mutually_exclusive_group(required=True)
    lengths.add_argument("--lengths", type=Path, metavar="FILE", help="draw documents of this .idx or .npy file")
    lengths.add_argument("--sampler", metavar="NAME", help=f"draw lengths of a distribution: {', '.join(SAMPLERS)}")
    parser.add_argument(
        "--context", type=size, required=True, metavar="S", help="the most tokens of a document; longer ones are cut"
    )
    parser.add_argument(
        "--global-batch-size", type=size, metavar="N", help="documents of a step (default: the best of several sizes)"
    )
    parser.add_argument(
        "--largest-batch-size",
        type=size,
        metavar="N",
        help=f"without --global-batch-size: the most documents of a step ({DOCUMENTS_OF_A_DEVICE} for each device)",
    )
    parser.add_argument("--gpus", type=count, required=True, metavar="N", help="devices of the cluster")
    parser.add_argument("--gpus-per-node", type=count, default=8, metavar="N", help="devices of a node (8)")
    parser.add_argument("--device-memory-gb", type=float, required=True, metavar="G", help="memory of a device")
    parser.add_argument(
        "--host-memory-gb", type=float, default=0.0, metavar="G", help="host memory of each process, to swap to (0)"
    )
    costs = parser.add_mutually_exclusive_group(required=True)
    costs.add_argument("--cost-file", type=Path, metavar="F.json", help="costs of the model by bytescale profile")
    costs.add_argument("--device", metavar="NAME", help=f"published timings, scaled: {', '.join(DEVICES)}")
    parser.add_argument(
        "--slowdown",
        type=float,
        metavar="X",
        help="a byte from another node takes X times as long as in a node (default: as the costs say)",
    )
    parser.add_argument("--steps", type=count, default=4, metavar="N", help="steps to score strategies on (4)")
    parser.add_argument("--best", type=count, default=10, metavar="N", help="strategies to list (10)")
    parser.add_argument(
        "--explain",
        type=lambda text: f"--{text.lstrip('-')}",
        metavar="FLAG",
        help="list the fastest strategy with each value of this flag, for example tensor-model-parallel-size",
    )
    parser.add_argument("--output", type=Path, metavar="F.sh", help="write the launch script of the fastest strategy")
    parser.add_argument("--launch", default="torchrun", metavar="HOW", help=f"one of {', '.join(LAUNCHERS)}")
    parser.add_argument(
        "--verify",
        type=count,
        metavar="N",
        help="train the best N for a few steps on this machine, as many processes as --gpus, and compare",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--plot", type=Path, metavar="F.png", help="draw time against memory of the strategies")


def run(args: argparse.Namespace) -> int:
    """Search, print and write the script.

    Raises:
        ValueError: options that conflict, a bad file, or nothing that fits.
    """
    check_options(args)
    tasks = tasks_of(args)
    if args.explain is not None:
        return explain(args, tasks)
    space = Space()
    best = max(args.best, args.verify or 0)
    seen = watched(tasks, space.branches(tasks[0]), best, sys.stderr.isatty(), opens_all=args.plot is not None)
    if not seen.branches:
        raise ValueError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of the HDP ranks that tensor sizes "
            f"and stages leave of --gpus {args.gpus}: change one of them"
        )
    if not seen.found:
        changes = "; ".join(remedies(tasks[0], space, seen)) or "nothing that was tried helps"
        raise ValueError(f"none of {seen.unfit.total():,} strategies fits; what fits: {changes}")
    task = seen.found[0].task
    rows = rows_of(seen.found, peak_flops(task.cost.device))
    if args.output is not None:
        write_script(args, seen.found[0], rows[0])
    if args.plot is not None:
        plot(args, task, seen)
    if args.json:
        counts = {"branches": seen.branches, "closed": len(seen.closed), "unfit": dict(seen.unfit),
                  "fitting": seen.fitting, "bounded": seen.bounded, "replayed": seen.replayed,
                  "steps_run": seen.steps_run}  # fmt: skip
        found = {"strategies": [asdict(row) for row in rows], "counts": counts}
        print(json.dumps(found | verification(args, task, seen)))
        return 0
    sizes = " or ".join(f"{one.batch:,}" for one in tasks)
    print(f"{task.cost.device}: {args.gpus} devices, steps of {sizes} documents; predicted\n")
    print(table_text(rows))
    print(f"\n{counts_text(seen)}")
    if not task.cost.forward.c:
        print("the cost file has no exchange between ranks (c is 0), so rings cost nothing here: profile with several")
    print(f"wrote {args.output}" if args.output else f"flags of the first: {rows[0].flags}", flush=True)
    if args.verify is not None:
        print(f"\nmeasured on this machine, median of {args.steps} steps:\n")
        print(verified_text(verified(args, task, seen.found[: args.verify])))
    return 0


def verification(args: argparse.Namespace, task: Task, seen: Exploration) -> dict[str, object]:
    """Return what ``--verify`` adds to the JSON."""
    if args.verify is None:
        return {}
    rows = verified(args, task, seen.found[: args.verify])
    return {"verified": [asdict(row) for row in rows], "rank_correlation": correlation(rows)}


def check_options(args: argparse.Namespace) -> None:
    """Raise ValueError for options that conflict or are out of range, or files that cannot be written."""
    check_picture("--plot", args.plot)
    if args.output is not None:
        check_writable("--output", args.output)
    if args.launch not in LAUNCHERS:
        raise ValueError(f"--launch {args.launch} is unknown; choose one of {', '.join(LAUNCHERS)}")
    if args.verify is not None:
        check_machine(args)
    check_batch(args)
    choices = [*CHOICES, *([BATCH] if args.global_batch_size is None else [])]
    if args.explain is not None and args.explain not in choices:
        raise ValueError(f"--explain {args.explain}: the search does not vary it; choose one of {', '.join(choices)}")
    if args.sampler is not None and args.sampler not in SAMPLERS:
        raise ValueError(f"--sampler {args.sampler} is unknown; choose one of {', '.join(SAMPLERS)}")
    if args.device is not None and args.device not in DEVICES:
        raise ValueError(f"--device {args.device} is unknown; choose one of {', '.join(DEVICES)}, or give --cost-file")
    if args.gpus > args.gpus_per_node and args.gpus % args.gpus_per_node:
        raise ValueError(f"--gpus {args.gpus} is not a multiple of --gpus-per-node {args.gpus_per_node}")
    if not 0 < args.device_memory_gb < math.inf:
        raise ValueError(f"--device-memory-gb {args.device_memory_gb:g} must be positive")
    if not 0 <= args.host_memory_gb < math.inf:
        raise ValueError(f"--host-memory-gb {args.host_memory_gb:g} must be at least 0")
    if args.slowdown is not None and not 1 <= args.slowdown < math.inf:
        raise ValueError(f"--slowdown {args.slowdown:g} must be at least 1")
    try:
        words = shlex.split(args.model_flags)
    except ValueError as error:
        raise ValueError(f"--model-flags: {error}") from None
    decided = [word for word in words if word.partition("=")[0] in DECIDED]
    if decided:
        raise ValueError(f"--model-flags has {decided[0]}, which the search decides: remove it")
    if any(word.partition("=")[0] == "--moe-layer-freq" for word in words):
        raise ValueError("--model-flags has --moe-layer-freq: the search takes all layers as equal; remove it")


def check_batch(args: argparse.Namespace) -> None:
    """Raise ValueError where the documents of a step conflict, are too few for the devices, or must be given."""
    if args.global_batch_size is not None:
        if args.largest_batch_size is not None:
            raise ValueError(f"--largest-batch-size is for searches without {BATCH}: remove one of them")
        return
    if args.verify is not None:
        raise ValueError(f"--verify trains steps of one size: give {BATCH}")
    if args.largest_batch_size is not None and args.largest_batch_size < args.gpus:
        raise ValueError(
            f"--largest-batch-size {args.largest_batch_size} is less than one document for each of --gpus {args.gpus}: "
            f"give at least {args.gpus}, or {BATCH}"
        )


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """Return the task of the options in each size of steps, ascending: the given one, or those that are tried.

    They are powers of two for each device, up to the largest, and have the same documents. Raises ValueError as
    ``task_of``.
    """
    if args.global_batch_size is not None:
        return [task_of(args)]
    of_device = args.largest_batch_size // args.gpus if args.largest_batch_size else DOCUMENTS_OF_A_DEVICE
    sizes = [args.gpus << power for power in range(of_device.bit_length())]
    return in_sizes(task_of(args, sizes[-1]), sizes)


def task_of(args: argparse.Namespace, batch: int | None = None) -> Task:
    """Return the task of the options, with steps of ``batch`` documents or the given ones.

    Raises:
        ValueError: another model, a bad file, or too few documents.
    """
    shape = shape_of_flags(args.model_flags)
    if args.cost_file is not None:
        cost = read_cost(args.cost_file)
        if 0 < cost.shape.vocab - shape.vocab < VOCAB_MULTIPLE * cost.tensor_parallel:  # padded, as Megatron does
            shape = replace(shape, vocab=cost.shape.vocab)
        cost = check_same_model(cost, shape, cost.tensor_parallel, cost.dtype, args.cost_file)
    else:
        cost = scaled_cost(shipped(DEVICES[args.device]), shape, 1)
    if args.slowdown is not None:
        cost = replace(cost, slowdown=args.slowdown)
    devices = Devices(
        args.gpus, min(args.gpus, args.gpus_per_node), args.device_memory_gb * 1e9, args.host_memory_gb * 1e9
    )
    on_cuda = cost.on_cuda and "--cpu" not in shlex.split(args.model_flags)
    operators = operators_of_flags(args.model_flags, shape.head_dim, on_cuda, cost.element_bytes)
    return Task(cost, devices, args.context, draw_steps(args, batch or args.global_batch_size), operators)


def draw_steps(args: argparse.Namespace, number: int) -> tuple[tuple[int, ...], ...]:
    """Return the lengths of the documents of each step, ``number`` of them. Raises ValueError for a bad file."""
    seeds = range(args.steps)
    if args.sampler is not None:
        return tuple(sample_documents(args.sampler, args.context, number, seed) for seed in seeds)
    lengths = read_lengths(args.lengths)
    return tuple(tuple(draw_pieces(lengths, args.context, number, seed)) for seed in seeds)


def watched(
    tasks: Sequence[Task], branches: Iterable[Branch], best: int, shows: bool, opens_all: bool = False
) -> Exploration:
    """Search with a progress bar on standard error; Ctrl-C ends it with what was found so far. See ``explore``."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("searching"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    seen = Exploration()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shows) as bar:
        line = bar.add_task("", total=best)
        try:
            for seen in explore(tasks, branches, best, opens_all):
                text = f"{len(seen.found)} of {best} found, {seen.steps_run} steps replayed"
                bar.update(line, completed=len(seen.found), description=text)
        except KeyboardInterrupt:
            if not seen.found:
                raise
            print("stopped; the best so far:", file=sys.stderr)
    return seen


def write_script(args: argparse.Namespace, one: Scored, row: Row) -> None:
    """Write the launch script of a strategy."""
    comments = [
        f"{row.strategy}: {row.seconds:.4g} s a step predicted, {row.device_gb:.1f} GB of a device, {row.binds} binds.",
        "Give the flags of data, learning rate and duration as arguments.",
    ]
    text = script_text(Run.of(args, one.task, one.strategy), args.gpus, args.gpus_per_node, args.launch, comments)
    args.output.write_text(text, encoding="utf-8")
    args.output.chmod(0o755)


def values_of(flag: str, tasks: list[Task]) -> dict[str, tuple[list[Task], list[Branch]]]:
    """Return the tasks and the strategies with each value of a flag, in branches."""
    if flag == BATCH:
        return {str(task.batch): ([task], list(Space().branches(task))) for task in tasks}
    groups: dict[str, tuple[list[Task], list[Branch]]] = {}
    for branch in Space().branches(tasks[0]):
        of_value: dict[str, list[Strategy]] = {}
        for strategy in branch.strategies:
            of_value.setdefault(CHOICES[flag](strategy), []).append(strategy)
        for value, strategies in of_value.items():
            groups.setdefault(value, (tasks, []))[1].append(Branch(branch.mesh, strategies))
    return groups


def explain(args: argparse.Namespace, tasks: list[Task]) -> int:
    """Print the fastest strategy with each value of one flag. Raises ValueError where nothing fits with any value."""
    found: dict[str, Scored] = {}
    for value, (of_value, branches) in values_of(args.explain, tasks).items():
        seen = watched(of_value, branches, 1, sys.stderr.isatty())
        if seen.found:
            found[value] = seen.found[0]
        elif not args.json:
            print(f"{args.explain} {value}: nothing fits ({', '.join(sorted(seen.unfit))})")
    if not found:
        raise ValueError(f"nothing fits with any value of {args.explain}; search without --explain says what would")
    values = sorted(found, key=lambda value: found[value].seconds / found[value].task.batch)
    rows = rows_of([found[value] for value in values], peak_flops(tasks[0].cost.device))
    if args.json:
        print(json.dumps({value: asdict(row) for value, row in zip(values, rows, strict=True)}))
        return 0
    print(
        table_text([replace(row, strategy=f"{value}: {row.strategy}") for value, row in zip(values, rows, strict=True)])
    )
    return 0


def plot(args: argparse.Namespace, task: Task, seen: Exploration) -> None:
    """Draw the strategies of a search in steps of one size."""
    from bytescale_ext.draw.search import draw_strategies

    in_size = [one for one in seen.found if one.task.batch == task.batch]
    found = [(one.seconds, one.most("device_bytes") / 1e9, str(one.strategy)) for one in in_size]
    bounded = [
        (one.seconds / one.scale, one.case.full_bytes[0] / 1e9)
        for one in seen.waiting
        if one.task.batch == task.batch and not one.case.strategy.chooses_slices
    ]
    title = f"{args.gpus} devices, context {args.context}, {task.batch} documents a step: predicted"
    draw_strategies(found, bounded, args.plot, title)
