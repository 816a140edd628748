"""``bytescale search``: find the launch line for a model, a cluster and document lengths. No GPU needed."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bytescale_ext.errors import one_line
from bytescale_ext.measure.progress import peak_flops
from bytescale_ext.new_file import write_text
from bytescale_ext.plan.search.explore import (
    Candidate,
    Exploration,
    ScoredStrategy,
    explore,
    run_frontier,
    waiting_whole,
)
from bytescale_ext.plan.search.remedies import remedies
from bytescale_ext.plan.search.space import Branch, Space
from bytescale_ext.plan.search.task import Task
from bytescale_ext.terminal import stream_of_program
from megatron.bytescale.cli.search.choices import BATCH, CHOICES, DECIDED, VALUES
from megatron.bytescale.cli.search.script import LAUNCHERS, ScriptedRun, script_text, write_costs
from megatron.bytescale.cli.search.table import StrategyRow, counts_text, gb_text, strategy_rows, table_text
from megatron.bytescale.cli.search.task import DOCUMENTS_OF_A_RANK, tasks_of
from megatron.bytescale.cli.search.trainable import Trainable
from megatron.bytescale.cli.search.verify import check_machine, correlation, verified, verified_text
from megatron.bytescale.cli.shared.inputs import check_apart, check_picture, check_writable, count, size, size_text
from megatron.bytescale.cli.shared.model_flags import USUAL_VOCAB, given_flags, words_of
from megatron.bytescale.cli.shared.options import (
    add_costs,
    add_json,
    add_lengths,
    add_option,
    add_plot,
    check_device,
    check_sampler,
)

if TYPE_CHECKING:
    from rich.progress import Progress

NAME = "search"
HELP = "find the fastest launch line for a model, a cluster and document lengths, and write it"
EXAMPLE = (
    'bytescale search --model-flags "$MODEL_FLAGS" --sampler byted --seq-length 256K --ranks 64 --device h100 '
    "--device-memory-gb 80 --output runs/launch.sh --global-batch-size 512"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale search``."""
    add_option(parser, "--model-flags", required=True, note="copied to the script")
    add_lengths(parser, required=True)
    add_option(parser, "--seq-length", required=True, note="longer documents are cut")
    parser.add_argument(
        "--global-batch-size", type=size, metavar="N", help="documents of a step (default: the best of several sizes)"
    )
    parser.add_argument(
        "--largest-batch-size",
        type=size,
        metavar="N",
        help=f"without --global-batch-size: the most documents of a step ({DOCUMENTS_OF_A_RANK} for each rank)",
    )
    add_option(parser, "--ranks", required=True, note="one process for each device")
    add_option(parser, "--ranks-per-node", default=8)
    add_option(parser, "--device-memory-gb", required=True)
    add_option(parser, "--host-memory-gb", default=0.0, note="for swapped activations and keys")
    add_costs(parser)
    parser.add_argument(
        "--slowdown",
        type=float,
        metavar="X",
        help="ratio of the seconds per byte between nodes and inside a node (default: from the costs)",
    )
    add_option(parser, "--speeds", note="node by node; a pipeline is as slow as its slowest rank")
    parser.add_argument("--steps", type=count, default=4, metavar="N", help="steps to score strategies on (4)")
    parser.add_argument("--best", type=count, default=10, metavar="N", help="strategies to list (10)")
    parser.add_argument(
        "--explain",
        type=lambda text: f"--{text.lstrip('-')}",
        metavar="FLAG",
        help="list the fastest strategy for each value of this flag, for example tensor-model-parallel-size",
    )
    parser.add_argument("--output", type=Path, metavar="F.sh", help="write the launch script of the fastest strategy")
    parser.add_argument(
        "--launcher", default="torchrun", metavar="NAME", help=f"starts the ranks: {', '.join(LAUNCHERS)}"
    )
    parser.add_argument(
        "--verify",
        type=count,
        metavar="N",
        help="train the best N strategies for a few steps on this machine, with --ranks processes, and compare",
    )
    add_json(parser)
    add_plot(parser, "time against memory of the strategies")


def run(args: argparse.Namespace) -> int:
    """Search, print the strategies and write the script.

    Raises:
        ValueError: options that conflict, a bad file, or no strategy that fits.
    """
    check_options(args)
    tasks = tasks_of(args)
    trainable = Trainable(args.model_flags, tasks[0])
    space = Space(allows=trainable)
    if args.explain is not None:
        return explain(args, tasks, space)
    best = max(args.best, args.verify or 0)
    exploration = watched(tasks, space.branches(tasks[0]), best, sys.stderr.isatty(), opens_all=args.plot is not None)
    if not exploration.found:
        raise ValueError(why_nothing(args, tasks[0], space, exploration))
    task = exploration.found[0].task
    rows = strategy_rows(exploration.found, peak_flops(task.cost.device))
    if args.output is not None:
        write_script(args, exploration.found[0], rows[0])
    if args.plot is not None:
        plot(args, task, exploration)
    if args.json:
        counts = {"branches": exploration.branches, "closed": len(exploration.closed), "unfit": dict(exploration.unfit),
                  "fitting": exploration.fitting, "bounded": exploration.bounded, "replayed": exploration.replayed,
                  "steps_run": exploration.steps_run}  # fmt: skip
        document = {"strategies": [asdict(row) for row in rows], "counts": counts}
        print(json.dumps(document | verification(args, task, exploration)))
        return 0
    sizes = " or ".join(f"{sized.batch:,}" for sized in tasks)
    print(f"{task.cost.device}: {args.ranks} ranks, steps of {sizes} documents; predicted\n")
    print(table_text(rows))
    print(f"\n{counts_text(exploration)}")
    for note in [*notes_of(args, task), *(f"not tried: {reason}" for reason in trainable.refused())]:
        print(note)
    wrote = args.output and f"wrote {one_line(args.output)} and its cost file {one_line(cost_path(args.output))}"
    print(wrote or f"flags of the fastest: {rows[0].flags}", flush=True)
    if args.verify is not None:
        print(f"\nmeasured on this machine, median of {args.steps} steps:\n")
        print(verified_text(verified(args, task, exploration.found[: args.verify])))
    return 0


def why_nothing(args: argparse.Namespace, task: Task, space: Space, exploration: Exploration) -> str:
    """Return the reason why a search found nothing, and changes that help."""
    if not exploration.branches:
        return (
            f"--global-batch-size {args.global_batch_size} is not a multiple of the HDP ranks that tensor sizes and "
            f"stages leave of --ranks {args.ranks}: change one of them"
        )
    assert isinstance(space.allows, Trainable)
    if not exploration.unfit.total():
        return next(iter(space.allows.refused()), "no strategy is possible")
    changes = "; ".join(remedies(task, space, exploration)) or "nothing that was tried helps"
    return f"none of {exploration.unfit.total():,} strategies fits; what fits: {changes}"


def notes_of(args: argparse.Namespace, task: Task) -> list[str]:
    """Return notes about the predictions, a line each."""
    shape, notes = task.cost.shape, []
    if not task.cost.forward.c:
        notes.append("the cost file has no exchange between ranks (c is 0), so rings cost nothing here: profile with "
                     "several")  # fmt: skip
    if "--vocab-size" not in given_flags(words_of(args.model_flags)):
        source = "is assumed" if shape.vocab == USUAL_VOCAB else "is the tokenizer's, padded"
        notes.append(f"--model-flags has no --vocab-size: a vocabulary of {shape.vocab:,} {source}")
    if 0 < shape.num_expert_layers < shape.num_layers:
        notes.append("expert layers are assumed to be spread evenly over the layers")
    if task.rows_multiple > 1 and args.cost_file is None:
        notes.append(
            "FP8 is predicted as bfloat16, because the published timings are in bfloat16: measure it with `bytescale "
            "profile`"
        )
    return notes


def verification(args: argparse.Namespace, task: Task, exploration: Exploration) -> dict[str, object]:
    """Return the JSON entries of ``--verify``."""
    if args.verify is None:
        return {}
    rows = verified(args, task, exploration.found[: args.verify])
    return {"verified": [asdict(row) for row in rows], "rank_correlation": correlation(rows)}


def check_options(args: argparse.Namespace) -> None:
    """Raise ValueError for options that conflict or are out of range, or files that cannot be written."""
    check_picture("--plot", args.plot)
    if args.output is not None:
        check_writable("--output", args.output)
        for path in (args.output, cost_path(args.output)):
            check_apart(path, [args.cost_file] if args.cost_file is not None else [])
    if args.launcher not in LAUNCHERS:
        raise ValueError(f"--launcher {args.launcher} is unknown; choose one of {', '.join(LAUNCHERS)}")
    if args.verify is not None:
        check_machine(args)
    check_batch(args)
    choices = [*CHOICES, *([BATCH] if args.global_batch_size is None else [])]
    if args.explain is not None and args.explain not in choices:
        raise ValueError(f"--explain {args.explain}: the search does not vary it; choose one of {', '.join(choices)}")
    check_sampler(args.sampler)
    check_device(args.device)
    if args.ranks > args.ranks_per_node and args.ranks % args.ranks_per_node:
        raise ValueError(f"--ranks {args.ranks} is not a multiple of --ranks-per-node {args.ranks_per_node}")
    if not 0 < args.device_memory_gb < math.inf:
        raise ValueError(f"--device-memory-gb {args.device_memory_gb:g} must be positive and finite")
    if not 0 <= args.host_memory_gb < math.inf:
        raise ValueError(f"--host-memory-gb {args.host_memory_gb:g} must be at least 0")
    if args.slowdown is not None and not 1 <= args.slowdown < math.inf:
        raise ValueError(f"--slowdown {args.slowdown:g} must be at least 1")
    decided = [word for word in words_of(args.model_flags) if word.partition("=")[0] in DECIDED]
    if decided:
        raise ValueError(f"--model-flags has {decided[0]}, which the search decides: remove it")


def check_batch(args: argparse.Namespace) -> None:
    """Raise ValueError if sizes of steps conflict, are too small for the ranks, or are missing."""
    if args.global_batch_size is not None:
        if args.largest_batch_size is not None:
            raise ValueError(f"--largest-batch-size is for searches without {BATCH}: remove one of them")
        return
    if args.verify is not None:
        raise ValueError(f"--verify trains steps of one size: give {BATCH}")
    if args.largest_batch_size is not None and args.largest_batch_size < args.ranks:
        raise ValueError(
            f"--largest-batch-size {args.largest_batch_size} is less than one document for each of --ranks {args.ranks}"
            f": give at least {args.ranks}, or {BATCH}"
        )


def watched(
    tasks: Sequence[Task], branches: Iterable[Branch], best: int, shows: bool, opens_all: bool = False
) -> Exploration:
    """Search with a progress bar on standard error; Ctrl-C keeps the strategies so far. See ``explore``."""
    exploration = Exploration()
    with progress_bar("searching", shows) as bar:
        line = bar.add_task("", total=best)
        try:
            for exploration in explore(tasks, branches, best, opens_all):
                text = f"{len(exploration.found)} of {best} found, {exploration.steps_run} steps replayed"
                bar.update(line, completed=len(exploration.found), description=text)
        except KeyboardInterrupt:
            if not exploration.found:
                raise
            print("stopped; the best so far:", file=sys.stderr)
    return exploration


def replayed_frontier(exploration: Exploration, batch: int, shows: bool) -> list[Candidate]:
    """Replay the strategies that may be on the frontier, with a progress bar, and return ``waiting_whole``."""
    latest = {candidate.number: candidate for candidate in waiting_whole(exploration, batch)}
    with progress_bar("drawing", shows) as bar, contextlib.suppress(KeyboardInterrupt):
        line = bar.add_task("", total=None)
        for candidate in run_frontier(exploration, batch):
            latest[candidate.number] = candidate
            bar.update(line, description=str(candidate.case.strategy))
    return list(latest.values())


def progress_bar(label: str, shows: bool) -> Progress:
    """Return a progress bar on standard error, which is erased at its end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TimeElapsedColumn

    columns = (label, BarColumn(), "{task.description}", TimeElapsedColumn())
    console = Console(file=stream_of_program(sys.stderr))
    return Progress(*columns, console=console, transient=True, disable=not shows)


def cost_path(script: Path) -> Path:
    """Return the path of the cost file of a script."""
    return script.with_name(f"{script.stem}.cost.json")


def write_script(args: argparse.Namespace, best: ScoredStrategy, row: StrategyRow) -> None:
    """Write the launch script of a strategy and its cost file, in the same folder."""
    comments = [
        f"{row.strategy}: {row.seconds:.4g} s a step predicted, {gb_text(row.device_gb)} GB of a device, {row.binds} "
        "binds.",
        "Give the flags of data, learning rate and duration as arguments.",
    ]
    write_costs(cost_path(args.output), best.task, best.strategy)
    run = ScriptedRun.of(args.model_flags, best.task, best.strategy, cost_path(args.output).name)
    text = script_text(run, args.ranks, args.ranks_per_node, args.launcher, comments)
    write_text(args.output, text)
    args.output.chmod(0o755)


def values_of(flag: str, tasks: list[Task], space: Space) -> dict[str, tuple[list[Task], Iterable[Branch]]]:
    """Return tasks and branches of strategies for each value of a flag."""
    if flag == BATCH:
        return {str(task.batch): ([task], space.branches(task)) for task in tasks}
    in_branch = dict.fromkeys(CHOICES[flag](branch.mesh) for branch in space.branches(tasks[0]))
    return {value: (tasks, with_value(flag, value, space.branches(tasks[0]))) for value in VALUES.get(flag, in_branch)}


def with_value(flag: str, value: str, branches: Iterable[Branch]) -> Iterator[Branch]:
    """Yield branches of the strategies with a value of a flag."""
    for branch in branches:
        if flag in VALUES:
            yield Branch(branch.mesh, (strategy for strategy in branch.strategies if CHOICES[flag](strategy) == value))
        elif CHOICES[flag](branch.mesh) == value:
            yield branch


def explain(args: argparse.Namespace, tasks: list[Task], space: Space) -> int:
    """Print the fastest strategy for each value of one flag. Raises ValueError if no strategy fits with any value."""
    fastest: dict[str, ScoredStrategy] = {}
    for value, (of_value, branches) in values_of(args.explain, tasks, space).items():
        exploration = watched(of_value, branches, 1, sys.stderr.isatty())
        if exploration.found:
            fastest[value] = exploration.found[0]
        elif exploration.unfit and not args.json:
            print(f"{args.explain} {value}: nothing fits ({', '.join(sorted(exploration.unfit))})")
    if not fastest:
        raise ValueError(
            f"no strategy fits with any value of {args.explain}; a search without --explain names changes that help"
        )
    values = sorted(fastest, key=lambda value: fastest[value].seconds / fastest[value].task.batch)
    rows = strategy_rows([fastest[value] for value in values], peak_flops(tasks[0].cost.device))
    if args.json:
        print(json.dumps({value: asdict(row) for value, row in zip(values, rows, strict=True)}))
        return 0
    print(
        table_text([replace(row, strategy=f"{value}: {row.strategy}") for value, row in zip(values, rows, strict=True)])
    )
    return 0


def plot(args: argparse.Namespace, task: Task, exploration: Exploration) -> None:
    """Draw the strategies of a search for steps of one size, after a replay of the possible frontier."""
    from bytescale_ext.draw.search import draw_strategies

    others = replayed_frontier(exploration, task.batch, sys.stderr.isatty())
    scored = [candidate for candidate in exploration.found if candidate.task.batch == task.batch]
    scored += [candidate.scored for candidate in others if candidate.scored is not None]
    figures = [
        (candidate.seconds, candidate.most("device_bytes") / 1e9, str(candidate.strategy)) for candidate in scored
    ]
    bounded = [
        (candidate.seconds / candidate.scale, candidate.case.full_bytes[0] / 1e9)
        for candidate in others
        if candidate.scored is None
    ]
    context = size_text(args.seq_length)
    title = f"{args.ranks} ranks, documents of up to {context} tokens, {task.batch} documents a step: predicted"
    draw_strategies(figures, bounded, args.plot, title)
